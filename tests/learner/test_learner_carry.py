"""`stage2_rollout_aligned`: leftovers are carried, a step is divided by the segments it learned
(decision 7; spec: post-rollout packing).
"""

import pytest
from config_support import configuration
from learner_support import finish_step, half_right, make_learner

from learner.algorithms.matched_targets import rollout_target
from learner.collate import collate
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.packing import packing_policy
from learner.segments import Segment
from learner.step import train_row
from learner.targets import text_weights
from shared.config.pipeline import Channel
from shared.schedule import RunSchedule

pytestmark = pytest.mark.slow

CARRYING = {
    "custom__trainer_variant": "stage2_rollout_aligned",
    "stage2_ab": {},
    "global_max_length": 400,
    "training__max_steps": 3,
    "training__per_device_train_batch_size": 4,
    "training__effective_batch_size": 8,
    "training__packing_buffer": 12,
}


@pytest.fixture(scope="module")
def config(demo_checkpoint, demo_data, tmp_path_factory):
    return lambda **changes: configuration(
        demo_checkpoint, demo_data, tmp_path_factory.mktemp("run"), **CARRYING | changes
    )


def run_steps(config, num_steps, rounds=(range(8),)):
    learner = make_learner(config)
    reports = []
    for plan in list(RunSchedule(config).plans())[:num_steps]:
        rollouts = half_right(learner, plan)
        for round_ in rounds:
            learner.accumulate([rollouts[i] for i in round_])
        reports.append(finish_step(learner))
    return learner, reports


def test_packing_enabled_does_not_break_rollout_matching_training(config):
    """Scenario: un-packed rollouts, one packed row per micro-step, every step channel B and one
    update. Leftovers are learned in later steps, and their age is logged.
    """
    _, reports = run_steps(config(), 3)
    first, second, last = metrics = [report.metrics for report in reports]
    for report in reports:
        assert report.channel is Channel.B
        assert report.metrics["rollout/num"] == 8
        assert report.metrics["packing/num_rows"] == 2, "one row per micro-step of 4 rollouts"
    learned = sum(of_step["packing/num_segments"] for of_step in metrics)
    assert learned + last["packing/num_carried"] == 3 * 8
    assert first["packing/num_carried"] > 0, "the case needs leftovers"
    assert first["packing/learned_age_max"] == 0
    assert second["packing/learned_age_max"] == 1
    assert 0 < second["packing/learned_age"] <= 1


@pytest.mark.parametrize(("global_max_length", "leaves_some"), [(4096, False), (400, True)])
def test_a_steps_loss_is_the_mean_over_the_segments_it_learned(
    config, global_max_length, leaves_some
):
    """Against each sample that was learned alone in its own row, averaged by hand; what is carried
    to the next step has no part in it.
    """
    settings = config(global_max_length=global_max_length)
    _, (report,) = run_steps(settings, 1)
    assert (report.metrics["packing/num_segments"] != 8) is leaves_some
    learner, pipeline = make_learner(settings), settings.rollout_matching.pipeline
    loaded, algorithm = learner.loaded, learner.algorithm
    rollouts = half_right(learner, RunSchedule(settings).plan(0))
    segments = []
    for rollout, sample in zip(rollouts, learner.steps[0].samples, strict=True):
        target = rollout_target(rollout, sample, loaded.codec, algorithm.settings)
        segments.append(Segment(rollout.position, algorithm.encoder.encode(sample), target))
    policy = packing_policy(settings.row_rule, settings.training, settings.global_max_length)
    rows = [row for segment in segments for row in policy.add(segment)]
    objectives = build_objectives(pipeline, Channel.B, loaded.coord_ids_C)
    sampling = Normalizer(1.0, loaded.banned_token_ids)
    weights = text_weights(pipeline, Channel.B)
    losses = []
    for segment in (segment for row in rows for segment in row):
        row = collate([segment], text_weights=weights, rope_index=loaded.rope_index)
        losses.append(train_row(loaded.model, row, objectives, sampling).loss)
    assert len(losses) == report.metrics["packing/num_segments"]
    assert report.metrics["loss/total"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
