"""The numbers of `metrics.jsonl`: their names, meanings, and how parts of a step become one.

`python -m shared.metrics` prints the table of docs/metrics.md. A name that is not here cannot be
logged. None of them is an IoU: those are used to match, and reported by evaluations (spec:
training-time counters).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from shared.config.pipeline import Channel
from shared.grounding.objects import DropReason
from shared.run_files import Span


class Reduction(StrEnum):
    """The way in which values of rows, rollouts and learner ranks become the step's."""

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
    """One row of the table.

    Example: `packing/fill_ratio` is a RATIO of `("packing/num_tokens", "packing/capacity")`.
    """

    name: str
    reduction: Reduction
    meaning: str
    ratio_of: tuple[str, str] | None = None
    """Numerator and denominator of a RATIO."""


REWARD_FAMILY = "reward/"
"""Prefix of the names of reward functions, which environments choose."""
TASK_FAMILY = "rollout/reward/"
"""Prefix of the mean rewards of the environments of a group, whose names that chooses."""
SOURCE_FAMILY = "source/"
"""Prefix of the figures of each file of `data.train`, where there are several."""
_NAMED = (REWARD_FAMILY, TASK_FAMILY)

_TABLE = """
# The objective. Every term is a mean within its segment, then over the segments that the step
# divides by.
loss/total | sum | The step's loss: weighted modules, summed. What the update descends. Like
    all losses and `policy/...`, the mean over the step's updates (`training.updates_per_batch`).
loss/token_ce | sum | Cross-entropy of supervised text tokens, in nats, unweighted by the module's
    weight.
loss/coord_reg.coord_ce | sum | Cross-entropy within the coord vocabulary, in nats.
loss/coord_reg.soft_ce | sum | Cross-entropy against the soft target, in nats.
loss/coord_reg.w1 | sum | Wasserstein-1 distance to the soft target, as a fraction of the axis.
loss/coord_reg.coord_gate | sum | Probability that leaks out of the coord vocabulary at coord
    slots, in nats.
loss/coord_reg.text_gate | sum | Probability of coord tokens at supervised text tokens, in nats.
loss/bbox_geo | sum | Weighted smooth-L1 and CIoU losses of decoded boxes, as one number.
loss/policy_gradient | sum | Ratio times advantage of sampled tokens, negated. No measure of
    progress: near 0 where engine and learner agree.
loss/reference_kl | sum | Divergence from the policy that the run started with, of sampled tokens,
    in nats, unweighted by the module's weight.
# The distance of the learner from the engines that sampled; with `policy_gradient` alone.
policy/ratio | mean | Probability of a sampled token in the learner over the engine's, truncated at
    `ratio_cap`; of its call of the model with another `ratio_level`.
policy/clipped_share | mean | Share of sampled tokens that the clip keeps from being learned.
policy/capped_share | mean | Share of sampled tokens whose ratio is above `ratio_cap`: truncated, or
    left out (`above_cap`).
policy/logprob_difference | mean | Absolute difference between the learner's and the engine's
    log-probability of a sampled token, in nats.
policy/entropy | mean | Of the learner's next token, in nats, estimated from the tokens that were
    sampled.
policy/teacher_log_ratio | mean | Log-probability of a sampled token under the teacher less the
    engine's, in nats: minus an estimate of the reverse KL, on average negative; absent without
    `environment.teacher`.
# Diagnostics.
coord_diag/expected_bin_error | mean | Distance of the expected bin from the target, in bins, over
    supervised coord slots.
coord_diag/top5_accuracy | mean | Share of supervised coord slots whose target is among the five
    most probable bins.
coord_diag/coord_mass | mean | Probability of the coord vocabulary at supervised coord slots.
# Rollouts.
rollout/num | sum | Raw rollouts.
rollout/num_tokens | sum | Response tokens, without the stop token; of environments, all that were
    sampled.
rollout/decode_mode | step | greedy, sample or beam.
rollout/num_length_limited | sum | Rollouts that ended at `max_new_tokens`; of environments, those
    with an answer that the engine cut by length.
rollout/num_repeat_terminated | sum | Rollouts that the repeat guard ended.
rollout/num_truncated | sum | Rollouts whose container did not close; of environments, those that
    were cut by length: an answer (at `max_new_tokens`, or where there was no more room), or the
    conversation.
rollout/truncated_rate | rollout/num_truncated / rollout/num | Share of truncated rollouts.
rollout/num_overlong | sum | Of the truncated rollouts of environments, those that ended because
    there was no room for their next prompt.
rollout/num_fallback | sum | Rollouts of which nothing could be kept: the prefix is `{`.
rollout/num_valid_objects | sum | Predicted objects that parsed as valid.
rollout/num_dropped_objects | sum | Predicted entries that were dropped.
rollout/num_dropped.<reason> | sum | Entries dropped as `<reason>`; absent at 0.
rollout/num_objects_after_close | sum | Objects after the container's close, as in a second list:
    not read, and not among the dropped ones.
rollout/num_excluded | sum | Matched objects whose slots cannot be supervised (not aligned beyond
    doubt, or no finite transport): neutral, ground truth appended.
rollout/num_ground_truth | sum | Ground-truth objects of the step's samples.
rollout/num_matched | sum | Matched pairs, excluded ones included.
rollout/match_rate | rollout/num_matched / rollout/num_ground_truth | Matched among the ground
    truth.
rollout/num_appended | sum | Ground-truth objects appended (false negatives, and those of excluded
    pairs).
rollout/num_gating_rejections | sum | Candidate pairs under `maskiou_gate`.
rollout/match_gate | max | The gate of the step; absent without `maskiou_gate_schedule`.
rollout/num_trimmed | sum | Entries, valid or not, that were cut off behind the last match
    (`trim_trailing_false_positives`); absent at 0.
rollout/num_separators | sum | Tokens of kept rollouts that go on to a matched object, and are
    taught (`supervise_separators`); absent at 0.
rollout/num_corrected_names | sum | Matched objects whose name is taught where it first differs
    (`matched_desc_weight`); absent at 0.
rollout/num_capped_epsilons | sum | Matched pairs that are transported with less than `ot_epsilon`
    (`ot_epsilon_cap`); absent at 0.
rollout/num_weighted_ends | sum | Targets whose end weighs `fp_end_weight`, for they keep unmatched
    predictions; absent at 0, and where it weighs 1.
rollout/staleness | mean | Updates between the weights that generated a rollout and those that
    learn from it.
rollout/staleness_max | max | The same of the oldest rollout; 0 without
    `rollout_matching.max_staleness`.
rollout/reward | mean | Reward of the rollouts that did not fail.
rollout/reward/<task> | mean | The same of one environment of a group (`EnvGroup`), by its name.
reward/<function> | mean | What a reward function of the environment's rubric gave, under its name;
    its weight is not in it.
rollout/num_failed | sum | Rollouts that ended with an error, of which nothing is learned.
rollout/num_reward_errors | sum | Reward functions that failed, each once for every rollout; the
    log of rollouts says of what.
rollout/num_replaced | step | Rollout actors, servers and environment actors that were lost and are
    back; absent where none was (docs/recovery.md).
rollout/num_given_up | sum | Plain tools and reward functions that still ran at a limit of time:
    their threads were given up and replaced.
rollout/num_tool_calls | sum | Calls of tools by the model; absent where it is offered none.
rollout/turns | mean | Calls of the model in a rollout.
rollout/num_splits | sum | Calls whose prompt did not go on from the tokens of the one before: each
    begins a segment of its own.
rollout/num_groups | sum | Examples, each with the rollouts of it.
rollout/num_groups_without_signal | sum | Of these, those whose rewards are all equal.
rollout/no_signal_share | rollout/num_groups_without_signal / rollout/num_groups | Share of groups
    without signal.
rollout/num_left_out | sum | Rollouts of such groups that were left out
    (`environment.drop_equal_groups`) or replaced (`environment.refill_rounds`).
rollout/num_refilled | sum | Groups of further examples, among `rollout/num_groups`, that were drawn
    in the place of one without signal; absent without `environment.refill_rounds`.
rollout/num_masked | sum | Truncated rollouts that did not fail and were left out
    (`environment.drop_truncated`).
rollout/num_compared_tokens | sum | Sampled tokens whose log-probability was compared; absent where
    none was.
rollout/logprob_max_abs | max | Largest difference between the learner's and the engine's
    log-probability of a sampled token, in nats.
rollout/num_logprob_outliers | sum | Compared tokens that differ by more than
    `rollout_matching.logprob_tolerance`.
rollout/logprob_outlier_rate | rollout/num_logprob_outliers / rollout/num_compared_tokens | Their
    share of the compared ones.
# Of each file of `data.train`, where there are several.
source/num_samples/<source> | sum | Samples of this file among the step's; one counts for each
    rollout of it.
source/num_ground_truth/<source> | sum | Ground-truth objects of this file's samples, of channel B.
source/num_valid_objects/<source> | sum | Valid predicted objects in rollouts of this file's
    samples.
source/num_matched/<source> | sum | Matched pairs of this file's samples.
source/match_rate/<source> | source/num_matched/<source> / source/num_ground_truth/<source> |
    Matched among the ground truth.
# Augmentation (`data.augment`); absent without it. Rollouts of one sample are of one picture.
augment/num_samples | sum | Samples that were changed.
augment/num_unchanged | sum | Samples that stayed as they are, for nothing that was drawn fitted
    `global_max_length`.
augment/num_dropped_objects | sum | Objects of which a crop left too little (`min_visible`).
# Rows.
packing/num_segments | sum | Segments learned.
packing/num_rows | sum | Rows: forwards, those of the step's first update.
packing/num_tokens | sum | Tokens of those rows.
packing/capacity | sum | Tokens that they could have held: `global_max_length` each.
packing/fill_ratio | packing/num_tokens / packing/capacity | How full the rows were.
packing/num_underfilled_rows | sum | Rows under `training.packing_min_fill_ratio`.
packing/num_carried | sum | Segments left in the buffer for later steps; always 0 where a step is
    learned to completion.
packing/learned_age | mean | Steps between a segment's rollout and its learning.
packing/learned_age_max | max | The same of the oldest segment learned.
# The update.
optim/learning_rate | step | Of this update, for the parts of the model without a rate of their
    own.
optim/learning_rate.vision_tower | step | Of the vision tower, where it has a rate of its own.
optim/learning_rate.aligner | step | Of the aligner, likewise.
optim/learning_rate.language_model | step | Of the language model, likewise.
optim/grad_norm | step | L2 norm of the gradient before clipping, the mean over the step's updates;
    absent where it was not finite.
optim/num_skipped | step | 1 where an update was skipped, because the gradient was not finite, and
    with it the rest of the step's; else 0.
optim/num_skipped_in_a_row | step | Skipped updates up to this one, since the last that was not.
# Weights.
sync/version | step | Weight version that the sync after this step made current.
sync/mode | step | full or adapter: what was sent.
sync/bytes | step | Bytes of the weights.
sync/wire_gb_per_s | step | Bytes over the seconds of the wire phase, in GB/s.
sync/canary_max_abs | step | Largest difference of a canary log-probability between the learner and
    an engine, in nats.
sync/canary_mean_abs | step | Mean difference of a canary log-probability, likewise, of the engine
    farthest from the learner.
sync/adapter_effect | step | The adapter's effect on the canary's log-probabilities: an engine's
    divided by the learner's, of the engine farthest from 1; absent with full weights, and where
    the effect is too small to tell.
sync/pause_s | step | Seconds of finishing what runs and starting nothing, of the slowest engine.
sync/rendezvous_s | step | Seconds of joining the process group: the first time, and after a
    failure, of the slowest engine.
sync/wire_s | step | Seconds of receiving, of the slowest engine.
sync/load_s | step | Seconds of putting tensors into the engine, of the slowest engine.
sync/verify_s | step | Seconds of comparing names and checksums, of the slowest engine.
sync/reset_s | step | Seconds of emptying the prefix, multimodal and encoder caches, of the slowest
    engine.
sync/canary_s | step | Seconds of scoring the probe, of the slowest engine.
sync/gather_s | step | Seconds of putting the weights together, where engine and learner share a
    process, of the slowest engine.
sync/send_gather_s | step | The learner's seconds of putting its weights together, while the
    engines receive.
sync/send_verify_s | step | The learner's seconds of its checksums.
sync/send_rendezvous_s | step | The learner's seconds of joining the group.
sync/send_wire_s | step | The learner's seconds of sending, until every engine has loaded the last
    bucket.
sync/send_canary_s | step | The learner's seconds of scoring the probe, while the engines load (0
    where ranks hold parts of the model: then it is scored before the offer).
# Time.
time/step_s | step | Seconds of the step, sync included.
time/generate_s | max | Seconds in which at least one engine generated, rounds added up.
time/learn_s | max | Seconds of the learner's own work.
time/reduce_s | max | Seconds in which a learner rank waited for the others at the step's end, and
    summed gradients; absent with one.
time/sync_s | step | Seconds of the sync.
time/queue_wait_s | step | Seconds in which the learner had nothing to do because the next round
    was not there.
time/save_s | step | Seconds in which the run waited for checkpoints since the step before;
    absent where it did not.
time/replace_s | step | Longest time for which the place of a lost actor was empty; absent where
    none was lost.
"""
"""One metric per line: name, reduction (or numerator / denominator), meaning."""


