"""The table of all metrics in `metrics.jsonl`: name, meaning, and how values are combined.

`python -m shared.metrics` prints the table of docs/reference/metrics.md. Only names in the table
can be logged. No metric of training is an IoU: IoU only decides matches, and evaluations
report it (spec: training-time counters).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import pstdev

from shared.config.pipeline import Channel
from shared.grounding.objects import DropReason
from shared.run_files import Span


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values."""
    # `fsum` rounds once, at the end, so the order of the values does not matter.
    return math.fsum(values) / len(values) if values else math.nan


class Reduction(StrEnum):
    """How a metric's values of rows, rollouts and learner ranks become one value per step."""

    SUM = "sum"
    MEAN = "mean"
    """Sum of the values divided by their number, over all learner ranks."""
    STD = "std"
    """Standard deviation of all values (of the population), over all learner ranks."""
    MAX = "max"
    RATIO = "ratio"
    """One summed metric divided by another; absent if the divisor is 0."""
    STEP = "step"
    """Not combined: the driver has one value per step, or all learner ranks have the same."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a run: a row of the table of all metrics.

    Example: `packing/fill_ratio` is a RATIO of `("packing/num_tokens", "packing/capacity")`.
    """

    name: str
    reduction: Reduction
    meaning: str
    ratio_of: tuple[str, str] | None = None
    """Names of the metrics that are numerator and denominator of a RATIO."""


REWARD_FAMILY = "reward/"
"""Prefix of metrics named after reward functions; each environment names its functions."""
TASK_FAMILY = "rollout/reward/"
"""Prefix of the mean reward in each environment of an `EnvGroup`, which names its environments."""
SOURCE_FAMILY = "source/"
"""Prefix of the metrics of each data file, if `data.train` lists several files."""
IDLE_FAMILY = "time/idle/"
"""Prefix of the idle share of each process: an engine, an environment actor, a learner rank."""
_NAMED = (REWARD_FAMILY, TASK_FAMILY)

