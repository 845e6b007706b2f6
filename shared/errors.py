"""The errors that a user can act on, one class per remedy.

`ConfigError` and `RecordError` are `ValueError`s: the input is at fault, and the message says where
and what to do. The others are failures of a running system.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SHOWN = 2_000
"""Characters that a message shows of a problem."""
LEARNER = "learner"
ENGINES = "rollout engines"
"""The source of an error that is all engines' together."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """The longest that a wait may take, and the configuration's name for it."""

    seconds: float
    key: str


def late(who: str, limit: Timeout, check: str) -> str:
    """Word the message about a wait that came to its limit."""
    return f"no answer from {who} after {limit.key} = {round(limit.seconds, 1):g} s; check {check}"


def ended(whose: str, reason: object = None) -> str:
    """Word the message about a process that has died."""
    why = "" if reason is None else f" ({reason})"
    return f"{whose} process has ended{why}; check its log and the machine's memory"


class PortableError(Exception):
    """An error that crosses process boundaries with every field.

    A subclass keeps each argument of its `__init__` in an attribute of the same name.
    """

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Ray raises local subclasses of its own, which cannot be pickled: the first importable
        # class is the one that was raised.
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
    """A dataset row is wrong: names the file, the line, the field and the remedy.

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
        """Args:
        file: None where the row did not come from a file.
        line: from 1.
        more: lines about further bad rows of the same file.
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
        """Return the same problem at its place in a file, with lines about others."""
        return type(self)(
            self.problem, field=self.field, remedy=self.remedy, file=file, line=line, more=more
        )


def _shortened(text: str) -> str:
    """Return a text of at most `MAX_SHOWN` characters: a row may quote megabytes."""
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN - 40]} ... ({len(text)} characters)"


class UnlearnedGeometryError(RecordError):
    """An object has a kind of geometry that the run does not learn.

    The row is not bad: the configuration does not fit the file, so `on_bad_row: skip` does not
    apply.
    """


class BadRows:
    """The bad rows of one file: all are counted, and the first 20 are kept."""

    SHOWN = 20

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[RecordError] = []

    def add(self, error: RecordError) -> None:
        self.count += 1
        if self.count <= self.SHOWN:
            self._shown.append(error)

    def raise_if_any(self) -> None:
        """Raise one RecordError about all of them; several end with their number."""
        if not self.count:
            return
        first, *others = self._shown
        if self.count == 1:
            raise first
        what = f"these {self.count}"
        if self.count > self.SHOWN:
            what = f"{self.count}, of which the first {self.SHOWN} are above"
        more = [*map(str, others), f"{first.file}: bad rows: {what}"]
        raise first.at(first.file, first.line, more)


class RolloutError(PortableError, RuntimeError):
    """A rollout engine failed, timed out, or answered something that contradicts the learner.

    The phase is the work it was doing (`start`, `generate`, `check`, ...).
    """

    def __init__(self, message: str, *, actor: str, phase: str) -> None:
        self.message = message
        self.actor = actor
        self.phase = phase
        super().__init__(f"{phase} on {actor}: {message}")


class UnreachableError(RolloutError):
    """A rollout server could not be reached or failed at every try, or an actor that is replaced
    has ended; another one may be asked.

    An *answer* that contradicts the run is a plain RolloutError: it would be no better elsewhere.
    """


class LostStartError(RolloutError):
    """An actor was killed while it started, or is late: another start may go better."""


class LostRoundError(RolloutError):
    """Nobody is left to answer a round. New engines are starting: it may be asked again behind a
    sync of the weights that it is of.
    """


class WeightSyncError(PortableError, RuntimeError):
    """A weight transfer failed or could not be verified."""

    def __init__(
        self, message: str, *, actor: str, phase: str, quantity: str = "", size: float | None = None
    ) -> None:
        """Args:
        phase: a `shared.weight_sync.phases.SyncPhase`, on either side, or its `OFFER`.
        quantity: the thing that differed (a name set, a checksum, log-probabilities).
        size: by how much; None where a size has no meaning, as for a timeout.
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
    """The learner cannot go on, its process died, or it did not answer in time."""

    def __init__(self, message: str, *, phase: str) -> None:
        self.message = message
        self.phase = phase
        super().__init__(f"{phase} on the learner: {message}")


class LostLearnerError(LearnerError):
    """The learner's process has ended, or does not answer: another start may go on."""


class CollectiveError(LearnerError):
    """A learner rank waited for the others in vain; their own errors say why."""


class StorageError(PortableError, RuntimeError):
    """A file could not be written or deleted, mostly for want of space or of permission."""

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
        """`can_pass`: another attempt may succeed when somebody has seen to the disk."""
        self.path = path
        self.reason = reason
        self.action = action
        self.remedy = remedy
        self.can_pass = can_pass
        super().__init__(f"cannot {action} {path}: {reason}; {remedy}")
