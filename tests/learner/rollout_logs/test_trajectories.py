"""A line of an environment's rollout log: what is written of a rollout, and what is no such
line."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from edited_lines import append_edited

from learner.rollout_logs.trajectories import (
    TrajectoryRecord,
    logged_rollout,
    read_step,
    trajectory_record,
)
from learner.rollout_logs.writer import StepLog, step_path
from shared.errors import ConfigError, RecordError
from shared.records import ImageRef
from shared.trajectory import EnvironmentRollout, ModelCall, TrainingExample

ONE, TWO = (ImageRef(None, data, sha256(data).hexdigest()) for data in (b"one", b"two"))
MERGED = TrainingExample(
    token_ids=[5, 6, 7, 8, 9],
    logprobs=[0.0, 0.0, -0.5, 0.0, -0.25],
    mask=[0, 0, 1, 0, 1],
    reward=0.75,
    advantage=0.25,
    weight_version=6,
    token_advantages=[0.0, 0.0, 0.5, 0.0, -0.25],
    steps=(0, 2),
    step_ends=(3, 5),
    token_is_relative=[1, 1, 1, 0, 0],
    group_rewards=(0.75, 0.1, 0.25),
    images=(ONE, TWO),
    engine="actor-2",
)
SINGLE = TrainingExample([5, 4], [0.0, -1.5], [0, 1], reward=0.75, advantage=None, steps=(1,))
ROLLOUT = EnvironmentRollout(
    position=3,
    example=12,
    reward=0.75,
    metrics={"exact": 1.0, "form": 0.5},
    error=None,
    is_truncated=False,
    num_turns=3,
    num_tokens=3,
    num_length_limited=0,
    num_splits=1,
    examples=(MERGED, SINGLE),
    prompt=[{"role": "user", "content": [{"type": "text", "text": "first of 431"}]}],
    completion=[
        {"role": "assistant", "content": None, "tool_calls": ['{"id": "a"}']},
        {"role": "tool", "content": "4\ud800"},
    ],
    actor="environment-0",
    started_s=100.0,
    generate_s=1.5,
    reward_errors={"judge": "TimeoutError: \ud800"},
    given_up=("judge",),
    num_tool_calls=2,
    calls=(ModelCall("", 0, 2**63 + 1, "actor-2"), ModelCall("/0", 0, 7)),
)
FAILED = replace(
    ROLLOUT,
    position=4,
    error="ValueError: no\udcff",
    reward=0.0,
    metrics={},
    examples=(),
    prompt=None,
    completion=None,
)


def logged(folder: Path, *rollouts: EnvironmentRollout) -> list[TrajectoryRecord]:
    log = StepLog(folder)
    log.begin(7)
    for rollout in rollouts:
        log.write(trajectory_record(7, rollout))
    log.close()
    return read_step(step_path(folder, 7))


def test_a_rollout_that_was_written_is_read_back(tmp_path: Path) -> None:
    line, failed = logged(tmp_path, ROLLOUT, FAILED)
    assert line == json.loads(json.dumps(trajectory_record(7, ROLLOUT)))
    assert (line["step"], line["position"], line["example"]) == (7, 3, 12)
    assert (line["reward"], line["num_splits"], line["generate_s"]) == (0.75, 1, 1.5)
    assert (line["prompt"], line["completion"]) == (ROLLOUT.prompt, ROLLOUT.completion)
    assert (line["metrics"], line["reward_errors"]) == (ROLLOUT.metrics, ROLLOUT.reward_errors)
    assert line["calls"] == [
        {"path": "", "turn": 0, "seed": 2**63 + 1, "engine": "actor-2"},
        {"path": "/0", "turn": 0, "seed": 7, "engine": None},
    ]
    assert line["examples"][0] == {
        "token_ids": [5, 6, 7, 8, 9],
        "mask": [0, 0, 1, 0, 1],
        "logprobs": [0.0, 0.0, -0.5, 0.0, -0.25],
        "reward": 0.75,
        "advantage": 0.25,
        "token_advantages": [0.0, 0.0, 0.5, 0.0, -0.25],
        "weight_version": 6,
        "engine": "actor-2",
        "turns": [0, 2],
        "images": [ONE.sha256, TWO.sha256],
        "turn_ends": [3, 5],
        "token_is_relative": [1, 1, 1, 0, 0],
        "group_rewards": [0.75, 0.1, 0.25],
    }
    assert line["examples"][1]["images"] == []
    assert (failed["error"], failed["examples"]) == ("ValueError: no\udcff", [])
    assert failed["completion"] is None


def test_all_that_is_learned_of_a_rollout_comes_back_to_the_bit(tmp_path: Path) -> None:
    exact = replace(MERGED, logprobs=[0.0, 0.0, -1 / 3, 0.0, -1e-300], advantage=0.1 + 0.2)
    rollout = replace(ROLLOUT, examples=(exact, SINGLE), metrics={"exact": math.inf})
    line, failed = logged(tmp_path, rollout, FAILED)
    log = StepLog(tmp_path)
    for image in (ONE, TWO, ONE):
        log.keep_picture(image)
    again = logged_rollout(line, tmp_path)
    read = [
        replace(
            example, images=tuple(replace(one.with_data(), path=None) for one in example.images)
        )
        for example in again.examples
    ]
    # Who is who and when it was is of messages and timelines alone.
    here = {"example_id": 12, "rollout": 3}
    assert read == [replace(example, **here) for example in rollout.examples]
    assert read[0].engine == "actor-2"
    assert replace(again, examples=()) == replace(rollout, examples=(), started_s=0.0)
    assert logged_rollout(failed, tmp_path) == replace(FAILED, started_s=0.0)
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted(
        image.sha256 for image in (ONE, TWO)
    )


def test_a_line_of_an_older_version_is_read_and_is_no_rollout_to_learn(tmp_path: Path) -> None:
    (line,) = logged(tmp_path, ROLLOUT)
    for name in ("num_tokens", "num_length_limited", "num_tool_calls", "given_up"):
        del line[name]
    for example in line["examples"]:
        for name in ("turn_ends", "token_is_relative", "group_rewards"):
            del example[name]
    step_path(tmp_path, 7).write_text(json.dumps(line) + "\n")
    assert read_step(step_path(tmp_path, 7)) == [line]
    with pytest.raises(ConfigError, match=r"^run: .*no num_tokens"):
        logged_rollout(line, tmp_path)


@pytest.mark.parametrize(
    "completion",
    [
        pytest.param(" a time\ud800", id="text, where an environment completes text"),
        pytest.param(
            [{"content": 5}, {"role": None, "\ud800": [1, {"more": None}]}], id="messages"
        ),
    ],
)
def test_a_completion_may_be_whatever_an_environment_has_made_of_it(
    tmp_path: Path, completion: Any
) -> None:
    (line,) = logged(tmp_path, replace(ROLLOUT, prompt="Once upon", completion=completion))
    assert (line["prompt"], line["completion"]) == ("Once upon", completion)


def test_numbers_that_the_learner_refuses_later_are_read_all_the_same(tmp_path: Path) -> None:
    """The line of the rollout that ended a run is the one that somebody wants to see."""
    example = replace(SINGLE, logprobs=[0.0, math.nan], advantage=math.nan)
    (line,) = logged(tmp_path, replace(ROLLOUT, metrics={"exact": math.inf}, examples=(example,)))
    assert math.isinf(line["metrics"]["exact"])
    assert math.isnan(line["examples"][0]["logprobs"][1])


@pytest.mark.parametrize(
    ("where", "value", "field"),
    [
        ("step", -1, "step"),
        ("position", "3", "position"),
        ("example", None, "example"),
        ("more", 1, "more"),
        ("reward", math.nan, "reward"),
        ("metrics", {"exact": True}, "metrics.exact"),
        ("error", 5, "error"),
        ("prompt", 5, "prompt"),
        ("completion", ["first"], "completion"),
        ("examples.0.more", 1, "examples[0].more"),
        ("examples.0.token_ids.1", -1, "examples[0].token_ids[1]"),
        ("examples.0.mask.2", 2, "examples[0].mask[2]"),
        ("examples.1.logprobs", "-1", "examples[1].logprobs"),
        ("examples.0.advantage", "1", "examples[0].advantage"),
        ("examples.0.images", [5], "examples[0].images[0]"),
        ("examples.1.images", None, "examples[1].images"),
    ],
)
def test_a_line_that_was_edited_is_refused_by_file_line_and_field(
    tmp_path: Path, where: str, value: Any, field: str
) -> None:
    logged(tmp_path, ROLLOUT)
    path = step_path(tmp_path, 7)
    append_edited(path, where, value)
    message = rf"step_000007\.jsonl:2: {re.escape(field)}: .*; do not edit a run's log"
    with pytest.raises(RecordError, match=message):
        read_step(path)
