"""Metrics and timings of one training step on one learner rank.

Names and meanings of the metrics are in shared/metrics.py.

Only counts and rates. IoU is not a training metric: it belongs to evaluation reports.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from learner.checks import Compared
from learner.collate import PackedRow
from learner.step import RowResult
from learner.targets import (
    AdvantageTarget,
    ParsedAndMatched,
    Target,
    TextWeights,
    TokenRole,
)
from shared.config.pipeline import Channel
from shared.grounding.objects import ParsedObject
from shared.metrics import REWARD_FAMILY, TASK_FAMILY, MetricAccumulator, RankReport
from shared.records import GeometryKind, GroundTruthObject
from shared.rollouts import FinishReason, Rollout
from shared.run_files import Span
from shared.schedule import StepPlan
from shared.trajectory import EnvironmentRollout


class StepMetrics:
    """Accumulates the metrics and time spans of one training step on one learner rank.

    Example (two rows of 3 and 1 segments, with losses 0.6 and 0.2): `report(denominator=4)` has
    `loss/total` 0.2, `packing/num_rows` 2 and `packing/num_segments` 4.
    """

    def __init__(
        self,
        plan: StepPlan,
        track: str,
        *,
        capacity: int,
        min_fill_ratio: float,
        keeps_digests: bool = False,
    ) -> None:
        """Start with all metrics empty.

        Args:
            track: the rank's name in the timeline.
            capacity: maximum tokens of a packed row. A row filled below the share `min_fill_ratio`
                counts as underfilled.
            keeps_digests: compute digests of the step's data, for the run's ledger.
        """
        self.totals = MetricAccumulator()
        self.num_segments = 0
        """Segments learned so far."""
        self.num_credited = 0
        """Sampled tokens so far that have an advantage, including an advantage of 0."""
        self.refilled: dict[int, int] = {}
        """Dataset rows whose rollouts replaced a group with equal rewards, by the position of that
        group's first rollout."""
        self.compared = Compared()
        """Result of the log-probability comparison between engine and learner so far."""
        self._names: Counter[str] = Counter()
        """How often each name occurs among the valid objects so far."""
        self._true_names: Counter[str] = Counter()
        self._plan = plan
        self._track = track
        self._capacity = capacity
        self._min_fill_ratio = min_fill_ratio
        self._losses: dict[str, float] = {"loss/total": 0.0}
        self._spans: list[Span] = []
        self._generate_s = 0.0
        self._learn_s = 0.0
        self._keeps_digests = keeps_digests
        self._digests: dict[str, hashlib._Hash] = {}

    def record(self, name: str, *content: object) -> None:
        """Add content to the step's digest `name`, which the run's ledger records.

        `shared.metrics.DIGESTS` lists the names. `repr(content)` must not depend on times,
        placement or rounding in engines, so that two runs of one configuration have equal digests.
        With `environment.teacher`, the digest `targets` contains the teacher's log-probabilities,
        and is equal only if they are equal.
        """
        if self._keeps_digests:
            digest = self._digests.setdefault(name, hashlib.sha256())
            digest.update(repr(content).encode())

    def add_generation(self, spans: Sequence[Span]) -> None:
        """Record when each actor generated the rollouts of one round, as timeline spans."""
        if spans:
            self._spans += spans
            start_s = min(span.start_s for span in spans)
            self._generate_s += max(span.end_s for span in spans) - start_s

    def mark(self, name: str, started_s: float, **args: int) -> None:
        """Record that this rank has worked on `name` from `started_s` (Unix time) until now."""
        span = Span(self._track, name, started_s, time.time(), {"step": self._plan.number, **args})
        self._learn_s += span.duration_s
        self._spans.append(span)

    def add_rollout(
        self,
        rollout: Rollout,
        reading: ParsedAndMatched,
        ground_truth: Sequence[GroundTruthObject],
        *,
        staleness: int,
        source: str | None = None,
    ) -> None:
        """Count a rollout of rollout matching, with its parsed and matched objects.

        Args:
            ground_truth: the objects of the rollout's sample.
            staleness: the learner's weight version minus the version that generated the rollout.
            source: name of the sample's data file if there are several files.
        """
        parsed = reading.parsed
        add = self.totals.add
        reason = rollout.finish_reason
        add("rollout/num", 1)
        self.add_staleness(staleness)
        self._add_length(len(rollout.response_token_ids))
        add("rollout/num_length_limited", float(reason is FinishReason.LENGTH))
        add("rollout/num_repeat_terminated", float(reason is FinishReason.REPETITION))
        add("rollout/num_truncated", float(parsed.truncated))
        add("rollout/num_fallback", float(parsed.fallback))
        add("rollout/num_valid_objects", len(parsed.objects))
        add("rollout/num_doubles", _num_doubles(parsed.objects))
        self._names.update(one.desc for one in parsed.objects)
        self._true_names.update(one.desc for one in ground_truth)
        add("rollout/num_dropped_objects", len(parsed.dropped))
        for dropped in parsed.dropped:
            add(f"rollout/num_dropped.{dropped.reason}", 1)
        add("rollout/num_objects_after_close", parsed.num_behind)
        add("rollout/num_excluded", len(reading.excluded))
        add("rollout/num_ground_truth", len(ground_truth))
        add("rollout/num_matched", len(reading.match.pairs))
        add("rollout/num_appended", len(reading.appended))
        add("rollout/num_gating_rejections", reading.match.gating_rejections)
        if source is not None:
            add(f"source/num_valid_objects/{source}", len(parsed.objects))
            add(f"source/num_ground_truth/{source}", len(ground_truth))
            add(f"source/num_matched/{source}", len(reading.match.pairs))

    def add_options(self, target: Target, weights: TextWeights) -> None:
        """Count what optional settings changed in a rollout's target, such as trimmed objects.

        docs/explanation/objectives.md describes these options beyond the specification.
        """
        reading = target.reading
        assert reading is not None, "these options have no effect on channel A"
        of_role = Counter(target.roles.tolist())
        for name, number in (
            ("rollout/num_trimmed", reading.num_trimmed),
            ("rollout/num_separators", of_role[TokenRole.SEPARATOR]),
            ("rollout/num_corrected_names", of_role[TokenRole.CORRECTED_DESC]),
            ("rollout/num_capped_epsilons", reading.num_capped),
            ("rollout/num_weighted_ends", weights.fp_end != 1 and bool(reading.false_positives)),
        ):
            # Without the option the metric is not reported.
            if number:
                self.totals.add(name, float(number))

    def add_environment_rollout(self, rollout: EnvironmentRollout) -> None:
        """Count a rollout of an environment, including failed ones."""
        add = self.totals.add
        add("rollout/num", 1)
        add("rollout/num_failed", float(rollout.error is not None))
        self._add_length(rollout.num_tokens)
        add("rollout/num_truncated", float(rollout.is_truncated))
        add("rollout/num_length_limited", float(rollout.num_length_limited > 0))
        add("rollout/num_overlong", float(rollout.is_overlong))
        add("rollout/num_splits", rollout.num_splits)
        if rollout.error is None:  # a failed rollout's reward of 0 is not about the model
            self.add_reward(rollout.reward)
            if rollout.task is not None:
                self.totals.add_mean(f"{TASK_FAMILY}{rollout.task}", rollout.reward, 1)
            self.totals.add_mean("rollout/turns", rollout.num_turns, 1)
        add("rollout/num_reward_errors", len(rollout.reward_errors))
        add("rollout/num_given_up", len(rollout.given_up))
        if rollout.num_tool_calls is not None:
            add("rollout/num_tool_calls", rollout.num_tool_calls)
        # If a reward function failed, the other functions have still scored the rollout.
        if rollout.error is None or rollout.reward_errors:
            for name, value in rollout.metrics.items():
                self.totals.add_mean(f"{REWARD_FAMILY}{name}", value, 1)

    def add_reward(self, reward: float) -> None:
        """Record the reward of one rollout that did not fail."""
        self.totals.add_mean("rollout/reward", reward, 1)
        self.totals.add_value("rollout/reward_std", reward)

    def _add_length(self, num_tokens: int) -> None:
        self.totals.add("rollout/num_tokens", num_tokens)
        self.totals.add_max("rollout/length_max", num_tokens)

    def add_group(self, *, has_signal: bool, num_left_out: int) -> None:
        """Count one group of rollouts of the same prompt.

        A group has signal if its rewards differ. `num_left_out` of its rollouts are not learned.
        """
        self.totals.add("rollout/num_groups", 1)
        self.totals.add("rollout/num_groups_without_signal", float(not has_signal))
        self.totals.add("rollout/num_left_out", num_left_out)

    def add_credited(self, num_tokens: int, *, is_masked: bool) -> None:
        """Count the sampled tokens of a rollout that have an advantage.

        A masked rollout is not learned (`environment.drop_truncated`); its `num_tokens` is 0.
        """
        self.num_credited += num_tokens
        self.totals.add("rollout/num_masked", float(is_masked))

    def add_staleness(self, staleness: int) -> None:
        """Record the age, in weight versions, of the weights that generated a rollout."""
        self.totals.add_mean("rollout/staleness", staleness, 1)
        self.totals.add_max("rollout/staleness_max", staleness)

    def add_row(self, row: PackedRow, result: RowResult) -> None:
        """Count a packed row that was trained, and add its losses, which are sums over segments."""
        self.add_losses(row, result)
        is_underfilled = row.num_tokens < self._min_fill_ratio * self._capacity
        ages = [self._plan.step - segment.step for segment in row.segments]
        self.num_segments += len(row.segments)
        self.record("targets", len(row.segments))
        for segment in row.segments:
            place = (segment.step, segment.position, segment.prompt.token_ids)
            self.record("targets", *place, *_supervision_of(segment.target))
        self.totals.add("packing/num_rows", 1)
        self.totals.add("packing/num_segments", len(row.segments))
        self.totals.add("packing/num_tokens", row.num_tokens)
        self.totals.add("packing/capacity", self._capacity)
        self.totals.add("packing/num_underfilled_rows", float(is_underfilled))
        self.totals.add_mean("packing/learned_age", sum(ages), len(ages))
        self.totals.add_max("packing/learned_age_max", max(ages))

    def add_losses(self, row: PackedRow, result: RowResult) -> None:
        """Add the losses and diagnostics of a trained row.

        With `training.updates_per_batch` > 1 a row is trained several times, and its losses are
        added each time.
        """
        self.totals.add("packing/num_learned_tokens", sum(map(len, row.segments)))
        for name, value in {"loss/total": result.loss, **result.terms}.items():
            # Not 0 + value: the sum starts with the first row's exact value (sign of zero).
            self._losses[name] = self._losses[name] + value if name in self._losses else value
        for name, mean in result.diagnostics.items():
            self.totals.add_mean(name, mean.total, mean.num_slots)

    def report(
        self,
        version: int,
        step_metrics: Mapping[str, float],
        waits: Sequence[Span],
        *,
        denominator: int,
        num_carried: int,
        weights: str | None = None,
    ) -> RankReport:
        """Return the rank's report of the step. Call it once, at the step's end.

        Args:
            version: the learner's weight version during the step.
            step_metrics: metrics of the whole step that are equal on all ranks, such as the
                gradient norm.
            waits: time spans in which this rank waited for other ranks.
            denominator: divisor of the losses: the divisor of an update's gradient, times the
                number of updates.
            num_carried: number of segments that wait for a later step.
            weights: digest of the trained weights after the update, if digests are kept.
        """
        for name, value in self._losses.items():
            self.totals.add(name, value / denominator)
        # These metrics are reported even if no row was learned.
        self.totals.add("packing/num_rows", 0)
        self.totals.add("packing/num_segments", 0)
        # If no token was compared, report nothing: a 0 would look like perfect agreement.
        if self.compared.num_tokens:
            self.totals.add("rollout/num_compared_tokens", self.compared.num_tokens)
            self.totals.add("rollout/num_logprob_outliers", self.compared.num_outliers)
            self.totals.add_max("rollout/logprob_max_abs", self.compared.max_abs)
        for name, names in (("", self._names), ("_of_truth", self._true_names)):
            if names:
                most = max(names.values())
                self.totals.add_mean(f"rollout/top_name_share{name}", most, names.total())
        self.totals.add("packing/num_carried", num_carried)
        self.totals.add_max("time/learn_s", self._learn_s)
        if waits:
            self.totals.add_max("time/reduce_s", sum(wait.duration_s for wait in waits))
        self._spans += [replace(wait, args={"step": self._plan.number}) for wait in waits]
        if self._plan.channel is Channel.B:
            self.totals.add_max("time/generate_s", self._generate_s)
        step = self._plan.step
        channel = self._plan.channel
        spans = tuple(self._spans)
        digests = {name: digest.hexdigest() for name, digest in self._digests.items()}
        if weights is not None:
            digests["weights"] = weights
        return RankReport(
            step, channel, version, self.totals, step_metrics, spans, digests, self.refilled
        )


