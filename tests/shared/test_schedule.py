"""When a held-out report is due, and that its weights were sent (issue 3, "Evaluation")."""

from pathlib import Path

import pytest
from config_support import configuration

from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT
from shared.schedule import RunSchedule


def schedule(**changes) -> RunSchedule:
    changes = {
        "training__max_steps": 10,
        "stage2_ab__schedule__warmup_steps": 4,
        "stage2_ab__channel_b__rollouts_per_step": 8,
    } | changes
    return RunSchedule(configuration(Path("model"), Path("data"), Path("run"), **changes))


def reports(run: RunSchedule) -> list[int]:
    return [step for step in range(run.max_steps + 1) if run.evaluates_before(step)]


@pytest.mark.parametrize(
    ("eval_steps", "due"),
    [
        (None, [4, 10]),
        (3, [3, 4, 6, 9, 10]),
        (5, [4, 5, 10]),
        (2, [2, 4, 6, 8, 10]),
        (1, list(range(1, 11))),
        (100, [4, 10]),
    ],
)
def test_a_report_is_due_at_every_multiple_of_eval_steps_at_the_warm_ups_end_and_at_the_runs_end(
    eval_steps, due
):
    assert reports(schedule(training__eval_steps=eval_steps)) == due


def test_without_a_warm_up_the_first_report_is_of_the_weights_that_the_run_starts_from():
    assert reports(schedule(training__eval_steps=6, stage2_ab__schedule__warmup_steps=0)) == [
        0,
        6,
        10,
    ]


def test_without_validation_data_there_is_none():
    assert reports(schedule(data__val=None)) == []


def of_environment(**changes) -> RunSchedule:
    defaults = {
        "data__train": None,
        "data__val": None,
        "custom__trainer_variant": "trajectory_pg",
        "environment__id": "guess_number",
        "rollout_matching__decoding": {"temperature": 1.0},
        "rollout_matching__pipeline__objective": [EXAMPLE_POLICY_GRADIENT],
    }
    return schedule(**defaults | changes)


@pytest.mark.parametrize(("eval_steps", "due"), [(None, [0, 10]), (4, [0, 4, 8, 10])])
@pytest.mark.parametrize("number", [None, 5])
def test_of_an_environment_reports_are_due_unless_no_held_out_example_is_asked_for(
    eval_steps, due, number
):
    """The first is of the weights that the run starts from: there is no warm-up of channel A."""
    assert (
        reports(
            of_environment(training__eval_steps=eval_steps, environment__num_eval_examples=number)
        )
        == due
    )


def test_of_an_environment_without_held_out_examples_there_is_none_and_every_step_is_of_rollouts():
    run = of_environment(environment__num_eval_examples=0)
    assert reports(run) == []
    assert {(plan.channel, plan.num_samples) for plan in run.plans()} == {("B", 8)}


def test_weights_are_sent_before_every_report_and_before_every_step_that_generates():
    run = schedule(training__eval_steps=3, stage2_ab__schedule__warmup_steps=8)
    assert [plan.step for plan in run.plans() if plan.sync_after] == [2, 5, 7, 8, 9]
    assert [plan.step for plan in run.plans() if plan.evaluate_before] == [3, 6, 8, 9]
