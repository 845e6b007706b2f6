"""Calls of Ray actors (rollout actors, learner ranks) with a time limit and readable errors."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rollout_actors.engine.failure import EngineEndedError
from shared.errors import (
    LearnerError,
    LostLearnerError,
    RecordError,
    RolloutError,
    Timeout,
    WeightSyncError,
    ended,
    late,
)

if TYPE_CHECKING:
    from ray import ObjectRef

RefT = TypeVar("RefT")

# How long to wait for the error of the actor that broke a connection. Below `RECEIVER_ERROR_S`.
PEER_ERROR_GRACE_S = 20.0
# Text in errors of gloo and NCCL when a peer has left. vLLM passes on only the text of an error.
BROKEN_CONNECTION = ("third_party/gloo", "ncclRemoteError", "ncclSystemError")
# Text in Ray's error of an actor whose node was lost. The error has no field for it.
LOST_NODE = "node has died"
# First sentence, and table of processes, in Ray's error of an actor that its memory monitor killed.
OUT_OF_MEMORY = re.compile(r"low on memory\. Memory on the node .*? was (?P<used>.+?)\n", re.DOTALL)
LARGEST_PROCESSES = re.compile(r"memory users:.*\n(?P<rows>(?:\d+\s.*\n){1,3})")


@dataclass(frozen=True, slots=True)
class RayCall:
    """The time limit of one call to several Ray actors, and how its failures are reported.

    Example:
        `RayCall("generate", Timeout(600.0, "timeouts.generate_s"), "the engine's log",
        RolloutError)`
    """

    phase: str
    limit: Timeout | None
    """Longest wait for the answers; None: the actors enforce a limit themselves."""
    check: str
    """What the user should look at if an answer is late."""
    error: Callable[..., Exception]
    """Class of the raised exception. It is called with a message, `actor` and `phase`."""
    gone: Callable[..., Exception] | None = None
    """Class of the raised exception if the actor's process has ended; None: `error`."""
    margin_s: float = 0.0
    """Seconds added to `limit`, if the actor enforces the same limit and reports more details."""

    def deadline(self) -> float:
        """Return the time of `time.monotonic` until which a call that is sent now may take."""
        if self.limit is None:
            return math.inf
        return time.monotonic() + self.limit.seconds + self.margin_s

    def timeout_error(self, names: Sequence[str]) -> Exception:
        """Return the exception to raise if these actors have not answered in time."""
        assert self.limit is not None, "a late answer requires a limit"
        message = late(", ".join(names), self.limit, self.check)
        return self.error(message, actor=names[0], phase=self.phase)

    def translate_error(self, name: str, error: RayError) -> Exception:
        """Return the exception to raise in place of Ray's error of the actor `name`.

        It is the exception that the actor raised, or else an exception that names the actor.
        """
        # A RayTaskError wraps the exception of the actor's method. Others are Ray's own errors.
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RolloutError | WeightSyncError | RecordError | LearnerError):
            return cause
        if cause is not error and isinstance(cause, RayActorError | OwnerDiedError):
            # The actor is alive. It could not get an argument or an image that the learner owned.
            message = (
                f"the requests for {name} are lost, because the learner's process has ended; check"
                f" its log and the machine's memory ({cause})"
            )
            return LostLearnerError(message, phase=self.phase)
        # Ray raises an OutOfMemoryError if the constructor had not returned.
        if isinstance(cause, RayActorError | EngineEndedError | OutOfMemoryError):
            reason = cause.args[0] if isinstance(cause, EngineEndedError) else cause
            gone = self.gone or self.error
            message = ended("its", reason)
            if killed := OUT_OF_MEMORY.search(str(reason)):
                largest = LARGEST_PROCESSES.search(str(reason))
                rows = largest["rows"].split("\n") if largest else []
                found = "; ".join(" ".join(row.split()[1:]) for row in rows if row)
                message = (
                    f"Ray ended its process because memory was full ({killed['used']};"
                    f" largest processes, GB: {found or 'unknown'}); end other programs, or start"
                    " fewer or smaller processes (`rollmatch preflight` says what each needs)"
                )
            elif LOST_NODE in str(reason):
                message = (
                    f"its node was lost ({reason}); check that the machine and its network work,"
                    " and run `ray start` on it again, or on another machine"
                )
            return gone(message, actor=name, phase=self.phase)
        if isinstance(cause, ObjectLostError):
            lost = "a finished answer" if cause is error else "an argument of the call"
            message = f"{lost} was lost ({cause}); check {self.check}"
        else:
            message = f"{type(cause).__name__}: {cause}"
        return self.error(message, actor=name, phase=self.phase)

    def blames_peer(self, error: Exception) -> bool:
        """Return whether this error is a broken connection, which another actor has caused."""
        return any(sign in str(error) for sign in BROKEN_CONNECTION)


def wait_for_all(call: RayCall, answers: Iterable[tuple[str, object]]) -> list[Any]:
    """Wait for the answers of all called actors and return them in order.

    `answers` are pairs of an actor's name and the Ray reference of its answer. The first failure
    ends the wait. If it is a broken connection, the other actors have `PEER_ERROR_GRACE_S` to
    report the cause. Raises the cause, or `call.timeout_error`.
    """
    names = {answer: name for name, answer in answers}
    # One deadline for all, because the calls were sent at the same time.
    waiting = dict.fromkeys(names, call.deadline())
    values: dict[object, object] = {}
    victim: Exception | None = None
    while waiting:
        answer = next_ready(waiting)
        if answer is None:
            raise victim or call.timeout_error([names[late] for late in waiting])
        deadline = waiting.pop(answer)
        try:
            values[answer] = result_of(call, names[answer], answer)
        except Exception as error:
            if not call.blames_peer(error):
                raise
            # The connection broke because a peer ended. The peer's own error explains more, and
            # may arrive some seconds later.
            if victim is None:
                victim = error
                deadline = min(deadline, time.monotonic() + PEER_ERROR_GRACE_S)
                waiting = dict.fromkeys(waiting, deadline)
    if victim is not None:
        raise victim
    return [values[answer] for answer in names]


def next_ready(waiting: Mapping[RefT, float], *, within_s: float | None = None) -> RefT | None:
    """Return the first Ray reference whose answer is ready.

    `waiting` maps references to deadlines by `time.monotonic`. Return None when the earliest
    deadline, or `within_s` seconds, have passed.
    """
    # The earliest deadline: the first late answer ends the wait.
    deadline = min(waiting.values())
    if within_s is not None:
        deadline = min(deadline, time.monotonic() + within_s)
    timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
    # `ray.wait` returns one reference by default, and does not raise if the call failed.
    ready, _ = ray.wait(list(waiting), timeout=timeout)
    return ready[0] if ready else None


def result_of(call: RayCall, name: str, answer: ObjectRef) -> Any:
    """Return the actor's answer, which is ready. Raises the result of `call.translate_error`."""
    try:
        return ray.get(answer)
    except RayError as error:
        raise call.translate_error(name, error) from error
