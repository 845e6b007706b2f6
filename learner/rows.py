"""Which segments become a row, and when (DESIGN 5, decision 7).

Whatever the policy, rows depend on positions alone: not on arrival, rounds or actors.
"""

from __future__ import annotations

from typing import Protocol

from learner.packing import CarryBuffer
from learner.segments import Segment
from shared.config import RunConfig
from shared.config.derive import RowRule, row_rule

Row = list[Segment]


class RowPolicy(Protocol):
    """Takes a step's segments in position order and answers with the rows that are due."""

    def add(self, segment: Segment) -> list[Row]: ...

    def finish_step(self) -> list[Row]:
        """The rows that are due at the step's end."""
        ...

    @property
    def carries(self) -> bool:
        """Whether a step may learn fewer or more segments than it drew."""
        ...

    @property
    def num_carried(self) -> int:
        """Segments that wait for a later step."""
        ...


class Unpacked:
    """`training.packing: false`: one segment per row."""

    carries = False
    num_carried = 0

    def add(self, segment: Segment) -> list[Row]:
        return [[segment]]

    def finish_step(self) -> list[Row]:
        return []


class ToCompletion:
    """Step mode: full rows after every window of segments, and where the buffer is full; the rest at the step's end. Nothing is carried."""

    carries = False
    num_carried = 0

    def __init__(self, buffer: CarryBuffer, window: int) -> None:
        self._buffer = buffer
        self._window = window
        self._num_added = 0

    def add(self, segment: Segment) -> list[Row]:
        rows: list[Row] = []
        if len(self._buffer) == self._buffer.max_segments:
            rows.append(self._buffer.pop_row())
        self._buffer.insert(segment)
        self._num_added += 1
        if self._num_added % self._window == 0:
            while self._buffer.num_tokens >= self._buffer.capacity:
                rows.append(self._buffer.pop_row())
        return rows

    def finish_step(self) -> list[Row]:
        self._num_added = 0
        return self._buffer.flush()


class Carry:
    """`stage2_rollout_aligned`: one row after every micro-step's segments; what does not fit waits for a later row, of a later step if need be."""

    carries = True

    def __init__(self, buffer: CarryBuffer, micro_step: int) -> None:
        self._buffer = buffer
        self._micro_step = micro_step
        self._num_added = 0

    @property
    def num_carried(self) -> int:
        return len(self._buffer)

    def add(self, segment: Segment) -> list[Row]:
        """Raises ConfigError where `training.packing_buffer` is full; the buffer stays as it was."""
        self._buffer.insert(segment)
        self._num_added += 1
        return [self._buffer.pop_row()] if self._num_added % self._micro_step == 0 else []

    def finish_step(self) -> list[Row]:
        assert self._num_added % self._micro_step == 0, "a step has whole micro-steps"
        return []


def row_policy(config: RunConfig) -> RowPolicy:
    """The policy of a run. ConfigError where rows are packed and `binpacking` is not installed."""
    training = config.training
    match row_rule(config):
        case RowRule.SEGMENT:
            return Unpacked()
        case RowRule.STEP:
            return ToCompletion(CarryBuffer(config.global_max_length, training.packing_buffer), training.packing_window)
        case RowRule.CARRY:
            return Carry(CarryBuffer(config.global_max_length, training.packing_buffer), training.per_device_train_batch_size)
