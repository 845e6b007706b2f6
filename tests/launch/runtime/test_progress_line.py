"""The line of each step: of samples, and of an environment's rollouts."""

from __future__ import annotations

from launch.runtime.telemetry import progress_line
from shared.config.pipeline import Channel
from shared.metrics import StepReport

STEP = {
    "loss/total": 1.25,
    "packing/num_rows": 3.0,
    "packing/num_carried": 0.0,
    "time/learn_s": 0.5,
    "time/generate_s": 0.4,
    "time/step_s": 1.0,
    "rollout/num_tokens": 90.0,
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
    "rollout/num_groups": 16.0,
    "rollout/num_groups_without_signal": 5.0,
    "rollout/num_failed": 0.0,
    "rollout/num_truncated": 0.0,
    "rollout/num_splits": 0.0,
}


def line(metrics: dict[str, float], channel: Channel = Channel.B) -> str:
    return progress_line(StepReport(6, channel, 7, {}, ()), metrics, 160)


def without(metrics: dict[str, float], name: str) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key != name}


def test_a_step_of_samples_says_what_was_matched_and_dropped() -> None:
    assert (
        line(SAMPLES)
        == "step    7/160 B  loss  1.2500  rows 3  match 0.25  dropped 2  tokens 90  logp 3e-06 "
        " generate 0.40 s  learn 0.50 s  step 1.00 s  v7"
    )
    assert "nothing kept of 4" in line(SAMPLES | {"rollout/num_fallback": 4.0})
    assert "match of nothing" in line(without(SAMPLES, "rollout/match_rate"))


def test_a_step_without_rollouts_says_what_was_learned() -> None:
    assert (
        line(STEP, Channel.A)
        == "step    7/160 A  loss  1.2500  rows 3  learn 0.50 s  step 1.00 s  v7"
    )


def test_a_step_of_an_environment_says_its_mean_reward_and_how_many_groups_say_nothing() -> None:
    assert (
        line(ENVIRONMENT)
        == "step    7/160 B  loss  1.2500  rows 3  reward 0.812  no signal 5/16  tokens 90  logp"
        " 3e-06  generate 0.40 s  learn 0.50 s  step 1.00 s  v7"
    )


def test_rollouts_that_failed_were_cut_short_or_split_are_told_where_there_are_any() -> None:
    some = {"rollout/num_failed": 2.0, "rollout/num_truncated": 3.0, "rollout/num_splits": 4.0}
    assert "no signal 5/16  failed 2  truncated 3  split 4  tokens" in line(ENVIRONMENT | some)


def test_a_step_without_a_reward_or_a_compared_token_says_so() -> None:
    assert "no reward  no signal" in line(without(ENVIRONMENT, "rollout/reward"))
    assert "logp not compared" in line(without(ENVIRONMENT, "rollout/logprob_max_abs"))


def test_a_sync_and_what_is_carried_are_told_where_there_are_any() -> None:
    told = line(SAMPLES | {"packing/num_carried": 2.0, "time/sync_s": 0.25})
    assert "carried 2  learn 0.50 s  sync 0.25 s  step 1.00 s" in told
