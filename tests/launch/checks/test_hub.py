"""`model.path` may be a hub's id: it is found in the cache, or fetched, or the error says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from config_support import configuration
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from rich.console import Console

from launch.checks.hub import FILES, fetch_model, fetched_model
from launch.inspect.evaluate import ModelOptions, run
from learner.model.checkpoint_folder import hub_id
from shared.errors import ConfigError

SHA = "0123456789012345678901234567890123456789"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, as huggingface_hub has it, of somebody without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def offline(*_: Any, **__: Any) -> None:
        raise OfflineModeIsEnabled("Cannot reach the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    return tmp_path / "hub"


WHOLE = ("config.json", "tokenizer_config.json", "model.safetensors")


def keep(cache: Path, revision: str | None = None, files: Sequence[str] = WHOLE) -> Path:
    """Put a model into the cache, as a fetch of this revision does."""
    model = cache / "models--some--model"
    if revision != SHA:
        (model / "refs").mkdir(parents=True)
        (model / "refs" / (revision or "main")).write_text(SHA)
    snapshot = model / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[dict[str, Any]]]:
    """A hub with some/model of so many bytes; returns the downloads that were asked for."""
    asked: list[dict[str, Any]] = []

    def make(num_bytes: int) -> list[dict[str, Any]]:
        siblings = [
            SimpleNamespace(rfilename=name, size=num_bytes, lfs=None, blob_id=f"content of {name}")
            for name in ("model.safetensors", "pytorch_model.bin")
        ]
        info = SimpleNamespace(sha=SHA, siblings=siblings)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
        from_cache = huggingface_hub.snapshot_download

        def download(repo: str, **options: Any) -> str:
            if options.get("local_files_only"):
                return from_cache(repo, **options)
            asked.append({"repo": repo, **options})
            return str(keep(cache, options["revision"]))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    return make


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("some/model", True),
        ("some/model@v1.0", True),
        ("here/model", False),
        ("/some/model", False),
        ("some/more/model", False),
        ("model", False),
    ],
)
def test_a_hubs_id_is_told_from_a_folder(cache: Path, path: str, is_id: bool) -> None:
    Path("here").mkdir()
    assert (hub_id(Path(path)) == path) is is_id


def test_what_is_in_the_cache_is_used_without_the_hub(cache: Path) -> None:
    folder = keep(cache)
    lines: list[str] = []
    assert fetch_model("some/model", lines.append) == str(folder)
    assert lines == [f"model     some/model at revision {SHA}, in {folder}"]


def test_what_is_not_is_fetched_at_the_revision_of_now_without_other_formats(hub: Any) -> None:
    asked = hub(2_000_000)
    lines: list[str] = []
    fetch_model("some/model", lines.append)
    assert asked == [{"repo": "some/model", "revision": None, "allow_patterns": list(FILES)}]
    assert lines[0].startswith(f"model     fetching some/model at revision {SHA}: 0.00 GB, ")
    assert lines[1].startswith("model     fetched in 0 s, to ") and lines[1].endswith(SHA)


def test_what_was_fetched_is_found_in_the_cache_from_then_on(hub: Any) -> None:
    asked = hub(2_000_000)
    assert fetch_model("some/model", print) == fetch_model("some/model", print)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "there", [["config.json"], ["config.json", "tokenizer_config.json"], ["model.safetensors"]]
)
def test_what_another_program_fetched_in_part_is_not_the_model(
    cache: Path, there: list[str]
) -> None:
    keep(cache, files=there)
    with pytest.raises(ConfigError, match=r"not complete in .*hub"):
        fetch_model("some/model", print)


def test_of_several_files_of_weights_all_are_needed(cache: Path) -> None:
    snapshot = keep(cache)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"not complete in .*hub"):
        fetch_model("some/model", print)


def test_what_an_interrupted_fetch_left_needs_no_room_again(hub: Any, cache: Path) -> None:
    asked = hub(10**18)
    blobs = cache / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "content of model.safetensors.incomplete").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ConfigError, match=r"needs 999999998\.93 GB"):
        fetch_model("some/model", print)
    assert not asked


@pytest.mark.parametrize("path", ["a b/model", "~/model", "some/mo--del"])
def test_what_can_be_no_hubs_id_is_told(cache: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no folder {path}, and it is not a valid id"):
        fetch_model(path, print)


def test_a_disk_that_is_too_small_is_told_before(hub: Any) -> None:
    asked = hub(10**18)
    with pytest.raises(ConfigError, match=r"some/model .*1000000000\.00 GB.* HF_HOME"):
        fetch_model("some/model", print)
    assert not asked


def test_without_a_network_the_error_has_the_command(cache: Path) -> None:
    message = "not complete in .*hub, and the hub cannot be reached .* `hf download some/model --revision v2`"
    with pytest.raises(ConfigError, match=message):
        fetch_model("some/model@v2", print)


def test_a_folder_is_left_as_it_is(demo_checkpoint: Path, demo_data: Any, tmp_path: Path) -> None:
    config = configuration(demo_checkpoint, demo_data, tmp_path)
    assert fetched_model(config.model, print) is config.model


def test_the_report_of_a_hubs_model_is_named_after_the_model_not_its_revision(
    cache: Path, tmp_path: Path
) -> None:
    keep(cache)
    (tmp_path / "evaluations" / "model_val").mkdir(parents=True)
    options = ModelOptions(model=Path("some/model"), data=tmp_path / "val.jsonl")
    with pytest.raises(ConfigError, match=r"evaluations/model_val already holds a report"):
        run(options, [f"telemetry.run_dir={tmp_path}"], Console())
