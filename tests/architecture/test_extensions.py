"""What docs/explanation/architecture.md says about adding a metric and an algorithm:
each is added here from outside the packages, by what the page names. Its other additions have
their tests in examples/ (objectives, advantages), docs/ (an environment) and
rollout_actors/backends/test_contract.py (a backend).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from config_support import configuration
from learner_support import finish_step, make_learner
from pydantic import ValidationError

from learner.algorithms.base import Algorithm, AlgorithmStep
from learner.algorithms.matched_targets import ground_truth_target
from learner.data.samples import load_samples
from learner.segments import PromptEncoder, Segment
from learner.step_metrics import StepMetrics
from learner.targets import target_settings
from shared import metrics
from shared.config.algorithm import ALGORITHMS, TrainerVariant
from shared.config.checks.algorithm import entries_have_input
from shared.config.pipeline import (
    Channel,
    LearnsFrom,
    PipelineEntry,
    Reads,
)
from shared.config.run import RowRule
from shared.schedule import StepPlan

PLAN = StepPlan(0, Channel.A, 8, 0, False, False)


class OneSample(Algorithm):
    """Learns the first sample of `data.train`, as often as the step has samples."""

    def __init__(self, config, tokens, decode, ranks):
        super().__init__()
        sample = load_samples(config, *config.data.sources("train"))[0]
        prompt = PromptEncoder(tokens.processor, config.prompts).encode(sample)
        target = ground_truth_target(sample, tokens.codec, target_settings(config))
        self.fixed = Segment(0, prompt, target)
        self.fixed_images = sample.images

    def begin_step(self, plan: StepPlan, metrics: StepMetrics) -> AlgorithmStep:
        return OneSampleStep(self.fixed, plan, metrics)

    def move_to(self, num_samples: int) -> None:
        pass

    def fingerprints(self) -> dict[str, str]:
        return {}


class OneSampleStep(AlgorithmStep):
    def __init__(self, segment: Segment, plan: StepPlan, metrics: StepMetrics) -> None:
        super().__init__(plan, metrics)
        self._segment = segment

    def ground_truth(self) -> Iterator[Segment]:
        for position in range(self.plan.num_samples):
            yield replace(self._segment, position=position)

    def require_complete(self) -> None:
        pass


@pytest.mark.slow
def test_an_algorithm_is_a_class_derived_from_two_bases(
    demo_checkpoint, demo_data, tmp_path, monkeypatch
):
    monkeypatch.setattr("learner.learner.RolloutMatching", OneSample)
    changes = {"custom__trainer_variant": "stage1_sft", "training__learning_rate": 1e-3}
    learner = make_learner(configuration(demo_checkpoint, demo_data, tmp_path, **changes))
    assert isinstance(learner.algorithm, OneSample)
    losses = []
    for step in range(3):
        assert learner.next_requests(replace(PLAN, step=step)) == []
        report = finish_step(learner)
        assert report.metrics["packing/num_segments"] == PLAN.num_samples
        losses.append(report.metrics["loss/total"])
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[2]
    learner.close()


def test_a_variant_of_an_algorithm_is_an_entry_of_its_table(
    demo_checkpoint, demo_data, tmp_path, monkeypatch
):
    config = configuration(demo_checkpoint, demo_data, tmp_path)
    name = TrainerVariant.STAGE2_TWO_CHANNEL
    assert config.custom.trainer_variant is name and config.row_rule is RowRule.STEP
    spec = replace(ALGORITHMS[name], channels=(Channel.B,), carries_segments=True)
    monkeypatch.setitem(ALGORITHMS, name, spec)
    assert config.row_rule is RowRule.CARRY


def test_an_objective_over_trajectories_is_an_entry_that_declares_it():
    class BonusEntry(PipelineEntry):
        learns_from = LearnsFrom.ADVANTAGES
        reads = Reads.SAMPLED
        name: str = "bonus"

    entry = BonusEntry(enabled=True, weight=0.1, channels=["B"])
    for variant, refused in (
        ("trajectory_pg", []),
        ("stage2_two_channel", []),
        ("stage1_sft", ["objective[0].name"]),
    ):
        found = list(entries_have_input(TrainerVariant(variant), [("objective[0]", entry)]))
        assert [problem.path for problem in found] == refused
    with pytest.raises(ValidationError, match="must be \\[B\\], got \\[A\\]"):
        BonusEntry(enabled=True, weight=0.1, channels=["A"])


def test_a_metric_is_a_line_of_the_table_and_a_call_where_it_is_counted(monkeypatch):
    line = "rollout/num_questions | sum | Rollouts that ask back."
    rate = "rollout/question_rate | rollout/num_questions / rollout/num | Their share."
    table = tuple(metrics._read(f"{metrics._TABLE}{line}\n{rate}\n"))
    monkeypatch.setattr(metrics, "METRICS", table)
    monkeypatch.setattr(metrics, "BY_NAME", {metric.name: metric for metric in table})
    counted = StepMetrics(PLAN, "learner", capacity=64, min_fill_ratio=0.0)
    for asks in (True, False, True, False):
        counted.totals.add("rollout/num", 1)
        counted.totals.add("rollout/num_questions", float(asks))
    report = counted.report(1, {}, (), denominator=8, num_carried=0)
    values = metrics.merge_reports([report]).metrics
    assert (values["rollout/num_questions"], values["rollout/question_rate"]) == (2, 0.5)
    assert "`rollout/num_questions` | sum | Rollouts that ask back." in metrics.markdown()
