"""Answers of Ray actors, each waited for no longer than its limit, and what is raised in place of
one that does not come.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from rollout_actors.engine.failure import EngineEndedError
from shared.errors import RecordError, RolloutError, Timeout, WeightSyncError, ended, late

Error = RolloutError | WeightSyncError

VICTIM_GRACE_S = 4.0
"""How long an engine that lost a connection is kept back, for the one that broke it to say why.
Below `SYNC_MARGIN_S`, which waits for that error.
"""
BROKEN_CONNECTION = ("third_party/gloo", "ncclRemoteError", "ncclSystemError")
"""What the errors of gloo and NCCL name where a peer has left the group. They arrive as text: vLLM
passes on no exception of its workers.
"""


@dataclass(frozen=True, slots=True)
class RayCall:
    """One call to every engine that takes part: what to say when it does not end well."""

    phase: str
    limit: Timeout | None
    """None: the engine keeps one itself."""
    check: str
    error: type[Error]
    margin_s: float = 0.0
    """Waited beyond the limit, where the engine keeps the same timeout itself and can say more."""

    def deadline(self) -> float | None:
        """Of what is asked now, by the monotonic clock; None: there is none."""
        return None if self.limit is None else time.monotonic() + self.limit.seconds + self.margin_s


@dataclass(frozen=True, slots=True)
class PendingCall:
    """An answer that is waited for."""

    name: str
    """The engine's."""
    deadline: float | None


def all_answers(call: RayCall, answers: Iterable[tuple[str, Any]]) -> list[Any]:
    """Every engine's answer, in order.

    The first failure ends the wait, whatever the others are doing, unless it is a broken
    connection: an engine that fails in the middle of a sync leaves the group, and the others may
    notice before its own error has come. It gets `VICTIM_GRACE_S`.
    """
    deadline = call.deadline()
    asked = {answer: PendingCall(name, deadline) for name, answer in answers}
    waiting, values = dict(asked), {}
    victim: Error | None = None
    given_up = 0.0
    while waiting:
        if (
            victim is not None
            and not ray.wait(list(waiting), timeout=max(0.0, given_up - time.monotonic()))[0]
        ):
            break
        answer = next_answer(call, waiting)
        try:
            values[answer] = value_of(call, waiting.pop(answer).name, answer)
        except (RolloutError, WeightSyncError) as error:
            if not any(sign in error.message for sign in BROKEN_CONNECTION):
                raise
            if victim is None:
                victim, given_up = error, time.monotonic() + VICTIM_GRACE_S
    if victim is not None:
        raise victim
    return [values[answer] for answer in asked]


def next_answer(call: RayCall, waiting: Mapping[Any, PendingCall]) -> Any:
    """The reference that is there first. Raises the call's error when the limit of one of them is
    over.
    """
    deadlines = [asked.deadline for asked in waiting.values() if asked.deadline is not None]
    ready, _ = ray.wait(
        list(waiting), timeout=max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
    )
    if ready:
        return ready[0]
    silent = list(
        dict.fromkeys(asked.name for asked in waiting.values() if asked.deadline == min(deadlines))
    )
    assert call.limit is not None, "there is a deadline"
    raise call.error(
        late(", ".join(silent), call.limit, call.check), actor=silent[0], phase=call.phase
    )


def value_of(call: RayCall, name: str, answer: Any) -> Any:
    """What the engine of this name has answered. Raises its own error, or the call's."""
    try:
        return ray.get(answer)
    except RayError as error:
        raise told(call, name, error) from error


def told(call: RayCall, name: str, error: RayError) -> Error | RecordError:
    """What is raised where Ray says so of the engine of this name: its own error, that of a
    picture's file, or the call's.
    """
    if isinstance(error, RayTaskError) and isinstance(error.cause, RayActorError | ObjectLostError):
        # Not the engine's end: an argument of the call, or a picture, was to come from the learner.
        problem = (
            "what it was asked for is lost, for the learner's process has ended; check its log and"
            " the machine's memory"
        )
        return call.error(f"{problem} ({error.cause})", actor=name, phase=call.phase)
    if isinstance(error, RayActorError):
        return call.error(ended("its", error), actor=name, phase=call.phase)
    # Ray hides the actor's own exception in one of its own kind.
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, Error | RecordError):
        return cause
    if isinstance(cause, EngineEndedError):
        return call.error(ended("its", cause.args[0]), actor=name, phase=call.phase)
    return call.error(f"{type(cause).__name__}: {cause}", actor=name, phase=call.phase)
