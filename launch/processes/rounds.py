"""Cuts a step's requests into rounds, sends each actor its parts of a round, and collects the
rollouts in order.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import ray

from launch.processes.fleet import Fleet
from launch.processes.learner_client import UNOBSERVED, RunObserver
from rollout_actors.engine.ray_calls import RayCall, next_ready, result_of
from shared.chunking import RoundPart, cut_rounds, round_chunk, round_parts
from shared.errors import LostRoundError, RolloutError, UnreachableError
from shared.protocols import PerRank
from shared.rollouts import TRIES
from shared.sent_requests import in_objects
from shared.weight_sync.phases import ReceivingEngines, SendingLearner, sync_weights

if TYPE_CHECKING:
    from ray import ObjectRef

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundSize:
    """The settings that determine how many rollouts are generated together, in one round.

    Example (2 engines of 1 device, decode_batch_size 2, one learner rank): a step of 6 requests is
    split into rounds of 3 and 3. In each round the first engine generates 2 rollouts, and the
    second 1.
    """

    decode_batch_size: int = sys.maxsize
    """Maximum number of rollouts that one device decodes at a time."""
    learner_ranks: int = 1
    group_size: int = 1
    """Rollouts per request. A request to an environment is for a group of one example."""
    in_one_round: bool = False
    """Whether the step is one round, because all its rollouts (of all learner ranks) are scored
    together.
    """

    def chunk(self, devices: Sequence[int]) -> int:
        """Return the maximum number of requests of each learner rank in a round.

        `devices`: number of devices of each engine.

        Raises ValueError if a round cannot have a request of every learner rank.
        """
        if self.in_one_round:
            return sys.maxsize
        size = self.group_size
        chunk = round_chunk(self.decode_batch_size, devices, self.learner_ranks, together=size)
        return chunk // size

    def split(self, requests: PerRank, devices: Sequence[int]) -> list[PerRank]:
        """Cut a step's rollout requests into as few rounds as the decode batches allow.

        `devices`: number of devices of each engine.
        """
        return cut_rounds(requests, self.chunk(devices))


class LosableEngines(ReceivingEngines, Protocol):
    """Interface of engines for `SecondTry`: they may all be lost in a round, and be replaced."""

    version: int

    def begin(self, round_: PerRank) -> Future[PerRank]: ...


@dataclass(frozen=True, slots=True)
class SecondTry:
    """Repeats, once and on new engines, a round of rollouts whose actors were all lost."""

    engines: LosableEngines
    learner: SendingLearner
    observer: RunObserver
    round_: PerRank
    version: int
    """Weight version of the engines when the round was begun."""

    def answers(self, lost: LostRoundError) -> PerRank:
        """Send the round's weights to new engines, and generate the round's rollouts again.

        Raises LostRoundError if the weights are no longer available, or if the round is lost again.
        """
        if self.engines.version != self.version:
            why = ", and the weights of the round are no longer available (max_staleness)"
            raise _lost(lost, why) from lost
        self.observer.sync(sync_weights(self.learner, self.engines, again=True))
        try:
            return self.engines.begin(self.round_).result()
        except LostRoundError as error:
            raise _lost(error, " for the second time in a round") from error


@dataclass(frozen=True, slots=True)
class Round:
    """A round of rollouts that is being generated."""

    future: Future[PerRank]
    """The rollouts of the first attempt; a LostRoundError if all actors are lost."""
    observer: RunObserver = UNOBSERVED
    second_try: SecondTry | None = None
    """None: the round is not repeated if all its actors are lost."""

    @classmethod
    def answered(cls, answers: PerRank) -> Round:
        """Return a finished round with these rollouts, such as those saved in a checkpoint."""
        future: Future[PerRank] = Future()
        future.set_result(answers)
        return cls(future)

    def result(self) -> PerRank:
        """Wait for the rollouts. If all actors were lost, repeat the round and wait again.

        The learner has to be idle: new engines may need its weights.
        """
        with self.observer.waits_for("rollouts"):
            try:
                return self.future.result()
            except LostRoundError as error:
                if self.second_try is None:
                    raise
                return self.second_try.answers(error)


def _lost(error: LostRoundError, why: str) -> LostRoundError:
    message = f"{error.message}; all actors of the round are lost{why}; continue with `resume=RUN`"
    return LostRoundError(message, actor=error.actor, phase=error.phase)


@dataclass(frozen=True, slots=True)
class _SentPart:
    """A part of a round that was sent to an actor."""

    part: RoundPart
    deadline: float
    """Monotonic time at which the actor's answer is late."""
    rollouts: ObjectRef
    """Reference to a `list[Rollout]`."""
    count: ObjectRef
    """Reference to the length of that list. Both references are ready at the same time."""