_TABLE = """
# The objective. Every term is a mean within its segment, then over the segments that the step
# divides by.
loss/total | sum | Loss of the step, which the update minimises: the weighted sum of the modules.
    Like all losses and `policy/...`, a mean over the step's updates (`training.updates_per_batch`).
loss/token_ce | sum | Cross-entropy of supervised text tokens (with `label_smoothing`, of the
    smoothed targets), in nats, without the module's weight.
loss/coord_reg.coord_ce | sum | Cross-entropy within the coord vocabulary, in nats.
loss/coord_reg.soft_ce | sum | Cross-entropy with the soft target, in nats.
loss/coord_reg.w1 | sum | Wasserstein-1 distance to the soft target, as a fraction of the axis.
loss/coord_reg.coord_gate | sum | Loss of probability outside the coord vocabulary at coord slots,
    in nats.
loss/coord_reg.text_gate | sum | Loss of probability on coord tokens at supervised text tokens, in
    nats.
loss/bbox_geo | sum | Sum of the weighted smooth-L1 and CIoU losses of decoded boxes.
loss/policy_gradient | sum | Ratio times advantage of sampled tokens, negated. It is near 0 when
    engine and learner agree, whatever the progress.
loss/reference_kl | sum | KL divergence of sampled tokens from the model at the start of the run,
    in nats, without the module's weight.
# How far the learner is from the engines that sampled. Ratio and clip are those of
# `policy_gradient`; a policy gradient of the user's own has only difference and entropy.
policy/ratio | mean | Learner's probability of a sampled token divided by the engine's, truncated at
    `ratio_cap`; with another `ratio_level` the ratio of its model call.
policy/clipped_share | mean | Share of sampled tokens that the clip range excludes from learning.
policy/capped_share | mean | Share of sampled tokens whose ratio is above `ratio_cap`: truncated, or
    left out (`above_cap`).
policy/logprob_difference | mean | Absolute difference between the learner's and the engine's
    log-probability of a sampled token, in nats.
policy/entropy | mean | Entropy of the learner's next token, in nats, estimated from the sampled
    tokens.
policy/teacher_log_ratio | mean | Log-probability of a sampled token under the teacher minus the
    engine's, in nats. It estimates the negative reverse KL, so its mean is negative; absent without
    `environment.teacher`.
# Diagnostics.
coord_diag/expected_bin_error | mean | Distance of the expected bin from the target at supervised
    coord slots, in bins.
coord_diag/top5_accuracy | mean | Share of supervised coord slots whose target is among the five
    most probable bins.
coord_diag/coord_mass | mean | Probability of the coord vocabulary at supervised coord slots.
# Rollouts.
rollout/num | sum | Raw rollouts.
rollout/num_tokens | sum | Tokens of the answers, without the stop token; of environments, all
    sampled tokens.
rollout/length | rollout/num_tokens / rollout/num | Mean tokens of a rollout.
rollout/length_max | max | Tokens of the longest rollout.
rollout/decode_mode | step | greedy, sample or beam.
rollout/num_length_limited | sum | Rollouts that ended at `max_new_tokens`; of environments,
    rollouts with an answer that the engine cut by length.
rollout/length_limited_rate | rollout/num_length_limited / rollout/num | Their share.
rollout/num_repeat_terminated | sum | Rollouts that the repeat guard ended.
rollout/num_truncated | sum | Rollouts whose container was not closed; of environments, rollouts cut
    by length: an answer (at `max_new_tokens` or for lack of room), or the conversation.
rollout/truncated_rate | rollout/num_truncated / rollout/num | Share of truncated rollouts.
rollout/num_overlong | sum | Truncated rollouts of environments that ended because the next prompt
    did not fit.
rollout/num_fallback | sum | Rollouts from which nothing could be kept: the prefix has no objects.
rollout/num_valid_objects | sum | Predicted objects that are valid.
rollout/num_doubles | sum | Valid objects with the name and, within 5 bins, the place of an earlier
    one.
rollout/top_name_share | mean | Share of the most frequent name of valid objects, by rank.
rollout/top_name_share_of_truth | mean | Of ground-truth objects.
rollout/num_dropped_objects | sum | Predicted entries that were dropped.
rollout/num_dropped.<reason> | sum | Dropped as `<reason>`; absent at 0.
rollout/num_objects_after_close | sum | Objects after the end of the container; not read, and not
    counted as dropped.
rollout/num_excluded | sum | Matched objects whose coordinates cannot be supervised (tokens not
    aligned with certainty, or no finite transport): not trained, ground truth appended.
rollout/num_ground_truth | sum | Ground-truth objects of the step's samples.
rollout/num_matched | sum | Matched pairs, including excluded ones.
rollout/match_rate | rollout/num_matched / rollout/num_ground_truth | Share of ground-truth objects
    that were matched.
rollout/num_appended | sum | Ground-truth objects appended (false negatives, and excluded pairs).
rollout/num_gating_rejections | sum | Candidate pairs below `maskiou_gate`.
rollout/match_gate | max | Mask IoU gate of the step; absent without `maskiou_gate_schedule`.
rollout/num_trimmed | sum | Entries that were cut off after the last match
    (`trim_trailing_false_positives`); absent at 0.
rollout/num_separators | sum | Separator tokens before matched objects of kept rollouts that are
    taught (`supervise_separators`); absent at 0.
rollout/num_corrected_names | sum | Matched objects whose name is taught at its first wrong token
    (`matched_desc_weight`); absent at 0.
rollout/num_capped_epsilons | sum | Matched pairs whose transport uses less than `ot_epsilon`
    (`ot_epsilon_cap`); absent at 0.
rollout/num_weighted_ends | sum | Targets whose end has the weight `fp_end_weight`, because they
    keep unmatched predictions; absent at 0, and if the weight is 1.
rollout/staleness | mean | Updates between the weights that generated a rollout and the weights that
    learn from it.
rollout/staleness_max | max | Staleness of the oldest rollout.
rollout/reward | mean | Reward of the rollouts that did not fail.
rollout/reward_std | std | Standard deviation of these rewards.
rollout/reward/<task> | mean | Reward in one environment of a group (`EnvGroup`), by its name.
reward/<function> | mean | Result of a reward function of the environment's rubric, by its name and
    without its weight.
rollout/num_failed | sum | Rollouts that ended with an error; they are not learned.
rollout/num_reward_errors | sum | Failed calls of reward functions; the log of rollouts has their
    errors.
rollout/num_replaced | step | Actors and servers that were lost and replaced; absent at 0.
rollout/num_given_up | sum | Plain tools and reward functions that exceeded a time limit; their
    threads were replaced.
rollout/num_tool_calls | sum | Tool calls by the model; absent if it has no tools.
rollout/turns | mean | Model calls in a rollout.
rollout/num_splits | sum | Model calls whose prompt does not continue the tokens of the call before.
    Each of them begins another segment.
rollout/num_groups | sum | Groups: examples with their rollouts.
rollout/num_groups_without_signal | sum | Groups whose rewards are all equal.
rollout/no_signal_share | rollout/num_groups_without_signal / rollout/num_groups | Share of groups
    without signal.
rollout/num_left_out | sum | Rollouts of such groups that were left out
    (`environment.drop_equal_groups`) or replaced (`environment.refill_rounds`).
rollout/num_refilled | sum | Groups of other examples that replaced groups without signal, included
    in `rollout/num_groups`; absent without `environment.refill_rounds`.
rollout/num_masked | sum | Truncated rollouts without error that were left out
    (`environment.drop_truncated`).
rollout/num_compared_tokens | sum | Sampled tokens whose log-probability was compared; absent at 0.
rollout/logprob_max_abs | max | Largest difference between the learner's and the engine's
    log-probability of a sampled token, in nats.
rollout/num_logprob_outliers | sum | Compared tokens that differ by more than
    `rollout_matching.logprob_tolerance`.
rollout/logprob_outlier_rate | rollout/num_logprob_outliers / rollout/num_compared_tokens | Share of
    outliers among the compared tokens.
# For each file of `data.train`, if there are several.
source/num_samples/<source> | sum | Samples of this file in the step; a sample counts once for each
    rollout.
source/num_ground_truth/<source> | sum | Ground-truth objects of this file's samples, on channel B.
source/num_valid_objects/<source> | sum | Valid predicted objects in rollouts of this file's
    samples.
source/num_matched/<source> | sum | Matched pairs of this file's samples.
source/match_rate/<source> | source/num_matched/<source> / source/num_ground_truth/<source> |
    Share of this file's ground-truth objects that were matched.
# Augmentation (`data.augment`); absent without it. All rollouts of a sample have the same image.
augment/num_samples | sum | Samples that were changed.
augment/num_unchanged | sum | Samples that no drawn change fitted (`global_max_length`).
augment/num_dropped_objects | sum | Objects removed because a crop left too little (`min_visible`).
# Rows.
packing/num_segments | sum | Segments learned.
packing/num_rows | sum | Rows (forward passes) of the step's first update.
packing/num_tokens | sum | Tokens in those rows.
packing/num_learned_tokens | sum | Tokens of learned segments, once for each update.
packing/capacity | sum | Tokens that fit into those rows: `global_max_length` each.
packing/fill_ratio | packing/num_tokens / packing/capacity | Fill ratio of the rows.
packing/num_underfilled_rows | sum | Rows below `training.packing_min_fill_ratio`.
packing/num_carried | sum | Segments left in the buffer for later steps; 0 if every step is learned
    to completion.
packing/learned_age | mean | Steps between a segment's rollout and its learning.
packing/learned_age_max | max | Age of the oldest learned segment, in steps.
# The update.
optim/learning_rate | step | Learning rate of this update, for parts without their own rate.
optim/learning_rate.vision_tower | step | Learning rate of the vision tower, if it has its own.
optim/learning_rate.aligner | step | Learning rate of the aligner, if it has its own.
optim/learning_rate.language_model | step | Learning rate of the language model, if it has its own.
optim/grad_norm | step | L2 norm of the gradient before clipping, a mean over the step's updates;
    absent if it was not finite.
optim/num_skipped | step | 1 if an update was skipped because its gradient was not finite, together
    with the rest of the step; else 0.
optim/num_skipped_in_a_row | step | Successive skipped updates up to this one.
# Weights.
sync/version | step | Weight version after the sync that follows this step.
sync/mode | step | full or adapter: what was sent.
sync/bytes | step | Bytes of the weights.
sync/wire_gb_per_s | step | Bytes per second of the wire phase, in GB/s.
sync/canary_max_abs | step | Largest difference of a canary log-probability between the learner and
    an engine, in nats.
sync/canary_mean_abs | step | Mean difference of a canary log-probability, in nats, for the engine
    that differs most.
sync/adapter_effect | step | Effect of the adapter on the canary's log-probabilities in an engine,
    divided by the learner's; the engine farthest from 1. Absent with full weights, and if too
    small to measure.
sync/pause_s | step | Seconds until running requests have ended, in the slowest engine.
sync/rendezvous_s | step | Seconds of joining the process group (the first time, and after a
    failure), in the slowest engine.
sync/wire_s | step | Seconds of receiving, in the slowest engine.
sync/load_s | step | Seconds of loading tensors into the engine, in the slowest engine.
sync/verify_s | step | Seconds of comparing names and checksums, in the slowest engine.
sync/reset_s | step | Seconds of clearing the prefix, multimodal and encoder caches, in the slowest
    engine.
sync/canary_s | step | Seconds of scoring the canary, in the slowest engine.
sync/gather_s | step | Seconds of assembling the weights if engine and learner share a process, in
    the slowest engine.
sync/send_gather_s | step | Learner's seconds of assembling its weights, while engines receive.
sync/send_verify_s | step | Learner's seconds of computing checksums.
sync/send_rendezvous_s | step | Learner's seconds of joining the process group.
sync/send_wire_s | step | Learner's seconds of sending, until every engine has loaded the last
    bucket.
sync/send_canary_s | step | Learner's seconds of scoring the canary, while the engines load (0 with
    shards: before the offer).
# Time.
time/step_s | step | Seconds of the step, including the sync.
time/generate_s | max | Seconds with at least one engine generating, summed over rounds.
time/generate_tokens_per_s | rollout/num_tokens / time/generate_s | Sampled tokens per second.
time/learn_s | max | Seconds of the learner's own work.
time/learn_tokens_per_s | packing/num_learned_tokens / time/learn_s | Learned tokens, with prompts,
    per second.
time/reduce_s | max | Seconds that a learner rank waited for other ranks at the end of the step and
    summed gradients; absent with one rank.
time/sync_s | step | Seconds of the sync.
time/queue_wait_s | step | Seconds that the learner was idle because the next round was not ready.
time/save_s | step | Seconds of waiting for checkpoints since the step before; absent at 0.
time/bounded_by | step | Part that bounded the step most (docs/how_to/doctor.md).
time/idle/<process> | step | Share of the step in which it did not work.
time/replace_s | step | Longest time until a lost actor was replaced; absent at 0.
"""
"""One metric per line: name, reduction (or numerator / denominator), meaning."""


