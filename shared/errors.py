"""What can go wrong for a user, one class per remedy.

`ConfigError` and `RecordError` are `ValueError`s: the user's input is at fault, and the message
says where and what to do. The others are failures of a running system. All of them cross process
boundaries, so they pickle with every field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEARNER, ENGINES = "learner", "rollout engines"
"""Whose an error is where it is the learner's, or that of all engines together."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """The longest that a wait may take, and what the configuration calls it."""

    seconds: float
    key: str


def late(who: str, limit: Timeout, check: str) -> str:
    """What is said of a wait that came to its limit."""
    return f"no answer from {who} after {limit.key} = {round(limit.seconds, 1):g} s; check {check}"


def ended(whose: str, reason: object = None) -> str:
    """What is said of a process that is not there any more."""
    why = "" if reason is None else f" ({reason})"
    return f"{whose} process has ended{why}; check its log and the machine's memory"


class ConfigError(ValueError):
    """The configuration is wrong. One problem per line: `a.b[0].c: what is wrong; what to do`."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class RecordError(ValueError):
    """A dataset row is wrong: names the file, the line, the field and the remedy.

    `line` is 1-based; `file` and `line` are None where the row did not come from a file. `more` are
    lines about further bad rows of the same file.
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
        self.problem, self.field, self.remedy, self.file, self.line, self.more = (
            problem,
            field,
            remedy,
            file,
            line,
            tuple(more),
        )
        where = "" if file is None else f"{file}:{line}: " if line is not None else f"{file}: "
        super().__init__("\n".join((f"{where}{field}: {problem}; {remedy}", *self.more)))

    def at(self, file: str, line: int) -> RecordError:
        """The same problem, located."""
        return RecordError(self.problem, field=self.field, remedy=self.remedy, file=file, line=line)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _record_error, (
            self.problem,
            self.field,
            self.remedy,
            self.file,
            self.line,
            self.more,
        )


def _record_error(
    problem: str, field: str, remedy: str, file: str | None, line: int | None, more: tuple[str, ...]
) -> RecordError:
    return RecordError(problem, field=field, remedy=remedy, file=file, line=line, more=more)


class BadRows:
    """The bad rows of one file, as they are found: the first of them are kept, and all are
    counted."""

    SHOWN = 20

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[RecordError] = []

    def add(self, error: RecordError) -> None:
        self.count += 1
        if self.count <= self.SHOWN:
            self._shown.append(error)

    def raise_if_any(self) -> None:
        """Raise one RecordError that tells of all: where there are several it ends with their
        number.
        """
        if not self.count:
            return
        first, *others = self._shown
        if self.count == 1:
            raise first
        what = (
            f"these {self.count}"
            if self.count <= self.SHOWN
            else f"{self.count}, of which the first {self.SHOWN} are above"
        )
        more = [*map(str, others), f"{first.file}: bad rows: {what}"]
        raise RecordError(
            first.problem,
            field=first.field,
            remedy=first.remedy,
            file=first.file,
            line=first.line,
            more=more,
        )


class RolloutError(RuntimeError):
    """A rollout engine failed, timed out, or answered something that contradicts the learner.

    `actor` is the engine's name, `phase` is what was being done (`start`, `generate`, `check`,
    ...).
    """

    def __init__(self, message: str, *, actor: str, phase: str) -> None:
        self.message, self.actor, self.phase = message, actor, phase
        super().__init__(f"{phase} on {actor}: {message}")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _rollout_error, (self.message, self.actor, self.phase)


def _rollout_error(message: str, actor: str, phase: str) -> RolloutError:
    return RolloutError(message, actor=actor, phase=phase)


class UnreachableError(RolloutError):
    """A rollout server that could not be reached, or failed at what it was asked, however often:
    another one may be asked the same. What a server *answers* and contradicts the run is a plain
    RolloutError, and would be no better elsewhere."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _unreachable_error, (self.message, self.actor, self.phase)


def _unreachable_error(message: str, actor: str, phase: str) -> UnreachableError:
    return UnreachableError(message, actor=actor, phase=phase)


class WeightSyncError(RuntimeError):
    """A weight transfer failed or could not be verified.

    `phase` is one of `shared.weight_sync.phases.SyncPhase`, on either side, or its `OFFER`;
    `quantity` is what differed (a name set, a checksum, log-probabilities) and `size` by how much
    (None where a size has no meaning, as for a timeout).
    """

    def __init__(
        self, message: str, *, actor: str, phase: str, quantity: str = "", size: float | None = None
    ) -> None:
        self.message, self.actor, self.phase, self.quantity, self.size = (
            message,
            actor,
            phase,
            quantity,
            size,
        )
        difference = (
            f" ({quantity} differs by {size:.3g})"
            if quantity and size is not None
            else f" ({quantity})"
            if quantity
            else ""
        )
        super().__init__(f"weight sync, {phase} on {actor}: {message}{difference}")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _weight_sync_error, (self.message, self.actor, self.phase, self.quantity, self.size)


def _weight_sync_error(
    message: str, actor: str, phase: str, quantity: str, size: float | None
) -> WeightSyncError:
    return WeightSyncError(message, actor=actor, phase=phase, quantity=quantity, size=size)


class LearnerError(RuntimeError):
    """The learner cannot go on, or its process ended or did not answer in time; `phase` is what it
    was doing.
    """

    def __init__(self, message: str, *, phase: str) -> None:
        self.message, self.phase = message, phase
        super().__init__(f"{phase} on the learner: {message}")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _learner_error, (self.message, self.phase)


def _learner_error(message: str, phase: str) -> LearnerError:
    return LearnerError(message, phase=phase)


class CollectiveError(LearnerError):
    """A learner rank waited for the others in vain. What became of them is for their own errors to
    say.
    """

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _collective_error, (self.message, self.phase)


def _collective_error(message: str, phase: str) -> CollectiveError:
    return CollectiveError(message, phase=phase)


class StorageError(RuntimeError):
    """Something could not be written, or deleted: `path` is where, `reason` why. No space left and
    no permission are the usual ones.
    """

    REMEDY = "free space or permit writing there, or choose another folder with telemetry.run_dir"

    def __init__(
        self, path: str, reason: str, *, action: str = "write", remedy: str = REMEDY
    ) -> None:
        self.path, self.reason, self.action, self.remedy = path, reason, action, remedy
        super().__init__(f"cannot {action} {path}: {reason}; {remedy}")

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return _storage_error, (self.path, self.reason, self.action, self.remedy)


def _storage_error(path: str, reason: str, action: str, remedy: str) -> StorageError:
    return StorageError(path, reason, action=action, remedy=remedy)
