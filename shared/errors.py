"""Errors that a user can act on: one class per remedy.

`ConfigError` and `RecordError` are `ValueError`s about wrong input; their messages name the place
and the remedy. The others are failures of a running system.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SHOWN = 2_000
"""Maximum number of characters of a problem or field name in a message; longer ones are cut."""
LEARNER = "learner"
ENGINES = "rollout engines"
"""The `actor` of an error that concerns all rollout engines."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """A time limit, and the configuration key that sets it, for use in messages."""

    seconds: float
    key: str


def late(who: str, limit: Timeout, check: str) -> str:
    """Return the message that `who` did not answer within the limit, and what to check."""
    return f"no answer from {who} after {limit.key} = {round(limit.seconds, 1):g} s; check {check}"


def ended(whose: str, reason: object = None) -> str:
    """Return the message that a process has ended unexpectedly; `whose` names its owner."""
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
    """Error about a wrong configuration.

    The message has one problem per line: `a.b[0].c: what is wrong; what to do`.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RecordError(PortableError, ValueError):
    """Error about a wrong row of a dataset. The message names file, line, field and remedy.

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
        """Create the error about one row.

        Args:
            problem: what is wrong with the field.
            remedy: what the user can do.
            file: None if the row is not from a file.
            line: line number in the file, from 1.
            more: further lines of the message, about other bad rows of the same file.
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
        """Return the same error with the row's file and line.

        `more` are further lines of the message, about other bad rows.
        """
        return type(self)(
            self.problem, field=self.field, remedy=self.remedy, file=file, line=line, more=more
        )


def _shortened(text: str) -> str:
    """Cut a text to `MAX_SHOWN` characters, because a row may quote megabytes."""
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN - 40]} ... ({len(text)} characters)"


class UnlearnedGeometryError(RecordError):
    """Error about an object whose kind of geometry the run does not learn.

    The row is correct, but the configuration does not suit it. So it is raised even with
    `on_bad_row: skip`.
    """


class BadRows:
    """Collects the errors about bad rows of one data file: counts all, keeps the first 20."""

    SHOWN = 20

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[RecordError] = []

    def add(self, error: RecordError) -> None:
        self.count += 1
        if self.count <= self.SHOWN:
            self._shown.append(error)

    def raise_if_any(self) -> None:
        """Raise one RecordError about all bad rows, if there are any.

        It lists the first 20 and, if there are several, says how many there are.
        """
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
    """Error about a rollout engine: it failed, timed out, or its result contradicts the learner.

    `actor` names the engine. `phase` is its work at that time (`start`, `generate`, `check`, ...).
    """

    def __init__(self, message: str, *, actor: str, phase: str) -> None:
        self.message = message
        self.actor = actor
        self.phase = phase
        super().__init__(f"{phase} on {actor}: {message}")


class UnreachableError(RolloutError):
    """Error about a rollout server or actor that is lost.

    Another server or actor may answer the request.

    The server could not be reached or failed at every try, or the actor ended and is being
    replaced. An *answer* that contradicts the run is a plain RolloutError: another server would
    not help.
    """


class LostStartError(RolloutError):
    """Error about an actor that was killed while it started, or started too slowly.

    Starting it again may succeed.
    """


class LostRoundError(RolloutError):
    """Error that no engine is left to answer the requests of a round.

    New engines may answer them, after a sync of the same weights.
    """


class WeightSyncError(PortableError, RuntimeError):
    """Error about a weight sync: weights could not be sent to an engine, or not be verified."""

    def __init__(
        self, message: str, *, actor: str, phase: str, quantity: str = "", size: float | None = None
    ) -> None:
        """Create the error about one engine, or about the learner.

        Args:
            actor: name of the engine or the learner.
            phase: a `SyncPhase`, or `OFFER` (both in `shared.weight_sync.phases`).
            quantity: what differed (a set of names, a checksum, log-probabilities); empty: nothing.
            size: the size of the difference; None if it has no size, as for a timeout.
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
    """Error about the learner: it failed, its process ended, or it did not answer in time."""

    def __init__(self, message: str, *, phase: str) -> None:
        self.message = message
        self.phase = phase
        super().__init__(f"{phase} on the learner: {message}")


class LostLearnerError(LearnerError):
    """Error that the learner's process ended or does not answer.

    The run may be continued with a new learner.
    """


class CollectiveError(LearnerError):
    """Error on a learner rank that waited in vain for other ranks; their errors give the reason."""


class StorageError(PortableError, RuntimeError):
    """Error about a file that could not be written or deleted.

    Usually there is no space, or writing is not permitted.
    """

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
        """Create the error; `action` is the verb that failed.

        `can_pass`: another attempt may succeed after the disk has been freed or repaired.
        """
        self.path = path
        self.reason = reason
        self.action = action
        self.remedy = remedy
        self.can_pass = can_pass
        super().__init__(f"cannot {action} {path}: {reason}; {remedy}")