def _read(table: str) -> Iterator[Metric]:
    """Parse the table. A row with `<reason>` yields one metric per drop reason."""
    lines: list[str] = []
    for line in table.replace("\n    ", " ").strip().splitlines():
        reasons = tuple(DropReason) if "<reason>" in line else ("",)
        lines += [line.replace("<reason>", reason) for reason in reasons]
    for line in lines:
        if line.startswith("#"):
            continue
        name, reduction, meaning = line.split(" | ")
        if " / " in reduction:
            above, below = reduction.split(" / ")
            yield Metric(name, Reduction.RATIO, meaning, (above, below))
        else:
            yield Metric(name, Reduction(reduction), meaning)


METRICS: tuple[Metric, ...] = tuple(_read(_TABLE))
BY_NAME = {metric.name: metric for metric in METRICS}


def metric_of(name: str) -> Metric | None:
    """Return the metric with this name, or None if no metric may have it.

    It may be a row of the metric table, or have one of four prefixes. `reward/` and
    `rollout/reward/` precede names from environments, `source/` names of data files, `time/idle/`
    names of processes. An unknown name after `loss/` is a term of an objective (`term_names`).
    """
    if name.startswith(REWARD_FAMILY):
        return BY_NAME[f"{REWARD_FAMILY}<function>"]
    if name.startswith(TASK_FAMILY):
        return BY_NAME[f"{TASK_FAMILY}<task>"]
    if name.startswith(IDLE_FAMILY):
        return BY_NAME[f"{IDLE_FAMILY}<process>"]
    if name.startswith(SOURCE_FAMILY):
        return BY_NAME.get(f"{name.rpartition('/')[0]}/<source>")
    if name not in BY_NAME and name.startswith("loss/"):
        return Metric(name, Reduction.SUM, "A term of an objective.")
    return BY_NAME.get(name)


