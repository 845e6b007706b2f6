"""How rollouts ended is counted by who ended them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rollout_support import make_rollout

from learner.segments import EncodedPrompt, Segment
from learner.step import RowResult
from learner.step_metrics import StepMetrics
from learner.targets import (
    LabelOverride,
    ParsedAndMatched,
    Target,
    TextWeights,
    TokenRole,
)
from shared.config.pipeline import Channel
from shared.grounding.matching import MatchedPair, MatchResult
from shared.grounding.objects import DroppedObject, DropReason, ParsedObject, ParsedRollout
from shared.records import GeometryKind, GroundTruthObject
from shared.rollouts import FinishReason
from shared.run_files import Span
from shared.schedule import StepPlan
from shared.trajectory import EnvironmentRollout

ROLLOUT = make_rollout((1, 2))
SOUND = EnvironmentRollout(
    position=0,
    example=0,
    reward=0.5,
    metrics={},
    error=None,
    is_truncated=False,
    num_turns=1,
    num_tokens=2,
    num_length_limited=0,
    num_splits=0,
    examples=(),
    prompt=None,
    completion=None,
    actor="env",
    started_s=1.0,
    generate_s=0.5,
)


def step_metrics() -> StepMetrics:
    plan = StepPlan(0, Channel.B, 8, 0, False, False)
    return StepMetrics(plan, "learner", capacity=8, min_fill_ratio=0.5)


FOUND = ParsedObject("object_1", 1, GeometryKind.BBOX, "x", (1, 1, 2, 2), (1, 2, 3, 4), (0, 6))
PARSED = ParsedRollout((), "{", (), (), None, truncated=True, fallback=True)
TRUTH = GroundTruthObject(GeometryKind.BBOX, (1, 1, 2, 2), "x")
COUNTED = (
    *("truncated", "fallback", "valid_objects", "objects_after_close", "excluded"),
    *("ground_truth", "matched", "appended", "gating_rejections"),
)
SEGMENT = Segment(
    0, EncodedPrompt.from_text((1, 2)), Target("scene", (1, 2), np.zeros(2, np.uint8), (), (), ())
)
READING = ParsedAndMatched(PARSED, PARSED, MatchResult((), (), (), 0), (), (), (), "")


def test_what_the_guard_ended_is_counted_apart_from_what_reached_its_limit() -> None:
    metrics = step_metrics()
    for reason, number in (("repetition", 3), ("length", 2), ("stop", 5)):
        rollout = replace(ROLLOUT, finish_reason=FinishReason(reason))
        for _ in range(number):
            metrics.add_rollout(rollout, READING, (), staleness=0)
    counted = metrics.totals.as_dict()
    assert counted["rollout/num"] == 10
    assert counted["rollout/num_repeat_terminated"] == 3
    assert counted["rollout/num_length_limited"] == 2
    assert counted["rollout/length_limited_rate"] == 0.2


def test_what_an_answer_held_and_what_became_of_it_is_counted() -> None:
    pairs = (MatchedPair(0, 0, 0.9), MatchedPair(1, 2, 0.8))
    parsed = replace(PARSED, objects=(FOUND,) * 6, fallback=False, num_behind=3)
    reading = replace(
        READING,
        parsed=parsed,
        match=MatchResult(pairs, (2, 3, 4, 5), (1,), gating_rejections=7),
        excluded=pairs[:1],
        appended=(0, 1, 3, 4, 5),
    )
    metrics = step_metrics()
    whole = replace(reading, parsed=replace(parsed, truncated=False))
    for one in (reading, whole, whole):
        metrics.add_rollout(ROLLOUT, one, (TRUTH,) * 8, staleness=0)
    counted = metrics.totals.as_dict()
    assert {name: counted[f"rollout/num_{name}"] for name in COUNTED} == {
        "truncated": 1,
        "fallback": 0,
        "valid_objects": 18,
        "objects_after_close": 9,
        "excluded": 3,
        "ground_truth": 24,
        "matched": 6,
        "appended": 15,
        "gating_rejections": 21,
    }


def test_doubles_and_the_share_of_the_top_name_are_counted() -> None:
    """Of the six objects the third and the last repeat the first; another name is no double."""
    places = [(1, 1, 20, 20), (1, 1, 20, 26), (6, 1, 15, 20), (1, 1, 20, 20), (9, 9, 20, 20)]
    objects = [replace(FOUND, bins=bins) for bins in (*places, (0, 0, 21, 21))]
    objects[3] = replace(objects[3], desc="y")
    metrics = step_metrics()
    reading = replace(READING, parsed=replace(PARSED, objects=tuple(objects)))
    metrics.add_rollout(ROLLOUT, reading, (TRUTH, replace(TRUTH, desc="y")), staleness=0)
    report = metrics.report(1, {}, (), denominator=1, num_carried=0)
    counted = report.totals.as_dict()
    assert counted["rollout/num_doubles"] == 2
    assert counted["rollout/top_name_share"] == 5 / 6
    assert counted["rollout/top_name_share_of_truth"] == 1 / 2


def test_a_row_filled_less_than_the_least_ratio_is_underfilled() -> None:
    metrics = step_metrics()
    result = RowResult(0.0, {}, {}, torch.zeros(0))
    for num_tokens in (3, 4, 5):
        row: Any = SimpleNamespace(segments=(SEGMENT,), num_tokens=num_tokens)
        metrics.add_row(row, result)
    counted = metrics.totals.as_dict()
    assert (counted["packing/num_rows"], counted["packing/num_underfilled_rows"]) == (3, 1)


def test_what_options_change_is_counted_and_without_them_there_is_no_such_number() -> None:
    metrics = step_metrics()
    plain = Target("scene", (1, 2), np.zeros(2, np.uint8), (), (), (), reading=READING)
    metrics.add_options(plain, TextWeights(1.0, 1.0, fp_end=0.5))
    assert not any(metrics.totals.as_dict().values())
    dropped = DroppedObject("object_2", DropReason.MISSING_GEOM)
    reading = replace(
        READING,
        parsed=replace(PARSED, objects=(FOUND, FOUND), dropped=(dropped, dropped)),
        kept=replace(PARSED, objects=(FOUND,)),
        match=MatchResult((), (0,), (), 0),
        num_capped=3,
    )
    roles = np.array([TokenRole.SEPARATOR, TokenRole.CORRECTED_DESC], np.uint8)
    overrides = (LabelOverride(1, 7, 0),)
    changed = replace(plain, roles=roles, label_overrides=overrides, reading=reading)
    metrics.add_options(changed, TextWeights(1.0, 1.0))
    metrics.add_options(changed, TextWeights(1.0, 1.0, fp_end=0.5))
    assert metrics.totals.as_dict() == {
        "rollout/num_trimmed": 6,
        "rollout/num_separators": 2,
        "rollout/num_corrected_names": 2,
        "rollout/num_capped_epsilons": 6,
        "rollout/num_weighted_ends": 1,
    }


def test_a_reward_function_that_fails_is_counted_and_the_means_are_over_the_figures_there_are() -> (
    None
):
    """Those of a rollout that failed itself are none: nobody has judged it."""
    sound = replace(SOUND, metrics={"right": 1.0, "judge": 0.25})
    unjudged = replace(sound, metrics={"right": 0.5}, reward_errors={"judge": "TimeoutError"})
    metrics = step_metrics()
    failed = replace(sound, error="ValueError", metrics={"right": 0.0, "judge": 0.0}, reward=0.0)
    for rollout in (sound, unjudged, replace(unjudged, error="TimeoutError", reward=0.0), failed):
        metrics.add_environment_rollout(rollout)
    counted = metrics.totals.as_dict()
    assert (counted["rollout/num_failed"], counted["rollout/num_reward_errors"]) == (2, 2)
    assert counted["rollout/reward"] == 0.5
    assert (counted["reward/right"], counted["reward/judge"]) == (2.0 / 3, 0.25)


def test_rewards_have_their_deviation_and_rollouts_their_mean_and_largest_length() -> None:
    metrics = step_metrics()
    for reward, length in ((0.0, 2), (1.0, 4), (1.0, 6)):
        metrics.add_environment_rollout(replace(SOUND, reward=reward, num_tokens=length))
    failed = replace(SOUND, error="ValueError", reward=0.0, num_tokens=0)
    metrics.add_environment_rollout(failed)
    counted = metrics.totals.as_dict()
    assert counted["rollout/reward_std"] == pytest.approx((2 / 9) ** 0.5), "of those that did not"
    assert (counted["rollout/length"], counted["rollout/length_max"]) == (3, 6)


def test_tokens_per_second_are_those_of_generation_and_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.step_metrics.time", SimpleNamespace(time=lambda: 17.0))
    metrics = step_metrics()
    metrics.add_generation([Span("actor", "generate", 10.0, 14.0)])
    metrics.add_environment_rollout(replace(SOUND, num_tokens=100))
    metrics.totals.add("packing/num_learned_tokens", 90)
    metrics.mark("learn", 14.0)
    report = metrics.report(1, {}, (), denominator=1, num_carried=0)
    counted = report.totals.as_dict()
    assert counted["time/generate_tokens_per_s"] == 25.0
    assert counted["time/learn_tokens_per_s"] == 30.0


def test_of_a_group_each_environment_has_its_mean_reward() -> None:
    metrics = step_metrics()
    metrics.add_environment_rollout(SOUND)
    assert not any(name.startswith("rollout/reward/") for name in metrics.totals.as_dict())
    for reward, task in ((0.0, "sort"), (0.5, "sort"), (1.0, "convert")):
        metrics.add_environment_rollout(replace(SOUND, task=task, reward=reward))
    metrics.add_environment_rollout(replace(SOUND, task="sort", error="ValueError: no"))
    names = list(metrics.totals.as_dict())
    counted = metrics.totals.as_dict()
    assert (counted["rollout/reward/sort"], counted["rollout/reward/convert"]) == (0.25, 1.0)
    assert names.index("rollout/reward") < names.index("rollout/reward/convert")


def test_functions_that_were_given_up_and_tool_calls_are_counted_where_there_are_tools() -> None:
    plain = replace(SOUND, given_up=("judge", "judge"))
    metrics = step_metrics()
    metrics.add_environment_rollout(plain)
    assert metrics.totals.as_dict()["rollout/num_given_up"] == 2
    assert "rollout/num_tool_calls" not in metrics.totals.as_dict()
    for number in (0, 3):
        metrics.add_environment_rollout(replace(plain, num_tool_calls=number))
    assert metrics.totals.as_dict()["rollout/num_tool_calls"] == 3
