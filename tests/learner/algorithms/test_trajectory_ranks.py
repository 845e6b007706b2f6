"""Several ranks learn of trajectories what one learns (decisions 6, 10, 15 and 17).

The tolerance is that of `test_learner_ranks`: float sums over other rows are all that differs.
"""

from __future__ import annotations

import re

import pytest
import trajectory_jobs
from config_support import GROUP, trajectory_config
from rank_support import assert_same_updates, merged
from trajectory_support import ALONE

from shared.errors import RolloutError

pytestmark = pytest.mark.processes

STEPS = 3
DDP = {"learner__world_size": 2}
FSDP = {"learner__world_size": 2, "learner__parallel": "fsdp"}


@pytest.fixture(scope="module")
def config(demo_lm, tmp_path_factory):
    return lambda **changes: trajectory_config(demo_lm, tmp_path_factory.mktemp("run"), **changes)


@pytest.fixture(scope="module")
def alone(config):
    return trajectory_jobs.learn(ALONE, None, config(), STEPS, 1)


@pytest.fixture(scope="module")
def ddp_config(config):
    return config(**DDP)


@pytest.fixture(scope="module")
def ddp(two_ranks, ddp_config):
    return two_ranks.run(trajectory_jobs.learn, ddp_config, STEPS, 1)


def test_two_ranks_take_the_updates_that_one_takes(alone, ddp, config):
    assert_same_updates(alone, ddp, rel=1e-4)
    before = trajectory_jobs.learn(ALONE, None, config(), 0, 1).weights
    assert any((weight - before[name]).abs().max() > 1e-4 for name, weight in alone.weights.items())


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_that_share_prompts_take_the_update_of_one_that_repeats_them(
    two_ranks, config, parallel
):
    alone = trajectory_jobs.learn(ALONE, None, config(), 1, 1)
    changes = {"training__share_prompts": True, **parallel}
    ranks = two_ranks.run(trajectory_jobs.learn, config(**changes), 1, 1)
    assert_same_updates(alone, ranks, rel=1e-4)
    tokens = [
        [report.metrics["packing/num_tokens"] for report in merged(one)] for one in (ranks, [alone])
    ]
    assert all(once < repeated for once, repeated in zip(*tokens, strict=True))


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_that_divide_by_the_steps_tokens_divide_by_those_of_all_of_them(
    two_ranks, config, parallel
):
    objective = {"normalize": "batch"}
    alone = trajectory_jobs.learn(ALONE, None, config(objective=objective), 1, 3)
    ranks = two_ranks.run(trajectory_jobs.learn, config(objective=objective, **parallel), 1, 1)
    assert_same_updates(alone, ranks, rel=1e-4)


@pytest.mark.parametrize(
    ("parallel", "reference", "adapter"),
    [
        pytest.param(DDP, {"estimator": "k3"}, None, id="ddp, k3"),
        pytest.param(FSDP, {"estimator": "k3"}, None, id="fsdp, k3"),
        pytest.param(FSDP, {"estimator": "top", "top_tokens": 6}, None, id="fsdp, top"),
        pytest.param(FSDP, {"estimator": "k3"}, {"kind": "lora", "rank": 4}, id="fsdp, lora"),
    ],
)
def test_ranks_compare_with_the_start_of_the_run_as_one_does(
    two_ranks, config, parallel, reference, adapter
):
    changes = {
        "reference": reference,
        "model__adapter": adapter,
        "training__learning_rate": 1e-2,
        "rollout_matching__logprob_tolerance": 100.0,  # the answers are the start's
    }
    alone = trajectory_jobs.learn(ALONE, None, config(**changes), 2, 3, by_start=True)
    ranks = two_ranks.run(trajectory_jobs.learn, config(**changes, **parallel), 2, 1, (), True)
    assert_same_updates(alone, ranks, rel=1e-4)
    first, second = (report.metrics["loss/reference_kl"] for report in merged(ranks))
    assert (first, second > 1e-4) == (pytest.approx(0.0, abs=1e-9), True)
    expected = merged([alone])[1].metrics["loss/reference_kl"]
    assert second == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_rank_all_of_whose_rollouts_have_failed_goes_on_with_the_others(
    two_ranks, config, parallel
):
    """How many ranks there are does not decide what ends a run. The second has one group."""
    lost = range(2 * GROUP, 3 * GROUP)
    alone = trajectory_jobs.learn(ALONE, None, config(), 1, 1, lost)
    ranks = two_ranks.run(trajectory_jobs.learn, config(**parallel), 1, 1, lost)
    assert_same_updates(alone, ranks, rel=1e-4)
    assert merged(ranks)[0].metrics["rollout/num_failed"] == GROUP


@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_rollouts_that_have_failed_on_every_rank_end_them_all_with_an_error_of_their_own(
    two_ranks, config, parallel
):
    first, second = two_ranks.outcomes(
        trajectory_jobs.learn, config(**parallel), 1, 1, range(3 * GROUP)
    )
    assert type(first) is type(second) is RolloutError
    for position, error in ((0, first), (2 * GROUP, second)):
        message = rf"all 12 .*step 1 .*position {position} .*ZeroDivisionError: no such luck; "
        assert re.search(message, str(error))
