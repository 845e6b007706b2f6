"""The main job on real engines: repeatable, checked, overlapping (issue 2, "What must hold")."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from config_support import configuration
from local_learner import Job, run_job

from launch.pipeline import one_ahead
from shared.errors import RolloutError, WeightSyncError
from shared.rollouts import Rollout

pytestmark = pytest.mark.engine

# Two channel-B steps from a model that already writes objects, small enough to be run again and
# again.
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
    """`job(number of actors, **changes)` runs the page on that many of the shared actors."""

    def run(num_actors, data=demo_data, steps=STEPS, **changes):
        changes = {**steps, **changes, "rollout_matching__vllm__actors": {"num_actors": num_actors}}
        config = configuration(warm_checkpoint, data, tmp_path_factory.mktemp("run"), **changes)
        size = config.rollout_matching.decode_batch_size
        actors = list(engine_pool.actors)[:num_actors]
        pool = engine_pool.over(*actors, decode_batch_size=size)
        return run_job(config, pool, num_actors, one_ahead)

    return run


@pytest.fixture(scope="module")
def greedy_job(job):
    return job(3)


ALIGNED = {
    **{name: value for name, value in STEPS.items() if not name.startswith("stage2_ab")},
    "custom__trainer_variant": "stage2_rollout_aligned",
    "stage2_ab": {"channel_b": {"enable_pipeline": True}},
    "global_max_length": 420,
    "training__per_device_train_batch_size": 4,
    "training__packing_buffer": 24,
    "rollout_matching__max_new_tokens": 144,
}


@pytest.mark.long
def test_the_aligned_variant_learns_polygons_and_carries_segments_alike_on_1_and_3_actors(
    job, polygon_data
):
    jobs = [job(num_actors, polygon_data, ALIGNED) for num_actors in (1, 3)]
    assert_same(jobs)
    first, second = jobs[0].reports.steps
    assert first.metrics["packing/num_rows"] == second.metrics["packing/num_rows"] == 3, (
        "one row per micro-step of 4 rollouts"
    )
    learned = first.metrics["packing/num_segments"] + second.metrics["packing/num_segments"]
    assert learned + second.metrics["packing/num_carried"] == 24
    assert first.metrics["packing/num_carried"] > 0, "the case needs leftovers"
    assert second.metrics["packing/learned_age_max"] == 1
    assert second.metrics["rollout/num_matched"] > 0
    assert second.metrics["rollout/logprob_max_abs"] < 1e-4, (
        "carried segments are not compared with weights that have changed"
    )


def what_was_said(job: Job) -> list[Rollout]:
    """Without who said it, and when."""
    return [replace(rollout, actor="", generate_s=0.0, started_s=0.0) for rollout in job.rollouts]


def assert_same(jobs: Sequence[Job]) -> None:
    """The same rollouts, and the same losses to the bit."""
    assert len(jobs[0].rollouts) == 24
    for other in jobs[1:]:
        assert what_was_said(other) == what_was_said(jobs[0])
        assert other.reports.losses == jobs[0].reports.losses


def test_two_runs_on_1_and_3_actors_give_the_same_rollouts_and_losses_to_the_bit(job, greedy_job):
    assert_same([job(1), greedy_job])


@pytest.mark.long
def test_2_and_3_actors_give_the_same_rollouts_at_temperature_1(job):
    jobs = [
        job(num_actors, rollout_matching__decoding={"temperature": 1.0}) for num_actors in (2, 3)
    ]
    assert_same(jobs)
    assert len({rollout.response_token_ids for rollout in jobs[0].rollouts}) > 12


STALE = {
    "rollout_matching__max_staleness": 1,
    "rollout_matching__decode_batch_size": 2,
    "stage2_ab__channel_b__rollouts_per_step": 12,
    "training__max_steps": 3,
}


@pytest.mark.long
def test_with_staleness_1_two_runs_give_the_same_rollouts_and_the_same_losses_to_the_bit(job):
    first, second = job(3, **STALE), job(3, **STALE)
    assert what_was_said(first) == what_was_said(second)
    assert first.reports.losses == second.reports.losses
    # Two rounds of 6 a step: the first of the second and third step began with the weights before.
    versions = [
        [rollout.weight_version for rollout in first.rollouts if rollout.step == step]
        for step in range(3)
    ]
    assert versions == [[1] * 12, [1] * 6 + [2] * 6, [2] * 6 + [3] * 6]
    for step, (mean, oldest) in enumerate([(0.0, 0.0), (0.5, 1.0), (0.5, 1.0)]):
        metrics = first.reports.steps[step].metrics
        assert (metrics["rollout/staleness"], metrics["rollout/staleness_max"]) == (mean, oldest)
        assert metrics["rollout/logprob_max_abs"] < 1e-4, (
            "rollouts of older weights are not compared with newer ones"
        )


def test_the_learners_log_probabilities_of_sampled_tokens_agree_with_the_engines(greedy_job):
    for report in greedy_job.reports.steps:
        assert report.metrics["rollout/num_valid_objects"] > 0, (
            "the model writes no objects, so nothing was compared"
        )
        assert report.metrics["rollout/num_compared_tokens"] > 0
        assert 0 < report.metrics["rollout/logprob_max_abs"] < 1e-4
    assert all(
        len(rollout.logprobs) == len(rollout.response_token_ids) for rollout in greedy_job.rollouts
    )


def test_every_rollout_of_a_step_has_that_steps_weight_version(greedy_job):
    assert {(rollout.step, rollout.weight_version) for rollout in greedy_job.rollouts} == {
        (0, 1),
        (1, 2),
    }


@pytest.mark.long
def test_rollout_and_learner_overlap_within_a_step(job):
    """Scenario: generation of round k + 1 intersects the learning of round k."""
    of_three_rounds = {
        "rollout_matching__decode_batch_size": 2,
        "stage2_ab__channel_b__rollouts_per_step": 18,
        "training__packing_window": 2,
    }
    intersects = []
    for report in job(3, **of_three_rounds).reports.steps:
        learning = [span for span in report.spans if span.name == "learn round"]
        assert len(learning) == 3
        for k in (0, 1):
            generating = [
                span
                for span in report.spans
                if span.name == "generate" and span.args["first_position"] // 6 == k + 1
            ]
            assert len(generating) == 3
            intersects.append(any(span.overlaps(learning[k]) for span in generating))
    # Whoever has to wait for a core may begin when the other is done. In a queue of one round at a
    # time none would (test_pipeline.py).
    assert any(intersects), intersects


def test_nothing_is_generated_between_a_steps_update_and_the_next_sync(greedy_job):
    first, second = greedy_job.reports.steps
    updated_s = next(span.end_s for span in first.spans if span.name == "finish step")
    generating = [
        span for report in (first, second) for span in report.spans if span.name == "generate"
    ]
    # Sync 0 comes before the first step, sync 1 between the two.
    sent_s = greedy_job.sent_s[1]
    assert updated_s < sent_s
    assert not any(span.start_s < sent_s and span.end_s > updated_s for span in generating)


def test_a_sync_reports_its_bytes_phases_and_canary(greedy_job):
    for report in greedy_job.reports.syncs:
        assert report.bytes > 10_000_000
        assert {"pause", "wire", "load", "verify", "reset", "canary"} <= set(report.phase_s)
        assert report.canary_max_abs < 1e-4


@pytest.mark.parametrize(
    "tensor",
    [
        "model.language_model.layers.1.mlp.down_proj.weight",
        "model.visual.blocks.1.mlp.linear_fc1.weight",
    ],
)
def test_the_canary_stops_a_run_whose_sync_went_wrong(engine_pool, job, tensor):
    engine_pool.arm("actor-1", "spoil", tensor)
    with pytest.raises(WeightSyncError, match="canary on actor-1") as caught:
        job(3)
    assert caught.value.quantity == "canary log-probability"


def test_a_log_probability_that_differs_stops_the_run_with_the_samples_id(job):
    # Two sound implementations differ by about 1e-6, which this tolerance does not forgive.
    message = (
        r"sample train:\d+: response token \d+ .* has log-probability .* in the engine and .*"
        r" in the learner"
    )
    with pytest.raises(RolloutError, match=message):
        job(1, rollout_matching__logprob_tolerance=1e-9)