@dataclass(slots=True)
class MetricAccumulator:
    """The sums that a step's metrics are computed from, on one learner rank.

    The driver merges the sums of all ranks before it reads them. An unknown name, or a method that
    does not suit the metric's reduction, is a programming error (AssertionError).

    Example: `add_mean("packing/learned_age", total=3.0, count=2)` reads as 1.5.
    """

    _totals: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, float] = field(default_factory=dict)
    _values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Add a value to a metric whose reduction is SUM."""
        self._fold(name, value, Reduction.SUM)

    def add_mean(self, name: str, total: float, count: float) -> None:
        """Add `count` values, whose sum is `total`, to a metric whose reduction is MEAN."""
        self._fold(name, total, Reduction.MEAN)
        self._counts[name] = self._counts.get(name, 0) + count

    def add_value(self, name: str, value: float) -> None:
        """Add a value to a metric whose reduction is STD."""
        assert _reduction_of(name) is Reduction.STD, f"{name} is reduced by {_reduction_of(name)}"
        self._values.setdefault(name, []).append(value)

    def add_max(self, name: str, value: float) -> None:
        """Add a value to a metric whose reduction is MAX."""
        self._fold(name, value, Reduction.MAX)

    def merge(self, others: Iterable[MetricAccumulator]) -> None:
        """Add the sums of other learner ranks to these sums."""
        for other in others:
            for name, total in other._totals.items():
                self._fold(name, total, _reduction_of(name))
            for name, count in other._counts.items():
                self._counts[name] = self._counts.get(name, 0) + count
            for name, values in other._values.items():
                self._values.setdefault(name, []).extend(values)

    def as_dict(self) -> dict[str, float]:
        """Return the value of each metric by its name, in the order of the metric table.

        Means and ratios that would divide by 0 are left out.
        """
        values: dict[str, float] = {}
        for metric in self._metrics():
            if metric.ratio_of is not None:
                above, below = metric.ratio_of
                if above in self._totals and below in self._totals and self._totals[below]:
                    values[metric.name] = self._totals[above] / self._totals[below]
            elif metric.name in self._values:
                values[metric.name] = pstdev(self._values[metric.name])
            elif metric.name not in self._totals:
                continue
            elif metric.reduction is not Reduction.MEAN:
                values[metric.name] = self._totals[metric.name]
            elif self._counts[metric.name]:
                values[metric.name] = self._totals[metric.name] / self._counts[metric.name]
        return values

    def _metrics(self) -> Iterator[Metric]:
        """Yield the metrics that may have values: the rows of the metric table, then other losses.

        A row for a family of metrics, such as `reward/<function>`, is replaced by a row for each
        name of the family that has values here.
        """
        names = sorted(self._totals.keys() - BY_NAME.keys())
        sources = sorted(
            {name.rpartition("/")[2] for name in names if name.startswith(SOURCE_FAMILY)}
        )
        for metric in METRICS:
            family = next((one for one in _NAMED if metric.name.startswith(one)), None)
            if family is not None:
                yield from (replace(metric, name=name) for name in names if name.startswith(family))
            elif metric.name.startswith(SOURCE_FAMILY):
                yield from (_of_source(metric, source) for source in sources)
            else:
                yield metric
        for name in names:
            if not name.startswith((*_NAMED, SOURCE_FAMILY)):
                yield Metric(name, _reduction_of(name), "")

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


def _of_source(metric: Metric, source: str) -> Metric:
    """Return the metric of a table row such as `source/num_samples/<source>` for one data file."""
    name = metric.name.replace("<source>", source)
    if metric.ratio_of is None:
        return replace(metric, name=name)
    above, below = (part.replace("<source>", source) for part in metric.ratio_of)
    return replace(metric, name=name, ratio_of=(above, below))


def _reduction_of(name: str) -> Reduction:
    metric = metric_of(name)
    assert metric is not None, f"{name} is not in the table"
    return metric.reduction


def markdown() -> str:
    """Return the table of all metrics in Markdown, as docs/reference/metrics.md contains it."""
    lines = ["name | of rows and ranks | meaning", "---|---|---"]
    for metric in METRICS:
        reduction: str = metric.reduction
        if metric.ratio_of is not None:
            reduction = f"ratio: `{metric.ratio_of[0]}` / `{metric.ratio_of[1]}`"
        lines.append(f"`{metric.name}` | {reduction} | {metric.meaning}")
    return "\n".join(lines) + "\n"


DIGESTS = ("requests", "rollouts", "targets", "weights")
"""Names of the digests that the ledger of a run records for each step.

