"""The line of each step: of samples, and of an environment's rollouts."""

from __future__ import annotations

import pytest

from launch.run_folder.steps import progress_line
from shared.config.pipeline import Channel
from shared.metrics import StepReport

STEP = {
    "loss/total": 1.25,
    "packing/num_rows": 3.0,
    "packing/num_carried": 0.0,
    "time/learn_s": 0.5,
    "time/learn_tokens_per_s": 900.0,
    "time/generate_s": 0.4,
    "time/generate_tokens_per_s": 225.0,
    "time/step_s": 1.0,
    "rollout/length": 33.6,
    "rollout/length_max": 57.0,
    "rollout/length_limited_rate": 0.0,
    "rollout/logprob_max_abs": 3e-6,
}
SAMPLES = {
    **STEP,
    "rollout/match_rate": 0.25,
    "rollout/num_dropped_objects": 2.0,
    "rollout/num_fallback": 0.0,
}
ENVIRONMENT = {
    **STEP,
    "rollout/reward": 0.8125,
    "rollout/reward_std": 0.3,
    "reward/exact": 0.8125,
    "rollout/num_groups": 16.0,
    "rollout/num_groups_without_signal": 5.0,
    "rollout/num_failed": 0.0,
    "rollout/truncated_rate": 0.0,
    "rollout/num_splits": 0.0,
}


END = "learn 0.50 s 900 tok/s  step 1.00 s  v7"
BEGIN = "step    7/160 B  loss  1.2500  rows 3"
GENERATED = "len 34/57  logp 3e-06  generate 0.40 s 225 tok/s"


def line(metrics: dict[str, float | None], channel: Channel = Channel.B) -> str:
    """The line of these metrics; those of None are left out."""
    present = {name: value for name, value in metrics.items() if value is not None}
    return progress_line(StepReport(6, channel, 7, {}, ()), present, 160)


def test_a_step_without_rollouts_says_what_was_learned() -> None:
    assert line(STEP, Channel.A) == f"step    7/160 A  loss  1.2500  rows 3  {END}"


def test_a_step_of_samples_says_what_was_matched_and_dropped() -> None:
    assert line(SAMPLES) == f"{BEGIN}  match 0.25  dropped 2  {GENERATED}  {END}"


def test_a_step_of_an_environment_says_its_mean_reward_and_how_many_groups_say_nothing() -> None:
    assert line(ENVIRONMENT) == f"{BEGIN}  reward 0.812 ±0.30  no signal 5/16  {GENERATED}  {END}"


def test_a_step_of_samples_that_are_rewarded_too_says_both() -> None:
    names = (
        *("rollout/reward", "rollout/reward_std"),
        *("rollout/num_groups", "rollout/num_groups_without_signal"),
    )
    both = SAMPLES | {name: ENVIRONMENT[name] for name in names}
    figures = "match 0.25  dropped 2  reward 0.812 ±0.30  no signal 5/16"
    assert line(both) == f"{BEGIN}  {figures}  {GENERATED}  {END}"


@pytest.mark.parametrize(
    ("metrics", "changes", "words"),
    [
        (SAMPLES, {"rollout/num_fallback": 4.0}, "dropped 2  fallback 4  len"),
        (SAMPLES, {"rollout/match_rate": None}, "rows 3  match undefined  dropped"),
        (
            SAMPLES,
            {"packing/num_carried": 2.0, "time/sync_s": 0.25},
            "carried 2  learn 0.50 s 900 tok/s  sync 0.25 s  step 1.00 s",
        ),
        (
            ENVIRONMENT,
            {"rollout/num_failed": 2.0, "rollout/num_splits": 4.0},
            "no signal 5/16  failed 2  split 4  len",
        ),
        (ENVIRONMENT, {"rollout/reward": None}, "no reward  no signal"),
        (
            ENVIRONMENT,
            {"reward/exact": 1.0, "reward/format": 0.25},
            "reward 0.812 ±0.30 (exact 1.00, format 0.25)  no signal",
        ),
        (
            ENVIRONMENT,
            {f"reward/{name}": 0.5 for name in ("a", "b", "c", "d", "e")},
            "(exact 0.81, a 0.50, b 0.50, c 0.50, +2)  no signal",
        ),
        (ENVIRONMENT, {"rollout/truncated_rate": 0.021}, "len 34/57  cut 0.02  logp"),
        (SAMPLES, {"rollout/length_limited_rate": 0.25}, "len 34/57  cut 0.25  logp"),
        # Nothing was learned or generated in the time.
        (
            ENVIRONMENT,
            {"time/learn_tokens_per_s": None, "time/generate_tokens_per_s": None},
            "generate 0.40 s  learn 0.50 s  step",
        ),
        (ENVIRONMENT, {"rollout/logprob_max_abs": None}, "len 34/57  logp not compared  generate"),
    ],
)
def test_what_is_rare_is_told_where_it_happens(
    metrics: dict[str, float | None], changes: dict[str, float | None], words: str
) -> None:
    assert words in line(metrics | changes)
