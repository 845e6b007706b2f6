"""The main job on real engines: repeatable, checked, overlapping (issue 2, "What must hold")."""

from dataclasses import replace

import pytest
from config_support import configuration
from local_learner import run_job

from launch.pipeline import one_ahead
from shared.errors import RolloutError, WeightSyncError
from shared.rollouts import Rollout

pytestmark = pytest.mark.engine

# Two channel-B steps from a model that already writes objects, small enough to be run again and again.
STEPS = {
    "training__max_steps": 2,
    "stage2_ab__schedule__warmup_steps": 0,
    "training__effective_batch_size": 12,
    "stage2_ab__channel_b__rollouts_per_step": 12,
    "rollout_matching__decode_batch_size": 6,
    "rollout_matching__max_new_tokens": 96,
    "global_max_length": 512,
    "training__packing_window": 4,
    "data__max_val_samples": 4,
}


@pytest.fixture(scope="module")
def job(engine_pool, warm_checkpoint, demo_data, tmp_path_factory):
    """`job(actors, **changes)` runs the page on that many of the shared actors."""

    def run(num_actors, **changes):
        config = configuration(warm_checkpoint, demo_data, tmp_path_factory.mktemp("run"), **STEPS | changes)
        names = list(engine_pool.actors)[:num_actors]
        return run_job(config, engine_pool.over(*names, round_capacity=6 * num_actors), num_actors, one_ahead)

    return run


@pytest.fixture(scope="module")
def greedy_runs(job):
    return {num_actors: job(num_actors) for num_actors in (1, 2, 3)}


def what_was_said(rollouts: list[Rollout]) -> list[Rollout]:
    """Without who said it, and when."""
    return [replace(rollout, actor="", generate_s=0.0, started_s=0.0) for rollout in rollouts]


def test_1_2_and_3_actors_give_the_same_rollouts_and_the_same_losses_to_the_bit(greedy_runs):
    (one, said), *others = greedy_runs.values()
    assert len(said) == 24
    for reports, rollouts in others:
        assert what_was_said(rollouts) == what_was_said(said)
        assert reports.losses == one.losses


def test_1_and_3_actors_give_the_same_rollouts_at_temperature_1(job):
    one, three = (job(num_actors, rollout_matching__decoding={"temperature": 1.0}) for num_actors in (1, 3))
    assert what_was_said(one[1]) == what_was_said(three[1])
    assert one[0].losses == three[0].losses
    assert len({rollout.response_token_ids for rollout in one[1]}) > 12


def test_two_runs_of_the_same_configuration_give_the_same_losses(job, greedy_runs):
    assert job(3)[0].losses == greedy_runs[3][0].losses


def test_the_learners_log_probabilities_of_sampled_tokens_agree_with_the_engines(greedy_runs):
    reports, rollouts = greedy_runs[3]
    assert sum(report.metrics["rollout/num_valid_objects"] for report in reports.steps) > 0, "the model writes no objects, so nothing was compared"
    for report in reports.steps:
        assert 0 < report.metrics["rollout/logprob_max_abs"] < 1e-4
    assert all(len(rollout.logprobs) == len(rollout.response_token_ids) for rollout in rollouts)


def test_every_rollout_of_a_step_has_that_steps_weight_version(greedy_runs):
    _, rollouts = greedy_runs[3]
    assert {(rollout.step, rollout.weight_version) for rollout in rollouts} == {(0, 1), (1, 2)}


def test_generation_of_round_k_plus_1_intersects_the_learning_of_round_k(job):
    reports, _ = job(3, rollout_matching__decode_batch_size=2, stage2_ab__channel_b__rollouts_per_step=18, training__packing_window=2)
    for report in reports.steps:
        learning = [span for span in report.spans if span.name == "learn round"]
        generating = [span for span in report.spans if span.name == "generate"]
        assert len(learning) == 3
        assert any(span.overlaps(learning[0]) for span in generating)


def test_nothing_is_generated_between_a_steps_update_and_the_next_sync(greedy_runs):
    first, second = greedy_runs[3][0].steps
    assert max(span.end_s for span in first.spans) <= min(span.start_s for span in second.spans if span.name == "generate")


def test_a_sync_reports_its_bytes_phases_and_canary(greedy_runs):
    for report in greedy_runs[3][0].syncs:
        assert report.bytes > 10_000_000
        assert {"pause", "wire", "verify", "reset", "canary"} <= set(report.phase_s)
        assert report.canary_max_abs < 1e-4


@pytest.mark.parametrize("tensor", ["model.language_model.layers.1.mlp.down_proj.weight", "model.visual.blocks.1.mlp.linear_fc1.weight"])
def test_the_canary_stops_a_run_whose_sync_went_wrong(engine_pool, job, tensor):
    engine_pool.spoil("actor-1", tensor)
    with pytest.raises(WeightSyncError, match="canary on actor-1") as caught:
        job(3)
    assert caught.value.quantity == "canary log-probability"


def test_a_log_probability_that_differs_stops_the_run_with_the_samples_id(job):
    # Two sound implementations differ by about 1e-6, which this tolerance does not forgive.
    with pytest.raises(RolloutError, match=r"sample train:\d+: response token \d+ .* has log-probability .* in the engine and .* in the learner"):
        job(1, rollout_matching__logprob_tolerance=1e-9)