def _read(table: str) -> Iterator[Metric]:
    """Parse the table; a row with `<reason>` stands for one of every drop reason."""
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
    """Look a metric up: in the table, or as one of a family, whose names others choose.

    Reward functions are named by environments, files by the configuration, and the terms of an
    objective by its `term_names`.
    """
    if name.startswith(REWARD_FAMILY):
        return BY_NAME[f"{REWARD_FAMILY}<function>"]
    if name.startswith(TASK_FAMILY):
        return BY_NAME[f"{TASK_FAMILY}<task>"]
    if name.startswith(SOURCE_FAMILY):
        return BY_NAME.get(f"{name.rpartition('/')[0]}/<source>")
    if name not in BY_NAME and name.startswith("loss/"):
        return Metric(name, Reduction.SUM, "A term of an objective.")
    return BY_NAME.get(name)


@dataclass(slots=True)
class MetricAccumulator:
    """The numbers of a step while it runs; several ranks' are merged before they are read.

    An unknown name, or one of another reduction, is a programmer's error.

    Example: `add_mean("packing/learned_age", total=3.0, count=2)` reads as 1.5.
    """

    _totals: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Add to a SUM."""
        self._fold(name, value, Reduction.SUM)

    def add_mean(self, name: str, total: float, count: float) -> None:
        """Add `count` values that total `total` to a MEAN."""
        self._fold(name, total, Reduction.MEAN)
        self._counts[name] = self._counts.get(name, 0) + count

    def add_max(self, name: str, value: float) -> None:
        """Raise a MAX to at least `value`."""
        self._fold(name, value, Reduction.MAX)

    def merge(self, others: Iterable[MetricAccumulator]) -> None:
        """Fold in the totals of other ranks."""
        for other in others:
            for name, total in other._totals.items():
                self._fold(name, total, _reduction_of(name))
            for name, count in other._counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def as_dict(self) -> dict[str, float]:
        """Return values by name in the table's order; a mean or ratio over nothing is absent."""
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
        """Yield the table, families with the names that they have here, then further terms."""
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
    """Put the name of a file into a metric of the family."""
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
    """Write the table as docs/metrics.md shows it."""
    lines = ["| name | of rows and ranks | meaning |", "|---|---|---|"]
    for metric in METRICS:
        reduction: str = metric.reduction
        if metric.ratio_of is not None:
            reduction = f"ratio: `{metric.ratio_of[0]}` / `{metric.ratio_of[1]}`"
        lines.append(f"| `{metric.name}` | {reduction} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


DIGESTS = ("requests", "rollouts", "targets", "weights")
"""Names of the ledger's digests: requests, tokens that came back, rows that were learned, weights
after the update."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One learner rank's part of a step, on its way to the driver."""

    step: int
    channel: Channel
    weight_version: int
    """Version of the learner's weights when it took the step."""
    totals: MetricAccumulator
    """This rank's numbers, to be merged with the others' before they are read."""
    step_metrics: Mapping[str, float]
    """The numbers that are the same on every rank."""
    spans: tuple[Span, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of this rank's part, by the names in `DIGESTS`."""
    refilled: Mapping[int, int] = field(default_factory=dict)
    """Rows of the examples that took the place of groups without signal, by the position in the
    step of the group's first rollout."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step of the run: its ranks' reports, merged.

    Example: `StepReport(0, Channel.B, 4, {"loss/total": 0.7}, ())` is step 1 for a reader.
    """

    step: int
    """From 0."""
    channel: Channel
    weight_version: int
    """Version of the learner's weights when it took the step; its rollouts may be older by at most
    `rollout/staleness_max` updates."""
    metrics: Mapping[str, float]
    """`loss/...`, `rollout/...`, `packing/...`, `optim/...`, `time/...`; no IoU, ever."""
    spans: tuple[Span, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    """Hex digests of what decided the step, by the names in `DIGESTS`; empty without a ledger."""
    refilled: Mapping[int, int] = field(default_factory=dict)
    """As of the ranks, in the order of positions."""

    @property
    def number(self) -> int:
        """The step's number as a reader sees it: from 1."""
        return self.step + 1


def merge_reports(reports: Sequence[RankReport]) -> StepReport:
    """Merge the reports of all ranks, which come in rank order."""
    first = reports[0]
    kinds = {(report.step, report.channel, report.weight_version) for report in reports}
    assert len(kinds) == 1, f"the learner ranks report different steps: {sorted(kinds)}"
    totals = MetricAccumulator()
    totals.merge(report.totals for report in reports)
    spans = tuple(span for report in reports for span in report.spans)
    digests = {}
    for name in DIGESTS:
        # A rank without samples has nothing to ask, and none has on channel A.
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
