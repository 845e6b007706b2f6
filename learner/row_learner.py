"""Learning from one row: forward, backward, and the comparison of its sampled tokens with the engine's."""

from __future__ import annotations

from dataclasses import replace

from learner.checks import LogprobTolerance, check_logprobs, compares_logprobs
from learner.collate import PackedRow, collate
from learner.counters import StepTally
from learner.loading import LoadedModel
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.parallel import Parallel
from learner.rows import Row
from learner.rules import text_weights
from learner.segments import Segment
from learner.step import RowResult, backward_row
from shared.config import RunConfig
from shared.config.pipeline import Channel
from shared.rollouts import DecodeSettings


class RowLearner:
    """Forward, backward and account of one packed row, with the objectives of its channel."""

    def __init__(self, config: RunConfig, loaded: LoadedModel, parallel: Parallel, decode: DecodeSettings) -> None:
        """`decode` is how the rollouts are sampled."""
        self._loaded, self._parallel = loaded, parallel
        pipeline = config.rollout_matching.pipeline
        self._objectives = {channel: build_objectives(pipeline, channel, loaded.coord_ids_C) for channel in Channel}
        self.text_weights = {channel: text_weights(pipeline, channel) for channel in Channel}
        """Of the tokens of a target, by their roles."""
        # Greedy engines (temperature 0) report the log-probability at temperature 1.
        self._sampled_under = Normalizer(decode.temperature or 1.0, loaded.banned_token_ids)
        self._compares_logprobs = compares_logprobs(decode)
        self._tolerance = LogprobTolerance.of(config)

    def learn(self, segments: Row, channel: Channel, tally: StepTally, *, version: int) -> None:
        """Add the row's gradient, and count it. `version` is of the weights that learn. RolloutError where an engine's log-probabilities are of others."""
        segments = [_comparable(segment, version) for segment in segments]
        row = self._collate(segments, channel)
        result = self._backward(row, channel)
        if channel is Channel.B and self._compares_logprobs:
            learner_K, engine_K = result.sampled_logprobs_K, row.sampled.logprobs
            tally.compared = check_logprobs(segments, learner_K, engine_K, tolerance=self._tolerance, so_far=tally.compared)
        tally.add_row(row, result)

    def compute_beside(self, segment: Segment, channel: Channel) -> None:
        """Beside a row of another rank, with whose weights this one is computed; nothing is learned from it."""
        self._backward(self._collate([segment], channel), channel, weight=0.0)

    def _collate(self, segments: Row, channel: Channel) -> PackedRow:
        return collate(segments, text_weights=self.text_weights[channel], rope_index=self._loaded.rope_index)

    def _backward(self, row: PackedRow, channel: Channel, *, weight: float = 1.0) -> RowResult:
        model, device = self._loaded.model, self._loaded.device
        return backward_row(model, row.to(device), self._objectives[channel], self._sampled_under, run=self._parallel.forward, weight=weight)


def _comparable(segment: Segment, version: int) -> Segment:
    """Without the log-probabilities of a rollout, carried or stale, whose weights have changed since: there is nothing to compare."""
    if segment.weight_version == version:
        return segment
    return replace(segment, target=replace(segment.target, sampled_logprobs=()))
