"""What a rank's state is in a file: JSON that names nothing but the types of `KINDS`."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import types
import typing
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from learner.run_state import (
    KINDS,
    RandomState,
    RankState,
    load_tensors,
    row_as_bytes,
    row_from_bytes,
)
from learner.segments import EncodedPrompt, Segment
from learner.targets import LabelOverride, Target, TokenRole
from shared.config.pipeline import Channel
from shared.errors import ConfigError
from shared.metrics import MetricAccumulator, RankReport
from shared.records import ImageRef
from shared.rollouts import FinishReason, Rollout
from shared.run_files import Span
from shared.trajectory import EnvironmentRollout, ModelCall, TrainingExample


def rank_state() -> RankState:
    """A state with something of everything, though no run has it all."""
    pixels = torch.arange(12.0, dtype=torch.bfloat16).reshape(3, 4)
    prompt = EncodedPrompt((1, 2), (1, 2, 2), torch.tensor([0, 1, 1]), pixels, torch.ones(1, 3))
    roles = np.array([TokenRole.CORRECTED_DESC, TokenRole.CLOSING], dtype=np.uint8)
    target = Target(
        *("half \ud83d", (5, 6), roles, (), (), ()),
        compared_logprobs=(-0.1, float("-inf")),
        label_overrides=(LabelOverride(0, 7, 0),),
    )
    segment = Segment(3, prompt, target, actor="rollout-0")
    rollout = Rollout(
        *(4, 2, "coco-7", (1,), (2,), None, (-1e-17,), None, FinishReason.LENGTH, ()),
        *(3, "rollout-0", 0, 2**63, 0.5),
    )
    example = TrainingExample(
        *([1, 2], [0.0, float("nan")], [0, 1], np.float32(0.1)),
        example_id=Path,
        images=(ImageRef(Path("a.png"), b"\x00\xff", "9f86"),),
    )
    played = EnvironmentRollout(
        *(0, 41, np.float64(0.3), {"exact": 1.0}, None, False, 1, 1, 0, 0, (example,)),
        *([{"role": "user", "content": "2 + 2"}], "4", "env-0", 1.0, 2.0),
        calls=(ModelCall("", 0, 9),),
    )
    totals = MetricAccumulator()
    totals.add_mean("packing/learned_age", 3.0, 2)
    span = Span("learner", "finish step", 1.0, 2.0, {"answers": 3})
    report = RankReport(4, Channel.B, 3, totals, {"sync/mode": 1.0}, (span,), refilled={3: 4})
    return RankState(
        *(5, RandomState.capture(torch.device("cpu")), (segment, segment)),
        answers_ahead=(rollout, (played,)),
        report=report,
        fingerprints={"data.train": "ab"},
    )


def saved(folder: Path, state: RankState) -> Path:
    state.writer(0, {"w/master": torch.ones(2)})(folder)
    return folder / "run_state" / "rank_0.json"


def test_a_state_comes_back_with_its_types_and_bits_and_shares_what_it_shared(tmp_path):
    state = rank_state()
    saved(tmp_path, state)
    read = RankState.load(tmp_path, 0)
    tensors, are_as_saved = load_tensors(tmp_path, 0, 1)
    assert are_as_saved
    assert torch.equal(tensors["w/master"], torch.ones(2))
    assert torch.equal(read.random.cpu, state.random.cpu) and read.random.device is None
    (segment, other), (was, _) = read.carried, state.carried
    assert segment.prompt.pixel_values_RD is other.prompt.pixel_values_RD
    assert segment.prompt.pixel_values_RD.dtype is torch.bfloat16
    assert torch.equal(segment.prompt.pixel_values_RD, was.prompt.pixel_values_RD)
    assert segment.target.roles.dtype == np.uint8
    for name in ("token_ids", "sample_id", "compared_logprobs", "label_overrides"):
        assert getattr(segment.target, name) == getattr(was.target, name)
    assert type(segment.target.label_overrides[0]) is LabelOverride
    rollout, (played,) = read.answers_ahead
    assert rollout == state.answers_ahead[0] and rollout.finish_reason is FinishReason.LENGTH
    (example,) = played.examples
    assert example.images == state.answers_ahead[1][0].examples[0].images
    assert np.isnan(example.logprobs[1]) and example.reward == float(np.float32(0.1))
    assert example.example_id == str(Path), "an id of a user's type is its text"
    assert dataclasses.replace(played, examples=()) == dataclasses.replace(
        state.answers_ahead[1][0], examples=()
    )
    assert read.report == state.report
    assert type(read.report.spans) is tuple and read.report.channel is Channel.B


def test_a_row_is_sent_with_its_types_and_bits():
    (was, _) = rank_state().carried
    segment, other = row_from_bytes(row_as_bytes([was, was]))
    assert type(segment) is Segment and len(segment) == len(was)
    assert segment.prompt.pixel_values_RD is other.prompt.pixel_values_RD
    assert torch.equal(segment.prompt.pixel_values_RD, was.prompt.pixel_values_RD)
    assert segment.target.compared_logprobs == was.target.compared_logprobs
    assert segment.target.roles.dtype == np.uint8


@pytest.mark.parametrize("num_saved", [1, 2, 4])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 5])
def test_saved_shards_are_cut_anew_as_fsdp_cuts_them(num_saved, num_shards, tmp_path):
    whole = {"w/master": torch.arange(21.0).reshape(7, 3), "b/exp_avg": torch.arange(3.0)}
    step = {"w/step": torch.tensor(9.0)}

    def shards(number):
        cut = {name: list(value.chunk(number)) for name, value in whole.items()}
        for name, parts in cut.items():
            parts += [whole[name][:0]] * (number - len(parts))
        return [{name: cut[name][shard] for name in whole} | step for shard in range(number)]

    for rank, tensors in enumerate(shards(num_saved)):
        rank_state().writer(rank, {name: one.clone() for name, one in tensors.items()})(tmp_path)
    for shard, expected in enumerate(shards(num_shards)):
        found, are_as_saved = load_tensors(tmp_path, shard, num_shards)
        assert are_as_saved == (num_saved == num_shards)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], one) for name, one in expected.items())


class Harmful:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return (Path.mkdir, (self.folder,))


def test_a_pickle_in_a_checkpoint_is_not_executed_under_any_name(tmp_path):
    file = saved(tmp_path, rank_state())
    harmful = pickle.dumps(Harmful(tmp_path / "executed"))
    for path, load in (
        (file, lambda: RankState.load(tmp_path, 0)),
        (file.with_name("rank_0.safetensors"), lambda: load_tensors(tmp_path, 0, 1)),
    ):
        before = path.read_bytes()
        path.write_bytes(harmful)
        with pytest.raises(ConfigError, match="cannot be read"):
            load()
        path.write_bytes(before)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "value",
    [
        {"Path": {"a": 1}},
        {"os.system": {"command": "true"}},
        {"RankState": {"step": 1}},
        {"FinishReason": {"value": "stop", "names": []}},
        {"tensor": "9"},
        {"dict": [[1]]},
        {"list": [], "path": "a"},
        [1],
    ],
)
def test_a_state_that_names_anything_else_is_damaged(value, tmp_path):
    tensors = base64.b64encode(safetensors.torch.save({})).decode()
    saved(tmp_path, rank_state()).write_text(json.dumps({"state": value, "tensors": tensors}))
    with pytest.raises(ConfigError, match="cannot be read"):
        RankState.load(tmp_path, 0)


def test_every_type_that_a_state_is_annotated_with_can_be_saved():
    found: set[type] = set()
    for kind in (RankState, Rollout, EnvironmentRollout):
        collect(kind, found)
    assert set(KINDS.values()) == found


def collect(kind: typing.Any, found: set[type]) -> None:
    """Add the dataclasses, named tuples and enumerations that an annotation leads to."""
    for part in typing.get_args(kind):
        collect(part, found)
    if not isinstance(kind, type) or isinstance(kind, types.GenericAlias) or kind in found:
        return
    if issubclass(kind, Enum):
        found.add(kind)
    elif dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        found.add(kind)
        for part in typing.get_type_hints(kind).values():
            collect(part, found)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o700])
def test_files_of_a_state_are_as_open_as_their_folder(mode, tmp_path):
    """safetensors leaves its files to their owner alone, and other files follow the umask."""
    folder = tmp_path / "run_state"
    folder.mkdir()
    folder.chmod(mode)
    saved(tmp_path, rank_state())
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == dict.fromkeys(("rank_0.json", "rank_0.safetensors"), mode & 0o666)
