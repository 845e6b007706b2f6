"""Steps that learn their rollouts several times (`training.updates_per_batch`)."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
import trajectory_jobs
from config_support import trajectory_config
from learner_support import finish_step, weights_of
from trajectory_support import ALONE, begin, make_learner
from transformers import AutoModelForCausalLM

from shared.metrics import merge_reports
from shared.schedule import RunSchedule

UPDATES = 3
STEPS = 2
SETTINGS = {
    "training__updates_per_batch": UPDATES,
    "training__learning_rate": 0.02,
    "training__lr_warmup_steps": STEPS,
    # Small gradients, of which both sides have the same bits least, move little.
    "training__adam_epsilon": 1e-2,
    "objective": {"ratio_cap": 1000.0},  # PPO has none
}


@pytest.fixture
def config(demo_lm, tmp_path_factory):
    def make(**changes):
        folder = tmp_path_factory.mktemp("run")
        return trajectory_config(demo_lm, folder, **SETTINGS | changes)

    return make


def surrogates(model, answers, rule):
    """Return PPO's losses and ratios of all tokens (1707.06347, equation 7); each loss weighs as in
    the mean over its call.
    """
    losses, ratios = [], []
    for group in answers:
        mean = fmean(rollout.reward for rollout in group)
        for rollout, example in ((one, example) for one in group for example in one.examples):
            advantage = rollout.reward - mean
            logprobs = model(input_ids=torch.tensor([example.token_ids])).logits[0].log_softmax(-1)
            begin = 0
            for end in example.step_ends or (len(example.token_ids),):
                sampled = [at for at in range(begin, end) if example.mask[at]]
                for at in sampled:
                    engine = example.logprobs[at]
                    ratio = (logprobs[at - 1, example.token_ids[at]] - engine).exp()
                    clipped = ratio.clamp(1 - rule.clip_low, 1 + rule.clip_high)
                    loss = -torch.min(ratio * advantage, clipped * advantage)
                    losses.append(loss / len(sampled))
                    ratios.append(ratio.item())
                begin = end
    return losses, ratios


@pytest.mark.slow
def test_each_update_is_ppos_on_all_rollouts_with_the_weights_that_the_one_before_it_left(
    config, demo_lm
):
    settings = config()
    training = settings.training
    rule = settings.rollout_matching.pipeline.objective[0].config
    learner = make_learner(settings)
    model = AutoModelForCausalLM.from_pretrained(demo_lm)
    adam = torch.optim.AdamW(model.parameters(), eps=training.adam_epsilon, weight_decay=0.0)
    for plan in list(RunSchedule(settings).plans())[:STEPS]:
        answers = begin(learner, plan, version=plan.step)
        learner.accumulate(answers[:2])
        learner.accumulate(answers[2:])
        metrics = finish_step(learner).metrics
        learner.publisher.done()
        losses, ratios, norms = [], [], []
        for _ in range(UPDATES):
            of_tokens, ratios_of_update = surrogates(model, answers, rule)
            loss = sum(of_tokens) / plan.num_samples
            adam.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            adam.param_groups[0]["lr"] = training.learning_rate * (plan.step + 1) / STEPS
            adam.step()
            losses.append(loss.item())
            ratios += ratios_of_update
        assert max(ratios) > 1 + rule.clip_high, "the case needs tokens that the clip ends"
        assert max(ratios) < rule.ratio_cap
        assert metrics["loss/total"] == pytest.approx(fmean(losses), abs=1e-6)
        assert metrics["policy/ratio"] == pytest.approx(fmean(ratios), abs=1e-5)
        assert metrics["optim/grad_norm"] == pytest.approx(fmean(norms), abs=1e-5)
        assert metrics["rollout/num_compared_tokens"] == metrics["rollout/num_tokens"]
        assert metrics["packing/num_segments"] == sum(len(r.examples) for g in answers for r in g)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weights_of(learner)[name], weight, rtol=0, atol=1e-6)
    assert learner.num_updates == STEPS


class Spoilt:
    """A step of three updates, in which something happens behind the first."""

    def __init__(self, config, happens):
        self.learner = make_learner(config)
        self.after = []
        """Weights after each update that was not skipped."""
        groups = begin(self.learner, RunSchedule(config).plan(0))
        self.learner.accumulate(groups)

        def note(*_):
            self.after.append(weights_of(self.learner))
            happens(self.learner)

        self.learner.optimizer.optimizer.register_step_post_hook(note)
        self.metrics = finish_step(self.learner).metrics


@pytest.mark.slow
def test_an_update_that_is_skipped_is_the_last_of_its_step(config):
    """Behind it the weights are the same, and so would be the gradient."""

    def spoil(learner):
        first = learner.optimizer.masters[0]
        first.register_hook(lambda gradient: gradient * math.nan)

    step = Spoilt(config(training__max_nonfinite_updates=1), spoil)
    assert len(step.after) == 1
    weights = weights_of(step.learner)
    assert all(torch.equal(weights[name], value) for name, value in step.after[0].items())
    assert step.metrics["optim/num_skipped"] == step.metrics["optim/num_skipped_in_a_row"] == 1
    assert math.isfinite(step.metrics["optim/grad_norm"])
    assert math.isfinite(step.metrics["loss/total"])


@pytest.mark.processes
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_take_the_updates_that_one_takes(two_ranks, config, parallel):
    alone = trajectory_jobs.learn(ALONE, None, config(), 1, 1)
    settings = config(learner__world_size=2, learner__parallel=parallel)
    ranks = two_ranks.run(trajectory_jobs.learn, settings, 1, 1)
    one = merge_reports(alone.reports).metrics
    several = merge_reports([rank.reports[0] for rank in ranks]).metrics
    for name in ("loss/total", "policy/ratio", "optim/grad_norm", "packing/num_segments"):
        assert several[name] == pytest.approx(one[name], abs=1e-4), name
    for name, weight in alone.weights.items():
        torch.testing.assert_close(ranks[0].weights[name], weight, rtol=0, atol=1e-6)
