"""`rollout_matching.max_staleness: 1`: the next step begins before this one has ended (decision
13).
"""

from dataclasses import replace

import pytest
from config_support import configuration
from learner_support import finish_step, half_right, make_learner

from learner.rollout_logs.samples import read_step
from learner.rollout_logs.writer import step_path
from shared.errors import RolloutError
from shared.schedule import RunSchedule

pytestmark = pytest.mark.slow

ROLLOUTS = 12


@pytest.fixture(scope="module")
def config(demo_checkpoint, demo_data, tmp_path_factory):
    settings = {
        "global_max_length": 512,
        "training__max_steps": 3,
        "training__effective_batch_size": ROLLOUTS,
        "training__packing_window": 4,
        "stage2_ab__schedule__warmup_steps": 0,
        "stage2_ab__channel_b__rollouts_per_step": ROLLOUTS,
        "rollout_matching__max_staleness": 1,
        "rollout_matching__decoding": {"temperature": 1.0},
    }
    return lambda **changes: configuration(
        demo_checkpoint, demo_data, tmp_path_factory.mktemp("run"), **settings | changes
    )


def of_version(rollouts, version):
    """Without log-probabilities, so that there is nothing to compare."""
    return [replace(rollout, weight_version=version) for rollout in rollouts]


def with_logprobs(rollouts):
    """Of no weights of the learner's: comparing them ends the run."""
    return [replace(one, logprobs=(-99.0,) * len(one.response_token_ids)) for one in rollouts]


def two_steps(config):
    """As the queue runs on: step 1's first round is generated while step 0's last is learned, with
    the weights from before step 0's update.
    """
    learner, schedule = make_learner(config), RunSchedule(config)
    first = half_right(learner, schedule.plan(0))
    learner.accumulate(first[:6])
    second = half_right(learner, schedule.plan(1))
    learner.accumulate(first[6:])
    reports = [finish_step(learner)]
    learner.publisher.done()
    learner.accumulate(with_logprobs(of_version(second[:6], 0)))
    learner.accumulate(of_version(second[6:], 1))
    return [*reports, finish_step(learner)]


def test_the_next_step_is_drawn_while_one_is_in_progress_and_rounds_belong_to_the_oldest(config):
    settings = config()
    first, second = two_steps(settings)
    assert (first.step, second.step) == (0, 1)
    assert (first.weight_version, second.weight_version) == (0, 1)
    # The driver's plans count from 0, what is written from 1.
    for step in (0, 1):
        lines = read_step(step_path(settings.telemetry.run_dir / "rollouts", step + 1))
        assert [line["position"] for line in lines] == list(range(ROLLOUTS))
        assert {line["step"] for line in lines} == {step + 1}
    assert {span.args["step"] for span in second.spans} == {2}


def test_stale_rollouts_are_learned_and_counted_and_their_log_probabilities_are_not_compared(
    config,
):
    first, second = two_steps(config())
    assert (first.metrics["rollout/staleness"], first.metrics["rollout/staleness_max"]) == (0.0, 0)
    assert second.metrics["rollout/staleness"] == 0.5
    assert second.metrics["rollout/staleness_max"] == 1
    assert second.metrics["packing/num_segments"] == ROLLOUTS
    assert "rollout/num_compared_tokens" not in second.metrics


def test_a_rollout_two_versions_old_ends_the_run(config):
    learner = make_learner(config())
    rollouts = half_right(learner, RunSchedule(config()).plan(0))
    learner.publisher.done()
    learner.publisher.done()
    message = r"weight version 0, the learner has 2, and rollout_matching\.max_staleness is 1"
    with pytest.raises(RolloutError, match=message):
        learner.accumulate(rollouts)
