"""The learner's end of a sync of full weights (decision 38).

vllm is imported only when a group of GPUs is opened: the learner's step does without it.
"""

from __future__ import annotations

import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from learner.model.checkpoint import WeightSource
from learner.model.ranks import ReceiverGroup
from shared.errors import LEARNER, ConfigError, LearnerError, Timeout, WeightSyncError, late
from shared.rollouts import WeightOffer
from shared.weight_sync.canary import CanaryProbe, Logprobs
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.gloo import NUM_BUFFERS, GlooSender
from shared.weight_sync.offer import PHASE_LIMIT, FullOffer, ProcessGroupSpec, TensorSpec
from shared.weight_sync.phases import ENGINE_MARGIN_S, OFFER, SendReport, SyncPhase
from shared.weight_sync.transports import TransportKind

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

T = TypeVar("T")


class NcclSender:
    """Sends from GPU to GPUs, to vLLM's own `nccl` engine, by vLLM's own packing.

    Not run on a GPU. NCCL has no timeout: a late broadcast is given up by `WeightSender`, which
    leaves the groups. A receiver that hangs in one stays there until its process ends.
    """

    def __init__(self, terms: FullOffer, listening: list[socket.socket]) -> None:
        """Open every group as its rank 0; `listening` have held the ports since the offer."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        self._communicators: list[PyNcclCommunicator] = []
        for group, bound in zip(terms.groups, listening, strict=True):
            joined = StatelessProcessGroup.create(
                group.host,
                group.port,
                0,
                group.world_size,
                store_timeout=math.ceil(terms.join_limit.seconds),
                listen_socket=bound,
            )
            with unpinned_nccl_env():
                communicator = PyNcclCommunicator(joined, device=torch.cuda.current_device())
            if communicator.disabled:  # its broadcasts would do nothing, without a word
                raise RuntimeError(
                    f"vLLM has no NCCL library for the group at {group.host}:{group.port}, or was"
                    " told to use none; see VLLM_NCCL_SO_PATH"
                )
            self._communicators.append(communicator)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: FullOffer) -> None:
        """Send every tensor to every group, in the terms' order, and wait until it is out."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(tensors),
            group=_BroadcastToAll(self._communicators),
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=terms.bucket_bytes,
            num_buffers=NUM_BUFFERS,
        )

    def close(self) -> None:
        """Leave the groups: whoever waits for this rank sees a closed connection."""
        for communicator in self._communicators:
            communicator.destroy()
        self._communicators = []


class _BroadcastToAll:
    """Several communicators in place of one, so that a bucket is packed once. Not run on a GPU."""

    def __init__(self, communicators: list[PyNcclCommunicator]) -> None:
        self._communicators = communicators

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        # One after the other: two NCCL kernels of one process at once may wait for each other.
        for communicator in self._communicators:
            communicator.broadcast(tensor, src=src)


