"""What a step counts: rollouts on their way to targets, rows, losses (spec: training-time counters;
names and meanings in shared/metrics.py).

Counts and rates only. IoU is no training-time number: it belongs to evaluation reports.
"""

from __future__ import annotations

from learner.checks import Compared
from learner.collate import PackedRow
from learner.step import RowResult
from learner.targets import ParsedAndMatched
from shared.metrics import REWARD_FAMILY, MetricAccumulator
from shared.rollouts import FinishReason, Rollout
from shared.trajectory import EnvironmentRollout


class StepMetrics:
    """The numbers of one step of one rank."""

    def __init__(self, step: int, *, capacity: int, min_fill_ratio: float) -> None:
        """`capacity`: tokens of a row; one filled less than `min_fill_ratio` of it is counted as
        underfilled.
        """
        self.totals = MetricAccumulator()
        self.num_segments = 0
        """Learned so far."""
        self.compared = Compared()
        """Of the engine's log-probabilities with the learner's, so far."""
        self._step = step
        self._capacity = capacity
        self._min_fill_ratio = min_fill_ratio
        self._losses: dict[str, float] = {"loss/total": 0.0}

    def add_rollout(
        self, rollout: Rollout, reading: ParsedAndMatched, num_ground_truth: int, *, staleness: int
    ) -> None:
        """A rollout and how it was read; `num_ground_truth` objects were to be found. `staleness`:
        updates since the weights that generated it.
        """
        parsed, add = reading.parsed, self.totals.add
        add("rollout/num", 1)
        self.add_staleness(staleness)
        add("rollout/num_tokens", len(rollout.response_token_ids))
        add("rollout/num_length_limited", float(rollout.finish_reason is FinishReason.LENGTH))
        add(
            "rollout/num_repeat_terminated", float(rollout.finish_reason is FinishReason.REPETITION)
        )
        add("rollout/num_truncated", float(parsed.truncated))
        add("rollout/num_fallback", float(parsed.fallback))
        add("rollout/num_valid_objects", len(parsed.objects))
        add("rollout/num_dropped_objects", len(parsed.dropped))
        for dropped in parsed.dropped:
            add(f"rollout/num_dropped.{dropped.reason}", 1)
        add("rollout/num_excluded", len(reading.excluded))
        add("rollout/num_ground_truth", num_ground_truth)
        add("rollout/num_matched", len(reading.match.pairs))
        add("rollout/num_appended", len(reading.appended))
        add("rollout/num_gating_rejections", reading.match.gating_rejections)

    def add_environment_rollout(self, rollout: EnvironmentRollout) -> None:
        """One that failed is counted, and has no reward that would say anything of the model."""
        add = self.totals.add
        add("rollout/num", 1)
        add("rollout/num_failed", float(rollout.error is not None))
        add("rollout/num_tokens", rollout.num_tokens)
        add("rollout/num_truncated", float(rollout.is_truncated))
        add("rollout/num_length_limited", float(rollout.num_length_limited > 0))
        add("rollout/num_splits", rollout.num_splits)
        if rollout.error is None:
            self.totals.add_mean("rollout/reward", rollout.reward, 1)
            self.totals.add_mean("rollout/turns", rollout.num_turns, 1)
        add("rollout/num_reward_errors", len(rollout.reward_errors))
        add("rollout/num_given_up", len(rollout.given_up))
        if rollout.num_tool_calls is not None:
            add("rollout/num_tool_calls", rollout.num_tool_calls)
        if rollout.error is None or rollout.reward_errors:
            # The other functions have judged it all the same.
            for name, value in rollout.metrics.items():
                self.totals.add_mean(f"{REWARD_FAMILY}{name}", value, 1)

    def add_group(self, *, has_signal: bool, num_left_out: int) -> None:
        """The rollouts of an example. Where their rewards are all equal, there is no signal, and
        perhaps all of them are left out.
        """
        self.totals.add("rollout/num_groups", 1)
        self.totals.add("rollout/num_groups_without_signal", float(not has_signal))
        self.totals.add("rollout/num_left_out", num_left_out)

    def add_staleness(self, staleness: int) -> None:
        """Of a rollout: updates since the weights that generated it."""
        self.totals.add_mean("rollout/staleness", staleness, 1)
        self.totals.add_max("rollout/staleness_max", staleness)

    def add_row(self, row: PackedRow, result: RowResult) -> None:
        """A row that was learned. Its losses are sums over segments, to be divided at the step's
        end.
        """
        for name, value in {"loss/total": result.loss, **result.terms}.items():
            self._losses[name] = self._losses[name] + value if name in self._losses else value
        for name, mean in result.diagnostics.items():
            self.totals.add_mean(name, mean.total, mean.num_slots)
        ages = [self._step - segment.step for segment in row.segments]
        self.num_segments += len(row.segments)
        self.totals.add("packing/num_rows", 1)
        self.totals.add("packing/num_segments", len(row.segments))
        self.totals.add("packing/num_tokens", row.num_tokens)
        self.totals.add("packing/capacity", self._capacity)
        self.totals.add(
            "packing/num_underfilled_rows",
            float(row.num_tokens < self._min_fill_ratio * self._capacity),
        )
        self.totals.add_mean("packing/learned_age", sum(ages), len(ages))
        self.totals.add_max("packing/learned_age_max", max(ages))

    def finish(self, denominator: int) -> None:
        """Once, at the step's end: losses are divided by the segments that its gradient is divided
        by.
        """
        for name, value in self._losses.items():
            self.totals.add(name, value / denominator)
        # Also where there was nothing to learn.
        self.totals.add("packing/num_rows", 0)
        self.totals.add("packing/num_segments", 0)
        # Nothing compared leaves no trace: a 0 would read as perfect agreement.
        if self.compared.num_tokens:
            self.totals.add("rollout/num_compared_tokens", self.compared.num_tokens)
            self.totals.add("rollout/num_logprob_outliers", self.compared.num_outliers)
            self.totals.add_max("rollout/logprob_max_abs", self.compared.max_abs)