DOUBLE_BINS = 5
"""Largest difference of a coordinate, in bins, between an object and its double."""


def _num_doubles(objects: Sequence[ParsedObject]) -> int:
    """Count the objects with the name and, within `DOUBLE_BINS`, the place of an earlier one."""
    by_name: dict[tuple[str, GeometryKind, int], list[tuple[int, ...]]] = {}
    num_doubles = 0
    for one in objects:
        earlier = by_name.setdefault((one.desc, one.kind, len(one.bins)), [])
        num_doubles += any(
            all(abs(a - b) <= DOUBLE_BINS for a, b in zip(one.bins, other, strict=True))
            for other in earlier
        )
        earlier.append(one.bins)
    return num_doubles


def _supervision_of(target: Target | AdvantageTarget) -> tuple[object, ...]:
    """Return a target's supervision for the ledger's digest of targets."""
    # Both types have the same layout, so that ledgers of earlier versions can be compared.
    if isinstance(target, Target):
        slots = (target.coord_positions, target.coord_targets, target.box_slots)
        no_credit = ((), (), ())
        roles = target.roles.tobytes()
        return (target.token_ids, roles, *slots, *no_credit, *target.label_overrides)
    credit = target.credit
    no_roles = bytes(len(target.token_ids))
    of_teacher = () if credit.teacher_logprobs is None else (credit.teacher_logprobs,)
    of_tokens = (credit.positions, credit.advantages, credit.weights, *of_teacher)
    return (target.token_ids, no_roles, (), (), (), *of_tokens)