@dataclass(eq=False, repr=False)
class WeightSender:
    """Sends one source's weights again and again, and opens new groups after a failure.

    Holds a listening socket for each group between the first offer and the first send, the groups
    after that. Not thread-safe: one sync at a time.
    """

    source: WeightSource
    _: KW_ONLY
    transport: str
    receivers: tuple[ReceiverGroup, ...]
    """The engines' workers, group by group."""
    timeout_s: float
    """Of each phase."""
    join: Timeout | None = None
    """Of the phase in which the receivers come; None: as of any other."""
    host: str = "127.0.0.1"
    """An address of this node that the receivers can reach."""
    bucket_bytes: int = 16 << 20
    _listening: list[socket.socket] = field(init=False, default_factory=list)
    _groups: tuple[ProcessGroupSpec, ...] = field(init=False, default=())
    _wire: GlooSender | NcclSender | None = field(init=False, default=None)
    _score: Callable[[], Logprobs] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._transport = TransportKind(self.transport)
        # Without a wire (ipc, inproc) a backend in this process takes the weights itself.
        self._has_wire = self._transport in (TransportKind.GLOO, TransportKind.NCCL)
        self._limit = Timeout(self.timeout_s, PHASE_LIMIT)

    def offer(
        self, version: int, probe: CanaryProbe, score: Callable[[], Logprobs] | None = None
    ) -> WeightOffer:
        """Return what `send` will send. The weights must not change before the sync's end.

        `score` computes the log-probabilities that the probe lacks: over a wire while the engines
        load, else here.

        Raises:
            ConfigError: a configured port is taken.
            WeightSyncError: no port can be opened at all.
        """
        if not self._has_wire and score is not None:
            probe = probe.with_logprobs(score())
            score = None
        if self._wire is None and not self._listening:
            self._listen()
        self._score = score
        specs = (
            (name, str(dtype).removeprefix("torch."), tuple(shape), shape.numel() * dtype.itemsize)
            for name, dtype, shape in self.source.specs()
        )
        terms = FullOffer(
            groups=self._groups,
            timeout_s=self.timeout_s,
            bucket_bytes=self.bucket_bytes,
            tensors=tuple(TensorSpec(*spec) for spec in specs),
            num_logprobs=0 if score is None else probe.num_logprobs,
            join=self.join,
        )
        return WeightOffer(version, self._transport, terms, probe)

    def send(self, offer: WeightOffer) -> SendReport:
        """Send the offered weights, if over a wire; return when they are out, not yet verified.

        Raises WeightSyncError, and LearnerError where the canary fails.
        """
        if not self._has_wire or not isinstance(offer.terms, FullOffer):
            return SendReport(phase_s={})
        terms = offer.terms
        try:
            started = time.perf_counter()
            if self._wire is None:
                opening = _in_thread(lambda: self._open(terms), SyncPhase.RENDEZVOUS)
                self._wire = self._result(opening, SyncPhase.RENDEZVOUS, started, terms.join_limit)
            joined = time.perf_counter()
            logprobs: Future[Logprobs] = Future()
            wire = self._wire
            checksummed = self.outgoing(terms, logprobs.result)
            sending = _in_thread(lambda: wire.send(checksummed, terms), SyncPhase.WIRE)
            # Beside the packing, and beside the engines' loading.
            _run(self._score or tuple, logprobs)
            scored = time.perf_counter()
            # Also behind a canary that failed: the thread ends by itself, where it asks for the
            # numbers, and the group must not be closed under it.
            wait([sending], timeout=_left_s(joined, self._limit))
            _raise_canary_error(logprobs)
            if scored - joined > self._limit.seconds:
                raise WeightSyncError(
                    f"the learner took {scored - joined:.1f} s to score it, of {PHASE_LIMIT} ="
                    f" {self._limit.seconds:g} s for all it sends; raise that",
                    actor=LEARNER,
                    phase=SyncPhase.CANARY,
                )
            self._result(sending, SyncPhase.WIRE, joined, self._limit)
            wire_s = time.perf_counter() - joined - checksummed.gather_s - checksummed.verify_s
        except (WeightSyncError, LearnerError):
            self.close()
            raise
        return SendReport(
            {
                "send_gather": checksummed.gather_s,
                "send_rendezvous": joined - started,
                "send_wire": wire_s,
                "send_verify": checksummed.verify_s,
                "send_canary": scored - joined,
            }
        )

    def outgoing(
        self, terms: FullOffer, logprobs: Callable[[], Sequence[float]]
    ) -> ChecksummedWeights:
        """Return the weights as they go out; `logprobs` waits for those of the canary."""
        return ChecksummedWeights(self.source.tensors(), terms, logprobs)

    def close(self) -> None:
        """Leave the groups, as when the receivers change; the next offer opens others."""
        if self._wire is not None:
            self._wire.close()
        for listening in self._listening:
            listening.close()
        self._wire = None
        self._listening = []

    def _listen(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        groups = []
        for index, receivers in enumerate(self.receivers if self._has_wire else ()):
            world_size = 1 + receivers.num_workers
            address = (self.host, receivers.port)
            try:
                listening = socket.create_server(address, family=family, backlog=world_size)
            except OSError as error:
                self.close()
                if not receivers.port:
                    raise WeightSyncError(
                        f"no port of {self.host} can be opened ({error.strerror}); check that this"
                        " node has the address",
                        actor=LEARNER,
                        phase=OFFER,
                    ) from error
                raise ConfigError(
                    f"rollout_matching.vllm.server.servers[{index}].group_port: port"
                    f" {receivers.port} of {self.host} cannot be opened ({error.strerror}); choose"
                    " a free one, or end what uses it"
                ) from error
            self._listening.append(listening)
            port = listening.getsockname()[1]
            groups.append(ProcessGroupSpec(self.host, port, world_size, uuid.uuid4().hex))
        self._groups = tuple(groups)

    def _open(self, terms: FullOffer) -> GlooSender | NcclSender:
        assert self._listening, "send follows its offer"
        # The groups take over the sockets: nobody else can have bound the ports.
        listening = self._listening
        self._listening = []
        make = NcclSender if self._transport is TransportKind.NCCL else GlooSender
        return make(terms, listening)

    def _result(self, work: Future[T], phase: SyncPhase, began: float, limit: Timeout) -> T:
        """Wait for a phase that began then, by `perf_counter`, within its limit."""
        try:
            return work.result(timeout=_left_s(began, limit))
        except Exception as error:
            num_receivers = sum(group.num_workers for group in self.receivers)
            addresses = ", ".join(f"{group.host}:{group.port}" for group in self._groups)
            check = f"that every rollout engine is alive and reaches {addresses}"
            message = f"{error}; check {check}"
            if isinstance(error, TimeoutError):
                message = late(f"{num_receivers} receivers", limit, check)
            raise WeightSyncError(message, actor=LEARNER, phase=phase) from error


def _left_s(began: float, limit: Timeout) -> float:
    return max(0.0, began + limit.seconds + ENGINE_MARGIN_S - time.perf_counter())


def _raise_canary_error(logprobs: Future[Logprobs]) -> None:
    """Raise the learner's own canary failure; receivers only see a closed connection."""
    error = logprobs.exception()
    if error is None:
        return
    if isinstance(error, LearnerError):
        raise error
    message = f"its canary failed: {type(error).__name__}: {error}"
    raise LearnerError(message, phase=SyncPhase.CANARY) from error


def _in_thread(work: Callable[[], T], phase: SyncPhase) -> Future[T]:
    """Run the work in a daemon thread."""
    # A collective that waits for a peer cannot be interrupted. One that is late ends when `close`
    # or the end of the peer breaks the group.
    result: Future[T] = Future()
    threading.Thread(target=_run, args=(work, result), name=f"weight-{phase}", daemon=True).start()
    return result


def _run(work: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(work())
    except Exception as error:  # delivered to the waiting thread by the future
        result.set_exception(error)
