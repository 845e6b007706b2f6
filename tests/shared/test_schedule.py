"""When a held-out report is due, and that its weights were sent (issue 3, "Evaluation")."""

from pathlib import Path

import pytest
from config_support import configuration

from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT
from shared.schedule import RunSchedule

OF_ENVIRONMENT = {
    "data__train": None,
    "data__val": None,
    "custom__trainer_variant": "trajectory_pg",
    "environment__id": "guess_number",
    "rollout_matching__decoding": {"temperature": 1.0},
    "rollout_matching__pipeline__objective": [EXAMPLE_POLICY_GRADIENT],
}
NO_EXAMPLES = {"environment__num_eval_examples": 0}
WARM_UP = "stage2_ab__schedule__warmup_steps"


def schedule(**changes) -> RunSchedule:
    defaults = {"training__max_steps": 10, WARM_UP: 4, "stage2_ab__channel_b__rollouts_per_step": 8}
    return RunSchedule(
        configuration(Path("model"), Path("data"), Path("run"), **defaults | changes)
    )


@pytest.mark.parametrize(
    ("eval_steps", "changes", "due"),
    [
        (None, {}, [4, 10]),
        (3, {}, [3, 4, 6, 9, 10]),
        (5, {}, [4, 5, 10]),
        (2, {}, [2, 4, 6, 8, 10]),
        (1, {}, list(range(1, 11))),
        (100, {}, [4, 10]),
        # Without a warm-up the first is of the weights that the run starts from.
        (6, {WARM_UP: 0}, [0, 6, 10]),
        (6, {WARM_UP: 0, "training__eval_on_start": False}, [6, 10]),
        (2, {"training__eval_on_start": False}, [2, 4, 6, 8, 10]),
        (None, {**OF_ENVIRONMENT, "training__eval_on_start": False}, [10]),
        (None, {"data__val": None}, []),
        (None, OF_ENVIRONMENT, [0, 10]),
        (4, OF_ENVIRONMENT, [0, 4, 8, 10]),
        (4, {**OF_ENVIRONMENT, "environment__num_eval_examples": 5}, [0, 4, 8, 10]),
        (None, {**OF_ENVIRONMENT, **NO_EXAMPLES}, []),
    ],
)
def test_a_report_is_due_at_every_multiple_of_eval_steps_at_the_warm_ups_end_and_at_the_runs_end(
    eval_steps, changes, due
):
    run = schedule(training__eval_steps=eval_steps, **changes)
    assert [step for step in range(run.max_steps + 1) if run.evaluates_before(step)] == due


def test_every_step_of_an_environment_is_of_rollouts():
    run = schedule(**OF_ENVIRONMENT)
    assert {(plan.channel, plan.num_samples) for plan in run.plans()} == {("B", 8)}


def test_weights_are_sent_before_every_report_and_before_every_step_that_generates():
    run = schedule(training__eval_steps=3, stage2_ab__schedule__warmup_steps=8)
    assert [plan.step for plan in run.plans() if plan.sync_after] == [2, 5, 7, 8, 9]
    assert [plan.step for plan in run.plans() if plan.evaluate_before] == [3, 6, 8, 9]
