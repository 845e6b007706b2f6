"""Every number of `metrics.jsonl`: its name, what it means, and how parts of a step become one
number.

`python -m shared.metrics` prints the table of docs/metrics.md. A name that is not here cannot be
logged. None of them is an IoU: those are used to match, and reported by evaluations (spec:
training-time counters).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shared.config.pipeline import Channel
from shared.grounding.objects import DropReason
from shared.run_files import Span


class Reduction(StrEnum):
    """How the values of rows, rollouts and learner ranks become the step's."""

    SUM = "sum"
    MEAN = "mean"
    """Total over count, both summed."""
    MAX = "max"
    RATIO = "ratio"
    """Of two other metrics, after they were summed; absent over 0."""
    STEP = "step"
    """One value per step: the driver's, or the same on every rank."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    reduction: Reduction
    meaning: str
    ratio_of: tuple[str, str] | None = None
    """Numerator and denominator of a RATIO."""


def _ratio(name: str, numerator: str, denominator: str, meaning: str) -> Metric:
    return Metric(name, Reduction.RATIO, meaning, (numerator, denominator))


def _sync_phases() -> Iterator[Metric]:
    engines = {
        "pause": "finishing what runs and starting nothing",
        "rendezvous": "joining the process group: the first time, and after a failure",
        "wire": "receiving",
        "load": "putting tensors into the engine",
        "verify": "comparing names and checksums",
        "reset": "emptying the prefix, multimodal and encoder caches",
        "canary": "scoring the probe",
        "gather": "putting the weights together, where engine and learner share a process",
    }
    learner = {
        "gather": "putting its weights together, while the engines receive",
        "verify": "its checksums",
        "rendezvous": "joining the group",
        "wire": "sending, until every engine has loaded the last bucket",
        "canary": (
            "scoring the probe, while the engines load (0 where ranks hold parts of the model: then"
            " it is scored before the offer)"
        ),
    }
    yield from (
        Metric(f"sync/{phase}_s", Reduction.STEP, f"Seconds of {meaning}, of the slowest engine.")
        for phase, meaning in engines.items()
    )
    yield from (
        Metric(f"sync/send_{phase}_s", Reduction.STEP, f"The learner's seconds of {meaning}.")
        for phase, meaning in learner.items()
    )


REWARD_FAMILY = "reward/"
"""What the names of reward functions, which environments choose, stand behind."""

METRICS: tuple[Metric, ...] = (
    # The objective. Every term is a mean within its segment, then over the segments that the step
    # divides by.
    Metric(
        "loss/total",
        Reduction.SUM,
        "The step's loss: weighted modules, summed. What the update descends.",
    ),
    Metric(
        "loss/token_ce",
        Reduction.SUM,
        "Cross-entropy of supervised text tokens, in nats, unweighted by the module's weight.",
    ),
    Metric(
        "loss/coord_reg.coord_ce",
        Reduction.SUM,
        "Cross-entropy within the coord vocabulary, in nats.",
    ),
    Metric(
        "loss/coord_reg.soft_ce", Reduction.SUM, "Cross-entropy against the soft target, in nats."
    ),
    Metric(
        "loss/coord_reg.w1",
        Reduction.SUM,
        "Wasserstein-1 distance to the soft target, as a fraction of the axis.",
    ),
    Metric(
        "loss/coord_reg.coord_gate",
        Reduction.SUM,
        "Probability that leaks out of the coord vocabulary at coord slots, in nats.",
    ),
    Metric(
        "loss/coord_reg.text_gate",
        Reduction.SUM,
        "Probability of coord tokens at supervised text tokens, in nats.",
    ),
    Metric(
        "loss/bbox_geo",
        Reduction.SUM,
        "Weighted smooth-L1 and CIoU losses of decoded boxes, as one number.",
    ),
    Metric(
        "loss/policy_gradient",
        Reduction.SUM,
        "Ratio times advantage of sampled tokens, negated. No measure of progress: near 0 where"
        " engine and learner agree.",
    ),
    # How far the learner is from the engines that sampled; with `policy_gradient` alone.
    Metric(
        "policy/ratio",
        Reduction.MEAN,
        "Probability of a sampled token in the learner over the engine's, truncated at"
        " `ratio_cap`.",
    ),
    Metric(
        "policy/clipped_share",
        Reduction.MEAN,
        "Share of sampled tokens that the clip keeps from being learned.",
    ),
    Metric(
        "policy/logprob_difference",
        Reduction.MEAN,
        "Absolute difference between the learner's and the engine's log-probability of a sampled"
        " token, in nats.",
    ),
    Metric(
        "policy/entropy",
        Reduction.MEAN,
        "Of the learner's next token, in nats, estimated from the tokens that were sampled.",
    ),
    # Diagnostics.
    Metric(
        "coord_diag/expected_bin_error",
        Reduction.MEAN,
        "Distance of the expected bin from the target, in bins, over supervised coord slots.",
    ),
    Metric(
        "coord_diag/top5_accuracy",
        Reduction.MEAN,
        "Share of supervised coord slots whose target is among the five most probable bins.",
    ),
    Metric(
        "coord_diag/coord_mass",
        Reduction.MEAN,
        "Probability of the coord vocabulary at supervised coord slots.",
    ),
    # What became of the rollouts.
    Metric("rollout/num", Reduction.SUM, "Raw rollouts."),
    Metric(
        "rollout/num_tokens",
        Reduction.SUM,
        "Response tokens, without the stop token; of environments, all that were sampled.",
    ),
    Metric("rollout/decode_mode", Reduction.STEP, "greedy, sample or beam."),
    Metric(
        "rollout/num_length_limited",
        Reduction.SUM,
        "Rollouts that ended at `max_new_tokens`; of environments, those with such an answer.",
    ),
    Metric("rollout/num_repeat_terminated", Reduction.SUM, "Rollouts that the repeat guard ended."),
    Metric(
        "rollout/num_truncated",
        Reduction.SUM,
        "Rollouts whose container did not close; of environments, those that were ended for their"
        " length.",
    ),
    _ratio(
        "rollout/truncated_rate",
        "rollout/num_truncated",
        "rollout/num",
        "Share of truncated rollouts.",
    ),
    Metric(
        "rollout/num_fallback",
        Reduction.SUM,
        "Rollouts of which nothing could be kept: the prefix is `{`.",
    ),
    Metric("rollout/num_valid_objects", Reduction.SUM, "Predicted objects that parsed as valid."),
    Metric("rollout/num_dropped_objects", Reduction.SUM, "Predicted entries that were dropped."),
    *(
        Metric(
            f"rollout/num_dropped.{reason}",
            Reduction.SUM,
            f"Entries dropped as `{reason}`; absent at 0.",
        )
        for reason in DropReason
    ),
    Metric(
        "rollout/num_excluded",
        Reduction.SUM,
        "Matched objects whose slots cannot be supervised (not aligned beyond doubt, or no finite"
        " transport): neutral, ground truth appended.",
    ),
    Metric(
        "rollout/num_ground_truth", Reduction.SUM, "Ground-truth objects of the step's samples."
    ),
    Metric("rollout/num_matched", Reduction.SUM, "Matched pairs, excluded ones included."),
    _ratio(
        "rollout/match_rate",
        "rollout/num_matched",
        "rollout/num_ground_truth",
        "Matched among the ground truth.",
    ),
    Metric(
        "rollout/num_appended",
        Reduction.SUM,
        "Ground-truth objects appended (false negatives, and those of excluded pairs).",
    ),
    Metric("rollout/num_gating_rejections", Reduction.SUM, "Candidate pairs under `maskiou_gate`."),
    Metric(
        "rollout/staleness",
        Reduction.MEAN,
        "Updates between the weights that generated a rollout and those that learn from it.",
    ),
    Metric(
        "rollout/staleness_max",
        Reduction.MAX,
        "The same of the oldest rollout; 0 without `rollout_matching.max_staleness`.",
    ),
    # Of environments.
    Metric("rollout/reward", Reduction.MEAN, "Reward of the rollouts that did not fail."),
    Metric(
        f"{REWARD_FAMILY}<function>",
        Reduction.MEAN,
        "What a reward function of the environment's rubric gave, under its name; its weight is not"
        " in it.",
    ),
    Metric(
        "rollout/num_failed",
        Reduction.SUM,
        "Rollouts that ended with an error, of which nothing is learned.",
    ),
    Metric(
        "rollout/num_reward_errors",
        Reduction.SUM,
        "Reward functions that failed, each once for every rollout; the log of rollouts says of"
        " what.",
    ),
    Metric(
        "rollout/num_given_up",
        Reduction.SUM,
        "Plain tools and reward functions that still ran at a limit of time: their threads were"
        " given up and replaced.",
    ),
    Metric(
        "rollout/num_tool_calls",
        Reduction.SUM,
        "Calls of tools by the model; absent where it is offered none.",
    ),
    Metric("rollout/turns", Reduction.MEAN, "Calls of the model in a rollout."),
    Metric(
        "rollout/num_splits",
        Reduction.SUM,
        "Calls whose prompt did not go on from the tokens of the one before: each begins a segment"
        " of its own.",
    ),
    Metric("rollout/num_groups", Reduction.SUM, "Examples, each with the rollouts of it."),
    Metric(
        "rollout/num_groups_without_signal",
        Reduction.SUM,
        "Of these, those whose rewards are all equal.",
    ),
    _ratio(
        "rollout/no_signal_share",
        "rollout/num_groups_without_signal",
        "rollout/num_groups",
        "Share of groups without signal.",
    ),
    Metric(
        "rollout/num_left_out",
        Reduction.SUM,
        "Rollouts of such groups that were left out (`environment.drop_equal_groups`).",
    ),
    Metric(
        "rollout/num_compared_tokens",
        Reduction.SUM,
        "Sampled tokens whose log-probability was compared; absent where none was.",
    ),
    Metric(
        "rollout/logprob_max_abs",
        Reduction.MAX,
        "Largest difference between the learner's and the engine's log-probability of a sampled"
        " token, in nats.",
    ),
    Metric(
        "rollout/num_logprob_outliers",
        Reduction.SUM,
        "Compared tokens that differ by more than `rollout_matching.logprob_tolerance`.",
    ),
    _ratio(
        "rollout/logprob_outlier_rate",
        "rollout/num_logprob_outliers",
        "rollout/num_compared_tokens",
        "Their share of the compared ones.",
    ),
    # Rows.
    Metric("packing/num_segments", Reduction.SUM, "Segments learned."),
    Metric("packing/num_rows", Reduction.SUM, "Rows: forwards."),
    Metric("packing/num_tokens", Reduction.SUM, "Tokens of those rows."),
    Metric(
        "packing/capacity",
        Reduction.SUM,
        "Tokens that they could have held: `global_max_length` each.",
    ),
    _ratio(
        "packing/fill_ratio", "packing/num_tokens", "packing/capacity", "How full the rows were."
    ),
    Metric(
        "packing/num_underfilled_rows",
        Reduction.SUM,
        "Rows under `training.packing_min_fill_ratio`.",
    ),
    Metric(
        "packing/num_carried",
        Reduction.SUM,
        "Segments left in the buffer for later steps; always 0 where a step is learned to"
        " completion.",
    ),
    Metric(
        "packing/learned_age", Reduction.MEAN, "Steps between a segment's rollout and its learning."
    ),
    Metric("packing/learned_age_max", Reduction.MAX, "The same of the oldest segment learned."),
    # The update.
    Metric(
        "optim/learning_rate",
        Reduction.STEP,
        "Of this update, for the parts of the model without a rate of their own.",
    ),
    Metric(
        "optim/learning_rate.vision_tower",
        Reduction.STEP,
        "Of the vision tower, where it has a rate of its own.",
    ),
    Metric("optim/learning_rate.aligner", Reduction.STEP, "Of the aligner, likewise."),
    Metric(
        "optim/learning_rate.language_model", Reduction.STEP, "Of the language model, likewise."
    ),
    Metric(
        "optim/grad_norm",
        Reduction.STEP,
        "L2 norm of the gradient before clipping; absent where it was not finite.",
    ),
    Metric(
        "optim/num_skipped",
        Reduction.STEP,
        "1 where the update was skipped, because the gradient was not finite; else 0.",
    ),
    Metric(
        "optim/num_skipped_in_a_row",
        Reduction.STEP,
        "Skipped updates up to this one, since the last that was not.",
    ),
    # Weights.
    Metric(
        "sync/version", Reduction.STEP, "Weight version that the sync after this step made current."
    ),
    Metric("sync/mode", Reduction.STEP, "full or adapter: what was sent."),
    Metric("sync/bytes", Reduction.STEP, "Bytes of the weights."),
    Metric(
        "sync/wire_gb_per_s", Reduction.STEP, "Bytes over the seconds of the wire phase, in GB/s."
    ),
    Metric(
        "sync/canary_max_abs",
        Reduction.STEP,
        "Largest difference of a canary log-probability between the learner and an engine, in"
        " nats.",
    ),
    Metric(
        "sync/canary_mean_abs",
        Reduction.STEP,
        "Mean difference of a canary log-probability, likewise, of the engine farthest from the"
        " learner.",
    ),
    Metric(
        "sync/adapter_effect",
        Reduction.STEP,
        "The adapter's effect on the canary's log-probabilities: an engine's divided by the"
        " learner's, of the engine farthest from 1; absent with full weights, and where the effect"
        " is too small to tell.",
    ),
    *_sync_phases(),
    # Time.
    Metric("time/step_s", Reduction.STEP, "Seconds of the step, sync included."),
    Metric(
        "time/generate_s",
        Reduction.MAX,
        "Seconds in which at least one engine generated, rounds added up.",
    ),
    Metric("time/learn_s", Reduction.MAX, "Seconds of the learner's own work."),
    Metric(
        "time/reduce_s",
        Reduction.MAX,
        "Seconds in which a learner rank waited for the others at the step's end, and summed"
        " gradients; absent with one.",
    ),
    Metric("time/sync_s", Reduction.STEP, "Seconds of the sync."),
    Metric(
        "time/queue_wait_s",
        Reduction.STEP,
        "Seconds in which the learner had nothing to do because the next round was not there.",
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}


def metric_of(name: str) -> Metric | None:
    """Look a metric up: in the table, or as one of a family, whose names others choose.

    Reward functions are named by environments, and the terms of an objective by its `term_names`.
    """
    if name.startswith(REWARD_FAMILY):
        return BY_NAME[f"{REWARD_FAMILY}<function>"]
    if name not in BY_NAME and name.startswith("loss/"):
        return Metric(name, Reduction.SUM, "A term of an objective.")
    return BY_NAME.get(name)


class MetricAccumulator:
    """The numbers of a step while it runs; those of several ranks can be merged before they are
    read.

    An unknown name, or one of another reduction, is a programmer's error.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def add(self, name: str, value: float) -> None:
        """To a SUM."""
        self._fold(name, value, Reduction.SUM)

    def add_mean(self, name: str, total: float, count: float) -> None:
        """`count` values of a MEAN that total `total`."""
        self._fold(name, total, Reduction.MEAN)
        self._counts[name] = self._counts[name] + count if name in self._counts else count

    def add_max(self, name: str, value: float) -> None:
        """A MAX, to at least `value`."""
        self._fold(name, value, Reduction.MAX)

    def merge(self, others: Iterable[MetricAccumulator]) -> None:
        """Fold in the totals of other ranks."""
        for other in others:
            for name, total in other._totals.items():
                self._fold(name, total, _reduction_of(name))
            for name, count in other._counts.items():
                self._counts[name] = self._counts[name] + count if name in self._counts else count

    def as_dict(self) -> dict[str, float]:
        """Values by name, in the table's order; a mean or ratio over nothing is absent."""
        values: dict[str, float] = {}
        for metric in self._metrics():
            if metric.ratio_of is not None:
                above, below = metric.ratio_of
                if above in self._totals and below in self._totals and self._totals[below]:
                    values[metric.name] = self._totals[above] / self._totals[below]
            elif metric.name not in self._totals:
                continue
            elif metric.reduction is not Reduction.MEAN:
                values[metric.name] = self._totals[metric.name]
            elif self._counts[metric.name]:
                values[metric.name] = self._totals[metric.name] / self._counts[metric.name]
        return values

    def _metrics(self) -> Iterator[Metric]:
        """The table, with the members of a family in its place, by name."""
        for metric in METRICS:
            if not metric.name.startswith(REWARD_FAMILY):
                yield metric
                continue
            yield from (
                replace(metric, name=name)
                for name in sorted(self._totals)
                if name.startswith(REWARD_FAMILY)
            )

    def _fold(self, name: str, value: float, reduction: Reduction) -> None:
        assert _reduction_of(name) is reduction, (
            f"{name} is reduced by {_reduction_of(name)}, not {reduction}"
        )
        if name not in self._totals:
            self._totals[name] = value
        elif reduction is Reduction.MAX:
            self._totals[name] = max(self._totals[name], value)
        else:
            self._totals[name] += value