They are of the requests, the sampled tokens, the learned rows and the updated weights.
"""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One learner rank's report to the driver after a step: metrics, times, digests."""

    step: int
    """Optimizer step, from 0."""
    channel: Channel
    weight_version: int
    """Weight version of the learner at the start of the step."""
    totals: MetricAccumulator
    """Sums of this rank's metrics, which the driver merges with the sums of other ranks."""
    step_metrics: Mapping[str, float]
    """Metrics with the same value on every rank."""
    spans: tuple[Span, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of this rank's part of the step, by the names in `DIGESTS`."""
    refilled: Mapping[int, int] = field(default_factory=dict)
    """By replaced group, the row of the environment's data that replaced it. The rewards of a
    replaced group were all equal.

    A group is named by the position of its first rollout in the step; a row by its index.
    """


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report about a step, merged from the reports of all learner ranks.

    Example: `StepReport(0, Channel.B, 4, {"loss/total": 0.7}, ())` is step 1 for a reader.
    """

    step: int
    """Optimizer step, from 0."""
    channel: Channel
    weight_version: int
    """Weight version of the learner at the start of the step.

    The step's rollouts may be older, by at most `rollout/staleness_max` updates.
    """
    metrics: Mapping[str, float]
    """`loss/...`, `rollout/...`, `packing/...`, `optim/...`, `time/...`; never an IoU."""
    spans: tuple[Span, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    """Hex digests of the step's inputs and results, by the names in `DIGESTS`.

    Empty if the run has no ledger.
    """
    refilled: Mapping[int, int] = field(default_factory=dict)
    """`RankReport.refilled` of all ranks, ordered by position."""

    @property
    def number(self) -> int:
        """The step's number in files and messages, from 1."""
        return self.step + 1


def merge_reports(reports: Sequence[RankReport]) -> StepReport:
    """Return the step's report, merged from the reports of all learner ranks in rank order."""
    first = reports[0]
    kinds = {(report.step, report.channel, report.weight_version) for report in reports}
    assert len(kinds) == 1, f"the learner ranks report different steps: {sorted(kinds)}"
    totals = MetricAccumulator()
    totals.merge(report.totals for report in reports)
    spans = tuple(span for report in reports for span in report.spans)
    digests = {}
    for name in DIGESTS:
        # A rank without samples has no requests; on channel A no rank has requests.
        parts = [report.digests[name] for report in reports if name in report.digests]
        if parts:
            joined = hashlib.sha256(" ".join(parts).encode()).hexdigest()
            digests[name] = parts[0] if len(reports) == 1 else joined
    return StepReport(
        first.step,
        first.channel,
        first.weight_version,
        {**totals.as_dict(), **first.step_metrics},
        spans,
        digests,
        dict(sorted(pair for report in reports for pair in report.refilled.items())),
    )


if __name__ == "__main__":
    print(markdown(), end="")
