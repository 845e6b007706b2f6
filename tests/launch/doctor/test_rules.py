"""Every rule of the doctor is shown on a run that breaks it, and good runs break none
(docs/how_to/doctor.md).

The runs in tests/data/doctor are real ones on CPU, with the metrics that rules read. The others are
made: their values pass through the code that makes a step's metrics.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import pytest
from config_support import configuration, trajectory_config

from launch.doctor.figures import History
from launch.doctor.learning import Doctor, Finding
from launch.doctor.rules import RULES
from launch.run_folder.steps import StepRecord, step_metrics
from shared.config import RunConfig, load_config
from shared.config.pipeline import Channel
from shared.metrics import (
    BY_NAME,
    MetricAccumulator,
    RankReport,
    Reduction,
    merge_reports,
    metric_of,
)
from shared.schedule import StepPlan

RECORDED = Path(__file__).parents[2] / "data" / "doctor"
GOOD = {
    "supervised": "channel A from random weights, all 100 first steps of 1,200",
    "supervised_falling_rate": "channel A, the last 100 steps of 1,500 with a falling rate",
    "photographs": "channel A on photographs",
    "stage2": "both channels, transformers generates",
    "two_turns": "a policy gradient on an environment of two turns, until it is solved",
    "sums": "a policy gradient on a pretrained language model, most answers cut by length",
    "lora": "channel A with an adapter",
}


def recorded(name: str, folder: Path) -> Doctor:
    """Let a doctor see a recorded run, as it went on."""
    first, *lines = map(json.loads, (RECORDED / f"{name}.jsonl").read_text().splitlines())
    doctor = Doctor(load_config(first["config"]))
    reports = [line["report"] for line in lines if "report" in line]
    for line in lines:
        if "report" not in line:
            while reports and reports[0]["step"] < line["step"]:
                doctor.report(reports.pop(0), folder)
            doctor.step(line)
    for report in reports:
        doctor.report(report, folder)
    return doctor


@pytest.mark.parametrize("name", GOOD)
def test_a_good_run_breaks_no_rule(name: str, tmp_path: Path) -> None:
    assert recorded(name, tmp_path).findings == []


def test_a_model_that_does_not_know_the_format_is_named_in_the_third_step(tmp_path: Path) -> None:
    doctor = recorded("broken_start", tmp_path)
    # The first step was on channel A.
    assert [(one.rule, one.step, one.value) for one in doctor.findings] == [
        ("answers never open", 4, 1.0)
    ]
    assert "stage2_ab.schedule.warmup_steps" in doctor.findings[0].text


def test_a_temperature_without_spread_is_named_in_the_sixth_step(tmp_path: Path) -> None:
    found = recorded("broken_signal", tmp_path).findings
    assert [(one.rule, one.step) for one in found] == [("no signal", 6)]


def test_a_rate_that_rises_until_the_end_is_named_at_once(tmp_path: Path) -> None:
    """A try of four steps on three actors; and a run from random weights, with a fault of its own."""
    for name, rules in (("three_actors", []), ("broken_warm_up", ["answers never open"])):
        found = [one.rule for one in recorded(name, tmp_path).findings]
        assert found == ["always warming up", *rules]


def test_a_good_run_that_carries_segments_breaks_no_rule(
    matching: Callable[..., RunConfig],
) -> None:
    """The eighth kind, which is made: as many segments wait as always."""
    config = matching(custom__trainer_variant="stage2_rollout_aligned")
    carried = lambda step: MATCHED | {"packing/num_carried": 18.0 + 4 * (step % 2)}  # noqa: E731
    assert made(config, carried).findings == []


# Made runs

STEPS = 40
MATCHED: Mapping[str, float] = {
    "loss/total": 4.0,
    "loss/token_ce": 0.5,
    "loss/coord_reg.w1": 0.1,
    "rollout/num": 16,
    "rollout/num_tokens": 800,
    "rollout/num_length_limited": 0,
    "rollout/num_truncated": 0,
    "rollout/num_fallback": 1,
    "rollout/num_valid_objects": 40,
    "rollout/num_doubles": 1,
    "rollout/top_name_share": 0.3,
    "rollout/top_name_share_of_truth": 0.3,
    "rollout/num_dropped_objects": 2,
    "rollout/num_dropped.bbox_invalid": 2,
    "rollout/num_ground_truth": 48,
    "rollout/num_matched": 30,
    "rollout/logprob_max_abs": 1e-5,
    "packing/num_segments": 16,
    "packing/num_carried": 0,
    "optim/grad_norm": 2.0,
}
REWARDED: Mapping[str, float] = {
    "loss/total": 0.0,
    "policy/entropy": 1.5,
    "policy/logprob_difference": 1e-6,
    "policy/capped_share": 0.0,
    "rollout/num": 64,
    "rollout/num_tokens": 256,
    "rollout/num_length_limited": 0,
    "rollout/num_truncated": 0,
    "rollout/reward": 0.3,
    "rollout/num_groups": 8,
    "rollout/num_groups_without_signal": 2,
    "packing/num_segments": 64,
    "packing/num_carried": 0,
    "optim/grad_norm": 1.0,
}
Values = Mapping[str, float]


def line_of(step: int, values: Values) -> dict[str, Any]:
    """Return a line of metrics.jsonl, made as the driver makes it."""
    totals = MetricAccumulator()
    of_update = {}
    for name, value in values.items():
        metric = metric_of(name)
        assert metric is not None
        match metric.reduction:
            case Reduction.SUM:
                totals.add(name, value)
            case Reduction.MAX:
                totals.add_max(name, value)
            case Reduction.MEAN:
                totals.add_mean(name, 16 * value, 16)
            case Reduction.STEP:
                of_update[name] = value
    report = merge_reports([RankReport(step - 1, Channel.B, step, totals, of_update, ())])
    plan = StepPlan(step - 1, Channel.B, 16, 0, evaluate_before=False, sync_after=True)
    metrics = step_metrics(StepRecord(plan), report, 1.0, 0.0, "sample")
    return {"step": step, "channel": "B", **metrics}


def made(config: RunConfig, values: Callable[[int], Values]) -> Doctor:
    doctor = Doctor(config)
    for step in range(1, STEPS + 1):
        doctor.step(line_of(step, values(step)))
    return doctor


@pytest.fixture
def matching(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**changes: Any) -> RunConfig:
        settings = {"training__max_steps": STEPS, "rollout_matching__max_new_tokens": 100}
        return configuration(tmp_path, tmp_path, tmp_path / "run", **settings | changes)

    return make


@pytest.fixture
def rewarded(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**changes: Any) -> RunConfig:
        return trajectory_config(tmp_path, tmp_path / "run", training__max_steps=STEPS, **changes)

    return make


BREAKS = 21
"""The step from which a made run is broken."""


def broken(base: Values, change: Callable[[int], Values]) -> Callable[[int], Values]:
    """Make steps that change from `BREAKS` on; `change` takes the number of broken steps so far."""
    return lambda step: base | (change(step - BREAKS + 1) if step >= BREAKS else {})


RULE = {rule.name: rule for rule in RULES}


def only(doctor: Doctor, rule: str) -> Finding:
    """Return the only finding, which is of this rule, and within its window."""
    assert [one.rule for one in doctor.findings] == [rule]
    (finding,) = doctor.findings
    assert BREAKS <= finding.step < BREAKS + RULE[rule].window
    return finding


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("answers never open", {"rollout/num_fallback": 12, "rollout/num_truncated": 12}),
        ("answers left open", {"rollout/num_truncated": 8}),
        ("answers cut by length", {"rollout/num_truncated": 8, "rollout/num_length_limited": 8}),
        ("no valid objects", {"rollout/num_valid_objects": 2, "rollout/num_matched": 1}),
        ("no matches", {"rollout/num_matched": 1}),
        ("doubles", {"rollout/num_doubles": 12}),
        (
            "a drop reason jumps",
            {"rollout/num_dropped_objects": 20, "rollout/num_dropped.wrong_arity": 18},
        ),
        ("class collapse", {"rollout/top_name_share": 0.9}),
        ("learner and engine part", {"rollout/logprob_max_abs": 2e-3}),
        ("gradient jumps", {"optim/grad_norm": 50.0}),
        ("no gradient", {"optim/grad_norm": 0.0}),
        ("length runs to the limit", {"rollout/num_tokens": 1500}),
        ("length runs to nothing", {"rollout/num_tokens": 100}),
    ],
)
def test_a_broken_run_on_matched_rollouts_is_named_within_the_window(
    matching: Callable[..., RunConfig], rule: str, values: Values
) -> None:
    config = matching()
    assert only(made(config, broken(MATCHED, lambda _: values)), rule)


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("entropy collapse", {"policy/entropy": 0.05}),
        ("no signal", {"rollout/num_groups_without_signal": 8, "optim/grad_norm": 0.0}),
        ("ratios at the cap", {"policy/capped_share": 0.1}),
        ("learner and engine part", {"policy/logprob_difference": 1e-3}),
        (
            "answers cut by length",
            {"rollout/num_length_limited": 32, "rollout/num_truncated": 32},
        ),
    ],
)
def test_a_broken_run_on_rewards_is_named_within_the_window(
    rewarded: Callable[..., RunConfig], rule: str, values: Values
) -> None:
    assert only(made(rewarded(), broken(REWARDED, lambda _: values)), rule)


def test_a_run_without_tool_calls_is_named_in_its_first_step(
    rewarded: Callable[..., RunConfig],
) -> None:
    doctor = made(rewarded(), lambda _: REWARDED | {"rollout/num_tool_calls": 0})
    assert [(one.rule, one.step, one.value) for one in doctor.findings] == [
        ("uncalled tools", 1, 64)
    ]
    # Later steps without a call are no finding.
    calls = made(
        rewarded(), lambda step: REWARDED | {"rollout/num_tool_calls": 1 if step == 1 else 0}
    )
    assert calls.findings == []


def test_the_steps_of_a_new_users_run_are_named(matching: Callable[..., RunConfig]) -> None:
    """Four steps of channel B matched 0.04, 0, 0, 0 of the objects, and no sentence said it."""
    doctor = Doctor(matching())
    for step, matched in enumerate((2, 0, 0, 0), 1):
        values = MATCHED | {"rollout/num_valid_objects": 30, "rollout/num_matched": matched}
        found = doctor.step(line_of(step, values))
    assert [one.rule for one in found] == ["no matches"]
    assert "maskiou_gate_schedule" in found[0].text


def test_updates_without_signal_are_named(rewarded: Callable[..., RunConfig]) -> None:
    """15 of 24 updates had no signal, in figures only."""
    without = [8 if step % 8 < 5 else 2 for step in range(24)]
    doctor = Doctor(rewarded())
    for step, number in enumerate(without, 1):
        doctor.step(line_of(step, REWARDED | {"rollout/num_groups_without_signal": number}))
    assert [one.rule for one in doctor.findings] == ["no signal"]
    assert doctor.findings[0].step <= 8


def test_a_solved_task_is_no_finding(rewarded: Callable[..., RunConfig]) -> None:
    """Entropy, signal and length also vanish when the task is solved."""

    def values(step: int) -> Values:
        solved = min(1.0, step / 20)
        return REWARDED | {
            "rollout/reward": 0.2 + 0.8 * solved,
            "policy/entropy": 1.5 * (1 - solved) + 0.01,
            "rollout/num_groups_without_signal": 8 * solved,
            "rollout/num_tokens": 256 - 200 * solved,
        }

    assert made(rewarded(), values).findings == []


def test_carried_segments_that_grow_are_named(matching: Callable[..., RunConfig]) -> None:
    config = matching(custom__trainer_variant="stage2_rollout_aligned")
    growing = made(config, broken(MATCHED, lambda number: {"packing/num_carried": 12.0 * number}))
    assert only(growing, "carried segments grow")


def test_a_part_of_the_reward_that_pays_for_another_is_named(
    rewarded: Callable[..., RunConfig],
) -> None:
    """The reward is `correct + 0.5 x format`, and the format rises at the cost of the answers."""

    def values(number: int) -> Values:
        wave = 0.01 * (number % 3)
        format_, correct = 0.2 + 0.03 * number - wave, 0.30 - 0.006 * number + wave
        parts = {"reward/correct": correct, "reward/format": format_}
        return parts | {"rollout/reward": correct + 0.5 * format_}

    base = REWARDED | values(0)
    finding = only_of(made(rewarded(), broken(base, values)), "one part pays")
    assert BREAKS <= finding.step <= BREAKS + 15

    def both(number: int) -> Values:
        parts = {"reward/correct": 0.3 + 0.01 * number, "reward/format": 0.2 + 0.02 * number}
        return parts | {"rollout/reward": 0.4 + 0.02 * number}

    assert made(rewarded(), broken(base, both)).findings == []


def only_of(doctor: Doctor, rule: str) -> Finding:
    assert [one.rule for one in doctor.findings] == [rule]
    return doctor.findings[0]


@pytest.mark.parametrize("kind", ["source/match_rate", "rollout/reward"])
def test_a_source_that_gets_worse_alone_is_named(
    matching: Callable[..., RunConfig], rewarded: Callable[..., RunConfig], kind: str
) -> None:
    if kind == "rollout/reward":
        base = REWARDED | {"rollout/reward/easy": 0.3, "rollout/reward/hard": 0.3}
        worse: Values = {"rollout/reward/easy": 0.5, "rollout/reward/hard": 0.1}
        config = rewarded()
    else:
        of_source = {"source/num_ground_truth/a": 24, "source/num_ground_truth/b": 24}
        base = MATCHED | of_source | {"source/num_matched/a": 15, "source/num_matched/b": 15}
        worse = {"source/num_matched/a": 22, "source/num_matched/b": 8}
        config = matching()
    assert only(made(config, broken(base, lambda _: worse)), "a source falls")


def report_of(step: int, score: float, folder: Path, f1s: Mapping[str, float]) -> dict[str, Any]:
    report = folder / "evaluations" / f"step_{step:06d}" / "report.json"
    report.parent.mkdir(parents=True)
    classes = [{"name": name, "f1": f1, "num_ground_truth": 20} for name, f1 in f1s.items()]
    report.write_text(json.dumps({"classes": classes}))
    return {"step": step, "score": score}


def test_a_class_that_is_unlearned_is_named(
    matching: Callable[..., RunConfig], tmp_path: Path
) -> None:
    doctor = Doctor(matching())
    assert doctor.report(report_of(0, 0.5, tmp_path, {"cat": 0.5, "dog": 0.5}), tmp_path) == []
    assert doctor.report(report_of(5, 0.6, tmp_path, {"cat": 0.9, "dog": 0.3}), tmp_path) == []
    (finding,) = doctor.report(report_of(10, 0.6, tmp_path, {"cat": 1.0, "dog": 0.2}), tmp_path)
    assert (finding.rule, round(finding.value, 3)) == ("a class falls", 0.3)


@pytest.mark.parametrize(("rises", "rules"), [(True, ["held-out falls"]), (False, [])])
def test_a_held_out_score_that_falls_while_training_improves_is_named(
    rewarded: Callable[..., RunConfig], tmp_path: Path, rises: bool, rules: list[str]
) -> None:
    doctor = Doctor(rewarded())
    scores = {10: 0.5, 20: 0.42, 30: 0.40}
    for step in range(1, 31):
        reward = 0.3 + 0.01 * step * (1 if rises else -1)
        doctor.step(line_of(step, REWARDED | {"rollout/reward": reward}))
        if step in scores:
            doctor.report({"step": step, "score": scores[step]}, tmp_path)
    assert [one.rule for one in doctor.findings] == rules


def test_frozen_parts_that_should_learn_are_named(matching: Callable[..., RunConfig]) -> None:
    language = matching(training__parts={"language_model": {"frozen": True}})
    assert only_of(made(language, lambda _: MATCHED), "frozen language model").step == 1
    vision = matching(training__parts={"vision_tower": {"frozen": True}})

    def reads_better(step: int) -> Values:
        return MATCHED | {"loss/token_ce": 0.5 - 0.01 * step}

    assert only_of(made(vision, reads_better), "frozen vision").step <= 30
    # Coordinates improve too, or no part is frozen.
    improves = lambda step: reads_better(step) | {"loss/coord_reg.w1": 0.1 - 0.002 * step}  # noqa: E731
    assert made(vision, improves).findings == []
    assert made(matching(), reads_better).findings == []


@pytest.mark.parametrize(
    ("rate", "adapter", "num_parameters", "rules"),
    [
        (1e-3, None, 4e9, ["unusual learning rate"]),
        (1e-5, None, 4e9, []),
        (1e-9, None, 4e9, ["unusual learning rate"]),
        (1e-3, None, 3e6, []),
        (2e-4, "lora", 4e9, []),
        (1e-2, "lora", 4e9, ["unusual learning rate"]),
        (1.0, None, None, []),
    ],
)
def test_a_rate_is_judged_by_the_size_of_the_model_or_as_an_adapters(
    matching: Callable[..., RunConfig],
    rate: float,
    adapter: str | None,
    num_parameters: float | None,
    rules: list[str],
) -> None:
    changes: dict[str, Any] = {} if adapter is None else {"model__adapter": {"kind": adapter}}
    history = History(matching(training__learning_rate=rate, **changes))
    assert history.num_parameters is None, "there is no checkpoint"
    history.num_parameters = num_parameters
    rule = RULE["unusual learning rate"]
    value = rule.judge(history, rule)
    assert [rule.name] * (value is not None) == rules


def test_every_rule_names_a_page_and_reads_metrics_that_exist() -> None:
    pages = Path(__file__).parents[3] / "docs"
    assert [rule.page for rule in RULES if not (pages / rule.page).is_file()] == []
    assert len({rule.name for rule in RULES}) == len(RULES) >= 20
    assert all(0 < rule.threshold < inf and rule.window > 0 for rule in RULES)
    assert set(MATCHED) | set(REWARDED) <= set(BY_NAME)