class Rounds:
    """Sends a round's requests to actors and collects the rollouts, one round at a time."""

    def __init__(self, size: RoundSize, engines: Fleet, environments: Fleet | None = None) -> None:
        """If there are `environments`, the requests are sent to them, and they call the engines."""
        self._size = size
        self._engines = engines
        self._asked = environments or engines
        assert not size.in_one_round or len(self._asked.names) == 1, "one process has all rollouts"

    def split(self, requests: PerRank) -> list[PerRank]:
        return self._size.split(requests, self._engines.devices)

    def collect(self, round_: PerRank, number: int) -> PerRank:
        """Have the actors generate the rollouts of one round, the step's round `number`.

        Returns, for each learner rank, references to `list[Rollout]`s in position order. The
        rollouts stay in the process that made them. Raises a RolloutError that names the actor, or
        a LostRoundError if all actors of the round are lost and new ones are being started.
        """
        asked = self._asked
        gone = UnreachableError if asked.replaces_lost else None
        check = asked.timeouts.check
        call = RayCall("generate", asked.timeouts.generate, check, RolloutError, gone=gone)
        # Environments do not end with an engine, and would not report its end.
        watches = {
            fleet: watch
            for fleet in dict.fromkeys((asked, self._engines))
            if (watch := fleet.watch()) is not None
        }
        interval_s = min((watch.interval_s for watch in watches.values()), default=None)
        looked_s = time.monotonic()
        sizes = [len(requests) for requests in round_]
        bound = self._size.decode_batch_size if asked is self._engines else sys.maxsize
        queue = RoundQueue(sizes, asked.devices, decode_batch_size=bound)
        waiting: dict[ObjectRef, _SentPart] = {}
        done: list[_SentPart] = []
        while True:
            deadline = call.deadline()
            send = self._send_at_once if self._size.in_one_round else self._send
            # Ray's dashboard shows this name. A number of the run would make too many names for it.
            sent_parts = send(queue.take(), round_, deadline, f"generate round {number}")
            waiting |= {sent.count: sent for sent in sent_parts}
            if not waiting:
                break
            deadlines = {count: sent.deadline for count, sent in waiting.items()}
            answer = next_ready(deadlines, within_s=interval_s)
            if interval_s is not None and time.monotonic() - looked_s >= interval_s:
                looked_s = time.monotonic()
                for fleet, watch in watches.items():
                    for index, given_up in watch.look(fleet.actors).items():
                        # The actor is killed, and then its requests fail.
                        fleet.lose(index, given_up)
            if answer is None and time.monotonic() < min(deadlines.values()):
                continue
            if answer is None:
                first = min(deadlines.values())
                late = [sent.part for sent in waiting.values() if sent.deadline == first]
                names = dict.fromkeys(asked.names[part.engine] for part in late)
                raise call.timeout_error(list(names))
            sent = waiting.pop(answer)
            name = asked.names[sent.part.engine]
            num = len(sent.part.requests)
            try:
                count = result_of(call, name, answer)
            except UnreachableError as error:
                try:
                    self._pass_on(queue, sent.part, error)
                except LostRoundError:
                    # Other actors would continue a round that will be repeated.
                    for count in waiting:
                        ray.cancel(count)
                    left = len(waiting)
                    ray.wait(list(waiting), num_returns=left, timeout=asked.timeouts.closed_s)
                    raise
                continue
            queue.answered(sent.part)
            if count != num:
                message = f"answered {count} of {num} requests"
                raise RolloutError(message, actor=name, phase="generate")
            done.append(sent)
        # In position order, whatever the order of arrival.
        done.sort(key=lambda sent: sent.part.requests.start)
        return [
            [sent.rollouts for sent in done if sent.part.rank == rank]
            for rank in range(len(round_))
        ]

    def _pass_on(self, queue: RoundQueue, part: RoundPart, error: UnreachableError) -> None:
        """Give a part, which one actor failed to answer, to the next actor.

        If no actor is left, raises `error`, or a LostRoundError if new actors are being started.
        """
        asked = self._asked
        name = asked.names[part.engine]
        lost = LostRoundError(error.message, actor=error.actor, phase=error.phase)
        if error.actor != name:
            # An environment actor reports that it reached no engine: no other one would reach any.
            raise lost if self._engines.replaces_lost else error
        if asked.replaces_lost:
            asked.lose(part.engine, error)
        elif not asked.asks_next_on_failure:
            # Without replacements, only requests to servers go to the next one.
            raise error
        engine = queue.failed(part)
        if engine is None:
            raise lost if asked.replaces_lost else error
        # The reason for a replacement was logged when it began.
        why = f"{name} is lost" if asked.replaces_lost else error
        _LOGGER.warning(
            "%s; its %d requests go to %s", why, len(part.requests), asked.names[engine]
        )

    def _send(
        self, parts: Sequence[RoundPart], round_: PerRank, deadline: float, task: str
    ) -> list[_SentPart]:
        sent = []
        for part in parts:
            objects, places = _objects_of(part, round_)
            method = self._asked.actors[part.engine].generate.options(num_returns=2, name=task)
            attempt = TRIES * part.num_failed
            rollouts, count = method.remote(*objects, places=places, attempt=attempt)
            sent.append(_SentPart(part, deadline, rollouts, count))
        return sent

    def _send_at_once(
        self, parts: Sequence[RoundPart], round_: PerRank, deadline: float, task: str
    ) -> list[_SentPart]:
        """Send the parts of all learner ranks to the only actor in one call."""
        if not parts:
            return []
        of_parts = [_objects_of(part, round_) for part in parts]
        method = self._asked.actors[0].generate_at_once.options(
            num_returns=2 * len(parts), name=task
        )
        answers = method.remote(
            *(sent for objects, _ in of_parts for sent in objects),
            parts=[(len(objects), places) for objects, places in of_parts],
        )
        pairs = zip(parts, answers[::2], answers[1::2], strict=True)
        return [_SentPart(part, deadline, rollouts, count) for part, rollouts, count in pairs]


