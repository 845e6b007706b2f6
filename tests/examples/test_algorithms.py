"""The algorithms of examples/algorithms, each by the configuration next to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
import yaml
from config_support import configuration, trajectory_config
from learner_support import finish_step, gradients_of_update
from rich.console import Console
from trajectory_support import begin, make_learner

from launch.train import run
from shared.run_files import read_lines
from shared.schedule import RunSchedule

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
BUILT_IN = {
    "name": "policy_gradient",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {**CLIP, "ratio_cap": 1e6, "normalize": "rollout", "advantage_std": False},
}
IN_ONE_PROCESS = {
    "cluster": {"kind": "local"},
    "rollout_matching__rollout_backend": "hf",
    "rollout_matching__decode_batch_size": 8,
    "global_max_length": 512,
    "training__max_steps": 2,
    "learner__cpus": 0.25,
    "learner__cpu_threads": 1,
}


@pytest.fixture(autouse=True)
def started_in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)


def entries_of(name, **changes):
    """The objectives of an example, with changes to the settings of its last one."""
    file = ROOT / "examples" / "algorithms" / "objective" / f"{name}.yaml"
    *others, last = yaml.safe_load(file.read_text())["objective"]
    return [*others, last | {key: last[key] | value for key, value in changes.items()}]


def built_in(**changes):
    return [BUILT_IN | {"config": BUILT_IN["config"] | changes}]


@pytest.fixture
def config(demo_lm, tmp_path_factory):
    def of(entries, **changes):
        pipeline = {"objective": entries, "diagnostics": []}
        folder = tmp_path_factory.mktemp("run")
        changes = {"training__max_grad_norm": None} | changes
        return trajectory_config(demo_lm, folder, rollout_matching__pipeline=pipeline, **changes)

    return of


def learned(config, change=lambda example: example, **how):
    """The metrics and the gradient of a step without an engine."""
    learner = make_learner(config)
    groups = begin(learner, RunSchedule(config).plan(0), **how)
    if config.rollout_matching.max_staleness:
        learner.publisher.done()
    gradients = gradients_of_update(learner)
    learner.accumulate(
        [
            tuple(
                replace(rollout, examples=tuple(map(change, rollout.examples))) for rollout in group
            )
            for group in groups
        ]
    )
    return finish_step(learner).metrics, gradients


def assert_same(one, other, atol):
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, rtol=0, atol=atol)


def logged(config):
    """The metrics of each step of a run in this process."""
    run(config, Console(record=True, width=200))
    return list(read_lines(config.telemetry.run_dir / "metrics.jsonl"))


def test_the_sequence_ratio_has_the_loss_and_gradient_of_the_built_in_with_its_settings(config):
    """Engines of older weights, so that tokens lie on both sides of the clip."""
    credit = {"normalize": "step", "advantage_std": True}
    stale = {"rollout_matching__max_staleness": 1}
    own = config(entries_of("sequence_ratio", advantages=credit, config=CLIP), **stale)
    expected = config(built_in(ratio_level="call_mean", **credit), **stale)
    metrics, gradients = learned(own, drift=2.0)
    expected_metrics, expected_gradients = learned(expected, drift=2.0)
    assert 0.1 < expected_metrics["policy/clipped_share"] < 0.9
    assert expected_metrics["optim/grad_norm"] > 0.1
    loss = expected_metrics["loss/policy_gradient"]
    assert metrics["loss/sequence_ratio"] == metrics["loss/total"] == pytest.approx(loss, abs=1e-6)
    assert_same(expected_gradients, gradients, 1e-6)
    for name in ("policy/entropy", "policy/logprob_difference"):
        assert metrics[name] == pytest.approx(expected_metrics[name], abs=1e-6)
    assert "policy/ratio" not in metrics, "the ratio is the class's own"


def test_less_median_gives_the_update_of_advantages_that_are_computed_by_hand(config):
    rewards = {0: 0.25, 1: 1.0, 2: 0.0, 3: 0.5}  # median 0.375, of every group
    of_groups = {"reward": lambda position: rewards[position % 4]}
    metrics, gradients = learned(
        config(entries_of("less_median", config=BUILT_IN["config"])), **of_groups
    )
    # The ratio is 1 and a rollout weighs 1: -(-0.125 + 0.625 - 0.375 + 0.125) / 4.
    assert metrics["loss/policy_gradient"] == pytest.approx(-0.0625, abs=1e-6)
    assert learned(config(built_in()), **of_groups)[0]["loss/policy_gradient"] == pytest.approx(
        0.0, abs=1e-6
    )

    def by_hand(example):
        advantage = example.reward - median(rewards.values())
        return replace(example, advantage=advantage, token_is_relative=[0] * len(example.token_ids))

    _, expected = learned(config(built_in()), by_hand, **of_groups)
    assert_same(expected, gradients, 0.0)


def test_runs_with_an_advantage_and_a_policy_gradient_of_ones_own_log_the_built_ins_losses(config):
    """Two steps in an environment, with the engine in the same process."""
    credit = {
        "normalize": "step",
        "advantage_std": False,
        "advantage_baseline": "examples.algorithms.less_median:less_median",
    }
    own = logged(
        config(entries_of("sequence_ratio", advantages=credit), **IN_ONE_PROCESS, queue=False)
    )
    (entry,) = entries_of("sequence_ratio")
    like_it = built_in(ratio_level="call_mean", **credit, **entry["config"])
    expected = logged(config(like_it, **IN_ONE_PROCESS, queue=False))
    of_mean = logged(
        config(
            built_in(ratio_level="call_mean", normalize="step", **entry["config"]),
            **IN_ONE_PROCESS,
            queue=False,
        )
    )
    losses = [line["loss/policy_gradient"] for line in expected]
    assert [line["loss/sequence_ratio"] for line in own] == pytest.approx(losses, abs=1e-6)
    assert [line["optim/grad_norm"] for line in own] == pytest.approx(
        [line["optim/grad_norm"] for line in expected], abs=1e-5
    )
    assert abs(of_mean[0]["loss/policy_gradient"] - losses[0]) > 1e-3


def test_a_run_with_the_focal_objective_learns_it_alone(demo_checkpoint, demo_data, tmp_path):
    lines = logged(
        configuration(
            *(demo_checkpoint, demo_data, tmp_path),
            **IN_ONE_PROCESS,
            rollout_matching__pipeline={"objective": entries_of("focal"), "diagnostics": []},
            rollout_matching__max_new_tokens=24,
            training__effective_batch_size=4,
            training__packing_window=4,
            stage2_ab__channel_b__rollouts_per_step=4,
            stage2_ab__channel_b__enable_pipeline=False,
            stage2_ab__schedule__warmup_steps=1,
            stage2_ab__schedule__b_ratio=1.0,
            data__max_val_samples=2,
            evaluation__worst_scenes=0,
        )
    )
    assert [line["channel"] for line in lines] == ["A", "B"]
    for line in lines:
        assert line["loss/total"] == pytest.approx(line["loss/focal_text"], rel=1e-6)
        # (1 - p)^2 is below 1, and near 1 for a model of random weights.
        assert 0.5 * line["loss/token_ce"] < line["loss/focal_text"] < line["loss/token_ce"]