def _reduction_of(name: str) -> Reduction:
    metric = metric_of(name)
    assert metric is not None, f"{name} is not in the table"
    return metric.reduction


def markdown() -> str:
    """The table as docs/metrics.md shows it."""
    rows = [f"| `{metric.name}` | {_reduction(metric)} | {metric.meaning} |" for metric in METRICS]
    return "\n".join(["| name | of rows and ranks | meaning |", "|---|---|---|", *rows]) + "\n"


def _reduction(metric: Metric) -> str:
    return (
        metric.reduction
        if metric.ratio_of is None
        else f"ratio: `{metric.ratio_of[0]}` / `{metric.ratio_of[1]}`"
    )


if __name__ == "__main__":
    print(markdown(), end="")


# What a step says, as a value that travels from the learner to the driver.


@dataclass(frozen=True, slots=True)
class RankReport:
    """One learner rank's part of a step."""

    step: int
    channel: Channel
    weight_version: int
    """Of the learner's weights when it took the step."""
    totals: MetricAccumulator
    """What this rank did, to be merged with the others' before it is read."""
    step_metrics: Mapping[str, float]
    """What is the same on every rank."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step of the run: its ranks' reports, merged."""

    step: int
    """From 0."""
    channel: Channel
    weight_version: int
    """Of the learner's weights when it took the step. Its rollouts came from them or, by at most
    `rollout/staleness_max` updates, from older ones.
    """
    metrics: Mapping[str, float]
    """`loss/...`, `rollout/...`, `packing/...`, `optim/...`, `time/...`; no IoU, ever."""
    spans: tuple[Span, ...]

    @property
    def number(self) -> int:
        """As `StepPlan.number`: from 1."""
        return self.step + 1


def merge_reports(reports: Sequence[RankReport]) -> StepReport:
    """A step as all its ranks report it, which come in rank order."""
    first = reports[0]
    kinds = {(report.step, report.channel, report.weight_version) for report in reports}
    assert len(kinds) == 1, f"the learner ranks report different steps: {sorted(kinds)}"
    totals = MetricAccumulator()
    totals.merge(report.totals for report in reports)
    spans = tuple(span for report in reports for span in report.spans)
    return StepReport(
        first.step,
        first.channel,
        first.weight_version,
        {**totals.as_dict(), **first.step_metrics},
        spans,
    )
