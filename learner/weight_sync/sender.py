"""The learner's end of a weight sync: offers its parameters, then sends them to every rollout
engine (DESIGN 9).

vllm is imported only when a group of GPUs is opened, so the learner's step runs where it is not
installed.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from learner.model.checkpoint import WeightSource
from learner.model.ranks import ReceiverGroup
from learner.weight_sync.canary import AsksCanary
from learner.weight_sync.transports import WIRES, WeightTransport
from shared.errors import LEARNER, ConfigError, LearnerError, Timeout, WeightSyncError, late
from shared.rollouts import WeightOffer
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import PHASE_LIMIT, FullOffer, ProcessGroupSpec, TensorSpec
from shared.weight_sync.phases import ENGINE_MARGIN_S, OFFER, SendReport, SyncPhase
from shared.weight_sync.transports import TransportKind

GROUP_PORT = "rollout_matching.vllm.server.servers[{index}].group_port"

T = TypeVar("T")


class WeightSender:
    """Sends one source's weights again and again over its groups, and opens new groups after a
    failure.

    Holds: a listening socket for each group between the first offer and the first send, the groups
    after that. Not thread-safe: one sync at a time.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        transport: str,
        receivers: tuple[ReceiverGroup, ...],
        timeout_s: float,
        join: Timeout | None = None,
        host: str = "127.0.0.1",
        bucket_bytes: int = 16 << 20,
    ) -> None:
        """`receivers` are the engines' workers, group by group; `host` is an address of this node
        that they can reach.

        Args:
            timeout_s: of each phase.
            join: of the phase in which the receivers come; None: as of any other.
        """
        self._source = source
        self._transport = TransportKind(transport)
        self._receivers = receivers if self._transport in WIRES else ()
        self._limit = Timeout(timeout_s, PHASE_LIMIT)
        self._join = join
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._listening: list[socket.socket] = []
        self._groups: tuple[ProcessGroupSpec, ...] = ()
        self._wire: WeightTransport | None = None
        self._canary: AsksCanary | None = None

    def offer(self, version: int, canary: AsksCanary) -> WeightOffer:
        """What `send` will send: names, sizes, and where to join. The weights must not change
        before the sync's end.

        Where there is a wire, engines load while `send` waits for them: time in which it has the
        canary's log-probabilities computed, which the offer lacks.

        Raises ConfigError where a configured port is taken, and WeightSyncError where no port can
        be opened at all.
        """
        if self._wire is None and not self._listening:
            self._listen()
        tensors = tuple(
            TensorSpec(
                name,
                str(dtype).removeprefix("torch."),
                tuple(shape),
                shape.numel() * dtype.itemsize,
            )
            for name, dtype, shape in self._source.specs()
        )
        self._canary = canary if self._transport in WIRES else None
        probe = canary.probe() if self._canary is None else canary.question()
        num_logprobs = 0 if self._canary is None else probe.num_logprobs
        terms = FullOffer(
            self._groups, self._limit.seconds, self._bucket_bytes, tensors, num_logprobs, self._join
        )
        return WeightOffer(
            version=version, transport=self._transport, rendezvous={"terms": terms}, canary=probe
        )

    def send(self, offer: WeightOffer) -> SendReport:
        """Send the offered weights; returns when they are out, not when they are verified. Raises
        WeightSyncError, and LearnerError where the canary fails.

        Where there is no wire (ipc, inproc) the engine's backend lives in this process and takes
        the weights itself: nothing is left to do.
        """
        terms = FullOffer.of(offer)
        if self._transport not in WIRES:
            return SendReport(phase_s={})
        assert self._canary is not None, "send follows its offer"
        try:
            started = time.perf_counter()
            if self._wire is None:
                opening = _in_thread(lambda: self._open(terms), SyncPhase.RENDEZVOUS)
                self._wire = self._result(opening, SyncPhase.RENDEZVOUS, started, terms.join_limit)
            joined = time.perf_counter()
            logprobs: Future[tuple[float, ...]] = Future()
            wire, checksummed = self._wire, self.outgoing(terms, logprobs.result)
            sending = _in_thread(lambda: wire.send(checksummed, terms), SyncPhase.WIRE)
            # Beside the packing, and beside the engines' loading.
            _run(self._canary.logprobs, logprobs)
            scored = time.perf_counter()
            # Also behind a canary that failed: the thread ends by itself, where it asks for the
            # numbers, and the group must not be closed under it.
            wait([sending], timeout=_left_s(joined, self._limit))
            _require_scored(logprobs)
            if scored - joined > self._limit.seconds:
                told = (
                    f"the learner took {scored - joined:.1f} s to score it, of {PHASE_LIMIT} ="
                    f" {self._limit.seconds:g} s for all it sends; raise that"
                )
                raise WeightSyncError(told, actor=LEARNER, phase=SyncPhase.CANARY)
            self._result(sending, SyncPhase.WIRE, joined, self._limit)
            wire_s = time.perf_counter() - joined - checksummed.gather_s - checksummed.verify_s
        except (WeightSyncError, LearnerError):
            self.close()
            raise
        phase_s = {
            "send_gather": checksummed.gather_s,
            "send_rendezvous": joined - started,
            "send_wire": wire_s,
            "send_verify": checksummed.verify_s,
        }
        return SendReport(phase_s | {"send_canary": scored - joined})

    def outgoing(
        self, terms: FullOffer, logprobs: Callable[[], Sequence[float]]
    ) -> ChecksummedWeights:
        """The weights as they go out; `logprobs` waits for those of the canary."""
        return ChecksummedWeights(self._source.tensors(), terms, torch, logprobs)

    def close(self) -> None:
        """Leave the groups; the next offer opens others. Also to be called when the set of
        receivers changes. Twice is harmless.
        """
        if self._wire is not None:
            self._wire.close()
        for listening in self._listening:
            listening.close()
        self._wire = None
        self._listening = []

    def _listen(self) -> None:
        groups = []
        for index, receivers in enumerate(self._receivers):
            try:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                self._listening.append(
                    socket.create_server(
                        (self._host, receivers.port),
                        family=family,
                        backlog=1 + receivers.num_workers,
                    )
                )
            except OSError as error:
                self.close()
                if not receivers.port:
                    raise WeightSyncError(
                        f"no port of {self._host} can be opened ({error.strerror}); check that this"
                        " node has the address",
                        actor=LEARNER,
                        phase=OFFER,
                    ) from error
                key = GROUP_PORT.format(index=index)
                raise ConfigError(
                    f"{key}: port {receivers.port} of {self._host} cannot be opened"
                    f" ({error.strerror}); choose a free one, or end what uses it"
                ) from error
            groups.append(
                ProcessGroupSpec(
                    self._host,
                    self._listening[-1].getsockname()[1],
                    1 + receivers.num_workers,
                    uuid.uuid4().hex,
                )
            )
        self._groups = tuple(groups)

    def _open(self, terms: FullOffer) -> WeightTransport:
        assert self._listening, "send follows its offer"
        # The groups take over the sockets that have held the ports since the offer: nobody else can
        # have bound them.
        listening, self._listening = self._listening, []
        return WIRES[self._transport](terms, listening)

    def _result(self, work: Future[T], phase: SyncPhase, began: float, limit: Timeout) -> T:
        """Of a phase that began then, by `perf_counter`: whatever this thread did meanwhile is
        within its limit.
        """
        try:
            return work.result(timeout=_left_s(began, limit))
        except Exception as error:
            num_receivers = sum(group.num_workers for group in self._receivers)
            addresses = ", ".join(f"{group.host}:{group.port}" for group in self._groups)
            check = f"that every rollout engine is alive and reaches {addresses}"
            told = f"{error}; check {check}"
            if isinstance(error, TimeoutError):
                told = late(f"{num_receivers} receivers", limit, check)
            raise WeightSyncError(told, actor=LEARNER, phase=phase) from error


def _left_s(began: float, limit: Timeout) -> float:
    return max(0.0, began + limit.seconds + ENGINE_MARGIN_S - time.perf_counter())


def _require_scored(logprobs: Future[tuple[float, ...]]) -> None:
    """A canary that fails is no receiver's to mend, who know only that the learner left."""
    error = logprobs.exception()
    if error is None:
        return
    raise (
        error
        if isinstance(error, LearnerError)
        else LearnerError(
            f"its canary failed: {type(error).__name__}: {error}", phase=SyncPhase.CANARY
        )
    ) from error


def _in_thread(work: Callable[[], T], phase: SyncPhase) -> Future[T]:
    """Because a collective that waits for a peer cannot be interrupted from inside. A thread that
    is late is left behind: it ends when `close` or the peer's end breaks the group, and as a daemon
    it does not hold the process."""
    result: Future[T] = Future()
    threading.Thread(target=_run, args=(work, result), name=f"weight-{phase}", daemon=True).start()
    return result


def _run(work: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(work())
    except Exception as error:  # delivered to the waiting thread by the future
        result.set_exception(error)