def _objects_of(part: RoundPart, round_: PerRank) -> tuple[list[ObjectRef], range]:
    return in_objects(round_[part.rank][part.requests.start : part.requests.stop])


class RoundQueue:
    """The waiting and running parts (request batches) of one round, by engine. Does not use Ray.

    No engine gets more than `decode_batch_size` requests per device at a time. A part that another
    engine failed to answer waits until its new engine has room for it.
    """

    def __init__(
        self, sizes: Sequence[int], devices: Sequence[int], *, decode_batch_size: int
    ) -> None:
        """`sizes`: number of requests of each learner rank, together at most `decode_batch_size`
        per device.

        `devices`: number of devices of each engine.
        """
        self._bounds = [decode_batch_size * count for count in devices]
        self._waiting: list[deque[RoundPart]] = [deque() for _ in devices]
        self._num_asked = [0] * len(devices)
        for part in round_parts(sizes, devices):
            self._waiting[part.engine].append(part)
        shares = [sum(len(part.requests) for part in waiting) for waiting in self._waiting]
        assert all(share <= bound for share, bound in zip(shares, self._bounds, strict=True)), (
            f"a round of {shares} exceeds the engines' limits {self._bounds}"
        )

    def take(self) -> list[RoundPart]:
        """Return the parts to send now. Later call `answered` or `failed` for each of them."""
        taken = []
        for engine, waiting in enumerate(self._waiting):
            while (
                waiting
                and self._num_asked[engine] + len(waiting[0].requests) <= self._bounds[engine]
            ):
                taken.append(waiting.popleft())
                self._num_asked[engine] += len(taken[-1].requests)
        return taken

    def answered(self, part: RoundPart) -> None:
        self._num_asked[part.engine] -= len(part.requests)

    def failed(self, part: RoundPart) -> int | None:
        """Queue a failed part for the next engine, and return that engine's index.

        Return None if all engines have failed to answer the part.
        """
        self.answered(part)
        num_failed = part.num_failed + 1
        engine = (part.engine + 1) % len(self._waiting)
        if num_failed == len(self._waiting):
            return None
        # An engine with fewer devices gets it in several parts.
        size = self._bounds[engine]
        for first in range(0, len(part.requests), size):
            requests = part.requests[first : first + size]
            self._waiting[engine].append(RoundPart(engine, part.rank, requests, num_failed))
        return engine
