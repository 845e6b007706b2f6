"""A learner of trajectories that stays near the weights that its run started with."""

from __future__ import annotations

import shutil

import pytest
import safetensors.torch
import torch
from config_support import trajectory_config
from learner_support import finish_step, same, timeless, weights_of
from trajectory_support import begin, logprobs_of, make_learner
from transformers import AutoModelForCausalLM

from shared.errors import ConfigError
from shared.schedule import RunSchedule

pytestmark = pytest.mark.slow

K3 = {"estimator": "k3"}
TOP = {"estimator": "top", "top_tokens": 5}
LORA, DORA = ({"model__adapter": {"kind": kind, "rank": 4}} for kind in ("lora", "dora"))


@pytest.fixture
def config(demo_lm, tmp_path_factory):
    def make(reference=K3, **changes):
        settings = {"training__learning_rate": 1e-2} | changes
        return trajectory_config(
            demo_lm, tmp_path_factory.mktemp("run"), reference=reference, **settings
        )

    return make


def learn(learner, config, number):
    """Learn a step whose rollouts are of the weights as they are; its answers and metrics."""
    version = learner.publisher.version
    answers = begin(learner, RunSchedule(config).plan(number), version=version)
    learner.accumulate(answers)
    metrics = finish_step(learner).metrics
    learner.publisher.done()
    return answers, metrics


def slow_k3(now, start, answers):
    """Over the tokens of each call a mean, over the calls a sum, divided by the rollouts."""
    total = 0.0
    for rollout in (rollout for group in answers for rollout in group):
        for example in rollout.examples:
            ends = example.step_ends or (len(example.token_ids),)
            for first, end in zip((0, *ends), ends, strict=False):
                learned = [at for at in range(first, end) if example.mask[at]]
                apart = start[id(example)][learned] - now[id(example)][learned]
                total += (apart.exp() - apart - 1).mean().item()
    return total / sum(len(group) for group in answers)


def scored(model, banned, answers):
    examples = [example for group in answers for rollout in group for example in rollout.examples]
    return {
        id(example): torch.tensor(logprobs_of(model, example.token_ids, banned)).double()
        for example in examples
    }


@pytest.mark.parametrize("changes", [{}, LORA, DORA], ids=["", "lora", "dora"])
def test_the_divergence_is_from_the_checkpoint_that_the_run_started_with(config, changes):
    settings = config(**changes)
    learner = make_learner(settings)
    banned = learner.loaded.banned_token_ids
    assert (learner.reference.copy is None) == bool(changes), "an adapter needs no second model"
    start = AutoModelForCausalLM.from_pretrained(settings.model.path)
    _, first = learn(learner, settings, 0)
    # DoRA's own start is a quotient of norms.
    assert first["loss/reference_kl"] == pytest.approx(0.0, abs=1e-6 if changes is DORA else 0.0)
    version = learner.publisher.version
    answers = begin(learner, RunSchedule(settings).plan(1), version=version)
    now = scored(learner.loaded.model, banned, answers)
    expected = slow_k3(now, scored(start, banned, answers), answers)
    learner.accumulate(answers)
    second = finish_step(learner).metrics
    assert expected > 1e-4
    assert second["loss/reference_kl"] == pytest.approx(expected, rel=1e-3)
    policy = second["loss/policy_gradient"]
    total = policy + 0.5 * second["loss/reference_kl"]
    assert second["loss/total"] == pytest.approx(total, abs=1e-6)
    assert any("lora_" in name for name in weights_of(learner)) == bool(changes)


@pytest.mark.parametrize("reference", [K3, TOP], ids=["k3", "top"])
def test_the_first_step_is_that_of_a_run_without_it(config, reference):
    near, without = (
        config(reference, model__dtype="bfloat16"),
        config(None, model__dtype="bfloat16"),
    )
    learner, other = make_learner(near), make_learner(without)
    assert other.reference is None
    _, metrics = learn(learner, near, 0)
    _, expected = learn(other, without, 0)
    assert metrics.pop("loss/reference_kl") == 0.0
    expected = timeless(expected)
    if reference is K3:
        assert timeless(metrics) == expected
        assert same(weights_of(learner), weights_of(other))
    else:  # whose gradient is 0 but for rounding
        assert metrics["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-2)


@pytest.mark.parametrize("changes", [{}, LORA], ids=["", "lora"])
def test_a_resumed_run_has_the_reference_of_its_start(config, tmp_path, changes):
    settings = config(**changes)
    learner = make_learner(settings)
    for number in range(2):
        learn(learner, settings, number)
    learner.save(tmp_path / "checkpoint", "{}")
    _, expected = learn(learner, settings, 2)
    resumed = config(**changes, resume={"run": str(tmp_path / "checkpoint")})
    again = make_learner(resumed)
    again.publisher.done()  # the sync that a resumed run begins with
    _, metrics = learn(again, resumed, 2)
    assert timeless(metrics) == timeless(expected)
    assert metrics["loss/reference_kl"] > 1e-4
    assert same(weights_of(again), weights_of(learner))


def test_a_run_is_not_resumed_with_another_reference(config, demo_lm, tmp_path):
    settings = config()
    learner = make_learner(settings)
    learn(learner, settings, 0)
    learner.save(tmp_path / "checkpoint", "{}")
    other = shutil.copytree(demo_lm, tmp_path / "model")
    (file,) = other.glob("*.safetensors")
    weights = safetensors.torch.load_file(file)
    next(iter(weights.values())).view(-1)[0] += 1.0
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    resumed = config(model__path=str(other), resume={"run": str(tmp_path / "checkpoint")})
    with pytest.raises(ConfigError, match=r"^model.path: its contents have changed"):
        make_learner(resumed)
