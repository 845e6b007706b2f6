"""Errors that a user can act on: one class per remedy.

`ConfigError` and `RecordError` are `ValueError`s about wrong input; their messages name the place
and the remedy. The others are failures of a running system.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SHOWN = 2_000
"""Maximum number of characters that a message quotes of a problem."""
LEARNER = "learner"
ENGINES = "rollout engines"
"""The source of an error that concerns all engines."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """A time limit and its key in the configuration."""

    seconds: float
    key: str


def late(who: str, limit: Timeout, check: str) -> str:
    """Return the message about a wait that reached its limit."""
    return f"no answer from {who} after {limit.key} = {round(limit.seconds, 1):g} s; check {check}"


def ended(whose: str, reason: object = None) -> str:
    """Return the message about a process that has ended."""
    why = "" if reason is None else f" ({reason})"
    return f"{whose} process has ended{why}; check its log and the machine's memory"


class PortableError(Exception):
    """An error that can be pickled with all its fields, to cross process boundaries.

    A subclass stores each argument of `__init__` in an attribute with the same name.
    """

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Ray raises its own local subclasses, which cannot be pickled. The first importable class
        # is the original one.
        kind = next(kind for kind in type(self).__mro__ if "<locals>" not in kind.__qualname__)
        fields = {name: getattr(self, name) for name in inspect.signature(kind).parameters}
        return _rebuild, (kind, fields)


def _rebuild(kind: type[PortableError], fields: dict[str, object]) -> PortableError:
    return kind(**fields)


class ConfigError(PortableError, ValueError):
    """The configuration is wrong. One problem per line: `a.b[0].c: what is wrong; what to do`."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RecordError(PortableError, ValueError):
    """A row of a dataset is wrong. The message names file, line, field and remedy.

    Example: `RecordError("is missing", field="width", remedy="add it", file="a.jsonl", line=3)`
    reads "a.jsonl:3: width: is missing; add it".
    """

    def __init__(
        self,
        problem: str,
        *,
        field: str,
        remedy: str,
        file: str | None = None,
        line: int | None = None,
        more: Sequence[str] = (),
    ) -> None:
        """Create the error.

        Args:
            file: None if the row is not from a file.
            line: from 1.
            more: lines about other bad rows of the same file.
        """
        self.problem = _shortened(problem)
        self.field = _shortened(field)
        self.remedy = remedy
        self.file = file
        self.line = line
        self.more = tuple(more)
        where = ":".join(str(part) for part in (file, line) if part is not None)
        prefix = f"{where}: " if where else ""
        super().__init__("\n".join((f"{prefix}{self.field}: {self.problem}; {remedy}", *self.more)))

    def at(self, file: str | None, line: int | None, more: Sequence[str] = ()) -> RecordError:
        """Return the same problem with its place in a file, and lines about other problems."""
        return type(self)(
            self.problem, field=self.field, remedy=self.remedy, file=file, line=line, more=more
        )


def _shortened(text: str) -> str:
    """Cut a text to `MAX_SHOWN` characters, because a row may quote megabytes."""
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN - 40]} ... ({len(text)} characters)"


class UnlearnedGeometryError(RecordError):
    """An object has a kind of geometry that the run does not learn.

    The configuration does not suit the file, the row is not bad: `on_bad_row: skip` does not apply.
    """


class BadRows:
    """The bad rows of one file: counts all of them, and keeps the first 20."""

    SHOWN = 20

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[RecordError] = []

    def add(self, error: RecordError) -> None:
        self.count += 1
        if self.count <= self.SHOWN:
            self._shown.append(error)

    def raise_if_any(self) -> None:
        """Raise one RecordError about all bad rows; it names their number if there are several."""
        if not self.count:
            return
        first, *others = self._shown
        if self.count == 1:
            raise first
        what = f"these {self.count}"
        if self.count > self.SHOWN:
            what = f"{self.count}; the first {self.SHOWN} are listed above"
        more = [*map(str, others), f"{first.file}: bad rows: {what}"]
        raise first.at(first.file, first.line, more)


class RolloutError(PortableError, RuntimeError):
    """A rollout engine failed, timed out, or returned something that contradicts the learner.

    `phase` is the work it was doing (`start`, `generate`, `check`, ...).
    """

    def __init__(self, message: str, *, actor: str, phase: str) -> None:
        self.message = message
        self.actor = actor
        self.phase = phase
        super().__init__(f"{phase} on {actor}: {message}")


class UnreachableError(RolloutError):
    """A rollout server could not be reached or failed at every try, or an actor ended and is being
    replaced. Another one may be tried.

    An *answer* that contradicts the run is a plain RolloutError: another server would not help.
    """


class LostStartError(RolloutError):
    """An actor was killed while it started, or started too slowly. Another start may succeed."""


class LostRoundError(RolloutError):
    """No engine is left to answer a round. The round may be requested again from the new engines,
    after a sync of the same weights."""


class WeightSyncError(PortableError, RuntimeError):
    """A weight transfer failed or could not be verified."""

    def __init__(
        self, message: str, *, actor: str, phase: str, quantity: str = "", size: float | None = None
    ) -> None:
        """Create the error.

        Args:
            phase: a `SyncPhase` of either side, or `OFFER` (`shared.weight_sync.phases`).
            quantity: what differed (a set of names, a checksum, log-probabilities); empty: nothing.
            size: the size of the difference; None if it has none, as for a timeout.
        """
        self.message = message
        self.actor = actor
        self.phase = phase
        self.quantity = quantity
        self.size = size
        difference = ""
        if quantity:
            amount = "" if size is None else f" differs by {size:.3g}"
            difference = f" ({quantity}{amount})"
        super().__init__(f"weight sync, {phase} on {actor}: {message}{difference}")


class LearnerError(PortableError, RuntimeError):
    """The learner failed, its process ended, or it did not answer in time."""

    def __init__(self, message: str, *, phase: str) -> None:
        self.message = message
        self.phase = phase
        super().__init__(f"{phase} on the learner: {message}")


class LostLearnerError(LearnerError):
    """The learner's process ended, or does not answer. Another start may continue the run."""


class CollectiveError(LearnerError):
    """A learner rank waited for other ranks without success; their own errors give the reason."""


class StorageError(PortableError, RuntimeError):
    """A file could not be written or deleted, usually for lack of space or permission."""

    ANOTHER_FOLDER = "free space or permit writing there, or choose another folder"
    REMEDY = f"{ANOTHER_FOLDER} with telemetry.run_dir"

    def __init__(
        self,
        path: str,
        reason: str,
        *,
        action: str = "write",
        remedy: str = REMEDY,
        can_pass: bool = False,
    ) -> None:
        """`can_pass`: another attempt may succeed after the disk has been freed or repaired."""
        self.path = path
        self.reason = reason
        self.action = action
        self.remedy = remedy
        self.can_pass = can_pass
        super().__init__(f"cannot {action} {path}: {reason}; {remedy}")
