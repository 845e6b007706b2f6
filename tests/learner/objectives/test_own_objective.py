"""An objective of one's own module, by the example of examples/algorithms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml

from learner.objectives.base import (
    BoxSupervision,
    CoordSupervision,
    RowValues,
    Supervision,
    TextSupervision,
)
from learner.objectives.registry import build_objectives
from shared.config.pipeline import Channel, PipelineSection
from shared.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples" / "algorithms"
MODULE = (EXAMPLES / "focal_text.py").read_text()
PIPELINE = (
    (EXAMPLES / "objective" / "focal.yaml")
    .read_text()
    .replace("examples.algorithms.", "own_package.")
)
PATH = "rollout_matching.pipeline.objective[1]"
COORD_IDS = torch.arange(1000)


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    """A package with the example's module, in a folder that Python looks into."""
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "focal_text.py").write_text(MODULE)
    monkeypatch.syspath_prepend(EXAMPLES.parents[1])
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in ("own_package", "own_package.focal_text", "own_package.other"):
        sys.modules.pop(name, None)


def built(channel=Channel.B, **changes):
    """The example's pipeline with changes to the entry of its own objective, as it is built."""
    pipeline = yaml.safe_load(PIPELINE)
    pipeline["objective"][1].update(changes)
    return build_objectives(PipelineSection.model_validate(pipeline), channel, COORD_IDS)


def problems(**changes):
    with pytest.raises(ConfigError) as error:
        built(**changes)
    return list(error.value.problems)


def row(logits_XV, token_ids_X, weight_X):
    """A row with text alone: its values and its supervision."""
    nothing = torch.empty(0)
    no_places = torch.empty(0, dtype=torch.int64)
    ce_X = torch.nn.functional.cross_entropy(logits_XV, token_ids_X, reduction="none")
    values = RowValues(ce_X, None, torch.empty(0, 1000), None, None, nothing)
    text = TextSupervision(torch.arange(len(token_ids_X)), weight_X, weight_X)
    coord = CoordSupervision(no_places, nothing, nothing)
    return values, Supervision(text, coord, BoxSupervision(no_places.reshape(0, 4), nothing))


def test_an_objective_of_ones_own_module_is_built_with_its_settings_and_learns():
    logits_XV = torch.randn(6, 50, generator=torch.Generator().manual_seed(3), requires_grad=True)
    token_ids_X = torch.arange(6)
    weight_X = torch.tensor([0.5, 0.25, 0.25, 0.2, 0.3, 0.5])  # two segments
    _, focal = built(weight=3.0).objectives
    assert focal.term_names == ("focal_text",)
    assert built().needs.text_ce

    loss, (term,) = focal(*row(logits_XV, token_ids_X, weight_X))
    p_X = torch.softmax(logits_XV.double(), dim=-1)[torch.arange(6), token_ids_X].tolist()
    slow = sum(
        weight * (1 - p) ** 2 * -torch.tensor(p).log().item()
        for weight, p in zip(weight_X.tolist(), p_X, strict=True)
    )
    assert term.item() == pytest.approx(slow, rel=1e-5)
    assert loss.item() == pytest.approx(3 * slow, rel=1e-5)
    assert not term.requires_grad

    loss.backward()
    step = logits_XV.detach() - 0.1 * logits_XV.grad
    assert focal(*row(step, token_ids_X, weight_X)).loss.item() < loss.item()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "gamma: is required, and missing; add it"),
        ({"gamma": 0.5}, "gamma: must be at least 1, got 0.5; "),
        ({"gamma": "2"}, "gamma: must be a number, got the text '2'; write 2.0 without quotes"),
    ],
)
def test_its_settings_are_checked_like_those_of_any_entry(config, expected):
    (line,) = problems(config=config)
    assert line.startswith(f"{PATH}.config.{expected}")


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("no_such_module:Focal", "", "module no_such_module not found; start the run in"),
        ("own_package.no:Focal", "", "module own_package.no not found; start the run in"),
        (
            "own_package.focal_text:Focal",
            "",
            "own_package.focal_text has no Focal; define it there",
        ),
        (
            "own_package.other:Bare",
            "class Bare: term_names = ()",
            "Bare has no Config, __call__, needs; ",
        ),
        (
            "own_package.other:Loose",
            "from own_package import focal_text\nclass Loose(focal_text.FocalText):\n    class Config: pass",
            "Loose.Config is not a settings section; derive it from shared.config.base.Section",
        ),
    ],
)
def test_what_is_no_objective_is_refused_with_what_it_lacks(own_module, name, code, expected):
    (own_module / "other.py").write_text(code)
    (line,) = problems(name=name)
    assert line.startswith(f"{PATH}.name: {expected}")


def test_advantages_need_a_class_that_reads_sampled_tokens_and_a_baseline_that_exists():
    credit = {"normalize": "step", "advantage_std": False}
    (line,) = problems(advantages=credit, channels=["B"])
    assert line.startswith(f"{PATH}.advantages: has no effect, because own_package.focal_text:")
    name = "examples.algorithms.sequence_ratio:SequenceRatio"
    entry = {"name": name, "channels": ["B"], "config": {"clip_low": 0.1, "clip_high": 0.1}}
    missing = credit | {"advantage_baseline": "own_package.focal_text:less_median"}
    (line,) = problems(**entry, advantages=missing)
    assert line.startswith(f"{PATH}.advantages.advantage_baseline: own_package.focal_text has no")
    assert built(**entry, advantages=credit).diagnostics[0].names == (
        "policy/logprob_difference",
        "policy/entropy",
    )


def test_two_objectives_that_log_the_same_term_are_refused(own_module):
    (own_module / "focal_text.py").write_text(MODULE.replace('("focal_text",)', '("token_ce",)'))
    (line,) = problems()
    assert line.startswith(
        f"{PATH}.name: own_package.focal_text:FocalText logs loss/token_ce, but "
    )


@pytest.mark.parametrize("needs", ["reference=True", "reference_top=20"])
def test_one_that_needs_the_reference_is_refused_where_none_is_declared(own_module, needs):
    code = MODULE.replace("LogitNeeds(text_ce=True)", f"LogitNeeds(text_ce=True, {needs})")
    assert code != MODULE
    (own_module / "focal_text.py").write_text(code)
    (line,) = problems()
    assert line.startswith(f"{PATH}.name: own_package.focal_text:FocalText needs the reference")
    entry = {"name": "reference_kl", "enabled": True, "weight": 0.0, "channels": ["B"]}
    pipeline = yaml.safe_load(PIPELINE)
    pipeline["objective"].append(entry | {"config": {"estimator": "k3"}})
    for channel in Channel:
        build_objectives(PipelineSection.model_validate(pipeline), channel, COORD_IDS)
