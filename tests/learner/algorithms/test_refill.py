"""Groups without signal give their places to further examples (`environment.refill_rounds`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import trajectory_jobs
from config_support import GROUP, trajectory_config
from learner_support import finish_step, same, weights_of
from trajectory_support import ALONE, EXAMPLES, begin, make_learner, rollouts_for

from shared.metrics import merge_reports
from shared.schedule import RunSchedule

PLACES = 3
ROLLOUTS = PLACES * GROUP


@pytest.fixture
def config(demo_lm, tmp_path_factory):
    def make(**changes):
        folder = tmp_path_factory.mktemp("run")
        # Rows by themselves: what is drawn again comes behind the others in the buffer.
        settings = {"environment__refill_rounds": 2, "training__packing": False}
        return trajectory_config(demo_lm, folder, **settings | changes)

    return make


def flat(*groups):
    """Rewards without signal in these groups, which are numbered on from the step's own."""
    return lambda at: 0.5 if at // GROUP in groups else (0.0, 1.0, 0.25)[at % 3]


class Refilled:
    """One step of a fresh learner, with all rounds of its refill."""

    def __init__(self, config, reward, *, step=0, examples=EXAMPLES, **how):
        self.learner = make_learner(config, examples)
        plan = RunSchedule(config).plan(step)
        self.answers = begin(self.learner, plan, reward=reward, **how)
        self.learner.accumulate(self.answers)
        self.asked = []
        """`[round]`, the groups that were drawn again."""
        for _ in range(config.environment.refill_rounds):
            requests = self.learner.refill_requests(plan)
            self.asked.append([group for request in requests for group in request.groups])
            answers = rollouts_for(self.learner, requests, reward=reward, **how)
            self.answers += answers
            self.learner.accumulate(answers)
        self.report = finish_step(self.learner)
        self.metrics = self.report.metrics
        self.weights = weights_of(self.learner)

    @property
    def positions(self):
        return [[group.positions for group in groups] for groups in self.asked]


def assert_same_weights(weights, others):
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["step", "batch"])
def test_a_step_is_that_of_the_groups_that_stand_in_its_places_at_the_end(config, normalize):
    """Place 1 has a signal in the second round of refill, place 2 in the first; nothing is asked
    for place 0.
    """
    objective = {"normalize": normalize}
    settings = config(objective=objective, training__adam_epsilon=1e-2)
    step = Refilled(settings, flat(1, 2, 4))
    assert step.positions == [
        [range(ROLLOUTS + 4, ROLLOUTS + 8), range(ROLLOUTS + 8, ROLLOUTS + 12)],
        [range(2 * ROLLOUTS + 4, 2 * ROLLOUTS + 8)],
    ]
    by_start = {group[0].position: group for group in step.answers}
    places = [by_start[start] for start in (0, 2 * ROLLOUTS + 4, ROLLOUTS + 8)]
    drawn_at_once = make_learner(config(environment__refill_rounds=0, objective=objective))
    plan = RunSchedule(settings).plan(0)
    begin(drawn_at_once, plan)
    positions = iter(range(ROLLOUTS))
    drawn_at_once.accumulate(
        [tuple(replace(one, position=next(positions)) for one in group) for group in places]
    )
    expected = finish_step(drawn_at_once).metrics
    assert expected["optim/grad_norm"] > 0.1
    for name in ("loss/total", "optim/grad_norm", "policy/entropy"):
        assert step.metrics[name] == pytest.approx(expected[name], abs=1e-6), name
    assert step.metrics["packing/num_segments"] == expected["packing/num_segments"]
    counts = {
        "rollout/num": 6 * GROUP,
        "rollout/num_groups": 6,
        "rollout/num_groups_without_signal": 3,
        "rollout/num_refilled": 3,
        "rollout/num_left_out": 3 * GROUP,
    }
    assert {name: step.metrics[name] for name in counts} == counts
    second, third = step.asked[1][0].example, step.asked[0][1].example
    assert list(step.report.refilled.items()) == [(4, second), (8, third)]
    again = Refilled(settings, flat(1, 2, 4))
    assert same(again.weights, step.weights)
    assert again.report.digests == step.report.digests


@pytest.mark.slow
def test_groups_that_are_still_without_signal_when_the_rounds_are_over_stay(config):
    """As without refill: they have no gradient, and count in the divisor."""
    keeping = {"environment__drop_equal_groups": False}
    step = Refilled(config(objective={"normalize": "batch"}, **keeping), flat(1, 4, 7))
    (last,) = step.answers[-1:]
    assert step.metrics["rollout/num_groups_without_signal"] == 3
    assert step.metrics["rollout/num_left_out"] == 2 * GROUP
    stay = [step.answers[0], step.answers[2], last]
    num_segments = sum(len(rollout.examples) for group in stay for rollout in group)
    assert step.metrics["packing/num_segments"] == num_segments
    assert step.report.refilled == {4: last[0].example}


@pytest.mark.slow
def test_further_examples_follow_from_seed_step_and_round_alone_and_are_no_others_of_the_step(
    config,
):
    all_flat = flat(*range(9))
    of_step, again, of_next = (Refilled(config(), all_flat, step=step).asked for step in (0, 0, 1))
    assert of_step == again
    drawn = {group[0].example for group in Refilled(config(), flat()).answers}
    examples = [group.example for groups in of_step for group in groups]
    assert len(drawn | set(examples)) == 9
    assert examples != [group.example for groups in of_next for group in groups]
    # What the others need changes nothing.
    assert Refilled(config(), flat(1, 4)).asked == [[groups[1]] for groups in of_step]


@pytest.mark.processes
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_draw_again_what_one_draws_and_take_its_update(two_ranks, config, parallel):
    changes = {"training__effective_batch_size": 4 * GROUP, "training__adam_epsilon": 1e-2}
    job = (trajectory_jobs.learn, 1, 1, (), False, trajectory_jobs.flat_at_first)
    alone = job[0](ALONE, None, config(**changes), *job[1:])
    ranks = two_ranks.run(
        job[0], config(learner__world_size=2, learner__parallel=parallel, **changes), *job[1:]
    )
    one = merge_reports(alone.reports)
    several = merge_reports([rank.reports[0] for rank in ranks])
    assert several.refilled == one.refilled
    assert list(one.refilled) == [0, 4, 8], "one rank refills two places, the other one"
    for name in ("loss/total", "optim/grad_norm", "rollout/num_refilled"):
        assert several.metrics[name] == pytest.approx(one.metrics[name], abs=1e-4), name
    assert_same_weights(alone.weights, ranks[0].weights)
