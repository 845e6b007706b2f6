"""The reference of the configuration is generated from the schema."""

import re
from pathlib import Path

import pytest

from launch.tools.keys import PAGES, all_keys, keys_below, main, markdown
from shared.errors import ConfigError

PAGES_FOLDER = Path(__file__).parents[3] / "docs" / "reference" / "keys"


def test_every_key_is_explained_on_exactly_one_page():
    text = "\n".join(map(markdown, PAGES))
    keys = all_keys()
    assert len(keys) > 150
    assert [key.path for key in keys if not key.description] == []
    on_pages = re.findall(r"^(?:## |\*\*)`([^`]+)`", text, re.MULTILINE)
    assert sorted(on_pages) == sorted(key.path for key in keys)


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_are_as_the_schema_is(page):
    """`rollmatch keys --markdown docs/reference/keys` writes them again."""
    assert (PAGES_FOLDER / f"{page}.md").read_text(encoding="utf-8") == markdown(page)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("training.max_grad_norm", "number > 0 or null; default 1.0"),
        ("training.seed", "integer >= 0, < 4294967296, required"),
        ("learner.parallel", "`ddp` | `fsdp`; default ddp"),
        ("data.augment.scale", "list of 2: number > 0, <= 4.0; default [1.0, 1.0]"),
        ("rollout_matching.pipeline.objective[token_ce].name", "`token_ce`, required"),
        ("rollout_matching.vllm.server.servers[].base_url", "text, required"),
    ],
)
def test_a_key_has_its_type_and_default(path, kind):
    (key,) = [key for key in all_keys() if key.path == path]
    assert key.kind == kind


def test_a_section_has_its_keys_and_a_wrong_one_is_refused_with_the_nearest(capsys):
    main(["rollout_matching.vllm.server"])
    assert "rollout_matching.vllm.server.servers[].group_port" in capsys.readouterr().out
    assert {key.path.split(".")[0] for key in keys_below("training")} == {"training"}
    with pytest.raises(ConfigError, match=r"trainin is not a key.*training"):
        keys_below("trainin")
