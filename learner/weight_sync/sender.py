"""The learner's side of a weight sync that sends full weights (decision 38).

vllm is imported only when an NCCL group is opened: the learner's step does not need it.
"""

from __future__ import annotations

import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from queue import Empty, Full, Queue
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
from shared.weight_sync.transports import WIRES, TransportKind

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

T = TypeVar("T")


class NcclSender:
    """Sends weights from the learner's GPU to the engines' GPUs, through NCCL and vLLM's packing.

    NCCL has no timeout: if a broadcast is late, `WeightSender` closes the groups. A receiver that
    hangs in a broadcast stays there until its process ends. Not tested on a GPU.
    """

    def __init__(self, terms: FullOffer, listening: list[socket.socket]) -> None:
        """Open the process group of every receiver group of the offer `terms`, as its rank 0.

        The sockets `listening` hold the offered ports, one per group.
        """
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
            if communicator.disabled:  # its broadcasts would silently do nothing
                raise RuntimeError(
                    f"vLLM has no NCCL library for the group at {group.host}:{group.port}, or NCCL"
                    " is disabled; set VLLM_NCCL_SO_PATH to the library"
                )
            self._communicators.append(communicator)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: FullOffer) -> None:
        """Send every tensor to all receiver groups, and return when all tensors are sent.

        `tensors` are in the order of the offer `terms`.
        """
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
        """Close the process groups. Receivers that wait for tensors get a closed connection."""
        for communicator in self._communicators:
            communicator.destroy()
        self._communicators = []


class _BroadcastToAll:
    """Several communicators used as one, so that each bucket of weights is packed only once.

    Not tested on a GPU.
    """

    def __init__(self, communicators: list[PyNcclCommunicator]) -> None:
        self._communicators = communicators

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        # One after the other: concurrent NCCL kernels of one process can deadlock.
        for communicator in self._communicators:
            communicator.broadcast(tensor, src=src)


class _Handover:
    """Passes tensors from the thread that makes them to the thread that sends them, one by one.

    Not tested on a GPU.
    """

    def __init__(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._waiting: Queue[tuple[str, torch.Tensor] | None] = Queue(maxsize=1)
        self._has_ended = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, in the thread that sends them. `end` ends its waits."""
        while (item := self._waiting.get()) is not None:
            _, tensor = item
            if tensor.is_cuda:
                # Its memory must not be reused before this thread's stream has read it.
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            yield item

    def pass_on(self, until: float) -> None:
        """Make the tensors and pass them on, until `end` is called.

        `until` is the latest time at which a tensor is passed on (`time.perf_counter`).
        """
        for item in self._tensors:
            _, tensor = item
            if tensor.is_cuda:
                # The sender packs on other streams.
                torch.cuda.current_stream(tensor.device).synchronize()
            with suppress(Full):
                self._waiting.put(item, timeout=max(0.0, until - time.perf_counter()))
                if not self._has_ended:
                    continue
            return

    def end(self) -> None:
        """Pass on no more tensors. A sender that waits for one gets an error."""
        self._has_ended = True
        with suppress(Empty):
            self._waiting.get_nowait()
        with suppress(Full):
            self._waiting.put_nowait(None)

    def make_rest(self) -> None:
        """Make the remaining tensors, for which other ranks wait, and pass none on."""
        self.end()
        for _ in self._tensors:
            pass


@dataclass(eq=False, repr=False)
class WeightSender:
    """Sends the learner's full weights to the engines, in every weight sync of a run.

    It holds a listening socket per receiver group from the first offer to the first send, and then
    the open process groups. After a failure it opens new ones. It is not thread-safe: only one
    weight sync at a time.
    """

    source: WeightSource
    _: KW_ONLY
    transport: str
    receivers: tuple[ReceiverGroup, ...]
    """The engine workers that receive the weights, by process group."""
    timeout_s: float
    """Limit of each phase of a weight sync, in seconds."""
    join: Timeout | None = None
    """Limit of the phase in which receivers join the process groups; None: `timeout_s`."""
    host: str = "127.0.0.1"
    """Address of this node that the receivers can reach."""
    bucket_bytes: int = 16 << 20
    is_collective: bool = False
    """Whether `source` makes tensors together with other ranks (`Parallel.help_to_send`).

    Then `send` makes all of them in its caller's thread, also if it fails.
    """
    _listening: list[socket.socket] = field(init=False, default_factory=list)
    _groups: tuple[ProcessGroupSpec, ...] = field(init=False, default=())
    _wire: GlooSender | NcclSender | None = field(init=False, default=None)
    _score: Callable[[], Logprobs] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._transport = TransportKind(self.transport)
        # Without a wire (ipc, inproc), a backend in this process reads the weights directly.
        self._has_wire = self._transport in WIRES
        self._limit = Timeout(self.timeout_s, PHASE_LIMIT)

    def offer(
        self, version: int, probe: CanaryProbe, score: Callable[[], Logprobs] | None = None
    ) -> WeightOffer:
        """Return what engines need to receive the weights: tensor names, ports and the canary.

        The weights must not change before the sync ends. `score` computes the log-probabilities
        that `probe` lacks. With gloo or NCCL it runs during `send`, while the engines load the
        weights. With other transports it runs in this method.

        Raises:
            ConfigError: a configured port is in use.
            WeightSyncError: no port can be opened.
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
        """Send the offered weights to the engines, which verify them afterwards.

        If an engine in this process reads the weights directly, nothing is sent. Raises
        WeightSyncError, and LearnerError if the learner's canary fails.
        """
        if not self._has_wire or not isinstance(offer.terms, FullOffer):
            return SendReport(phase_s={})
        terms = offer.terms
        handover: _Handover | None = None
        if self.is_collective:
            assert not terms.num_logprobs, "the canary's forward is a collective too"
            handover = _Handover(self.source.tensors())
        try:
            started = time.perf_counter()
            if self._wire is None:
                opening = _in_thread(lambda: self._open(terms), SyncPhase.RENDEZVOUS)
                self._wire = self._result(opening, SyncPhase.RENDEZVOUS, started, terms.join_limit)
            joined = time.perf_counter()
            logprobs: Future[Logprobs] = Future()
            wire = self._wire
            tensors = self.source.tensors() if handover is None else handover
            checksummed = self.outgoing(terms, logprobs.result, tensors)
            sending = _in_thread(lambda: wire.send(checksummed, terms), SyncPhase.WIRE)
            # Concurrent with the packing here and the loading in the engines.
            _run(self._score or tuple, logprobs)
            scored = time.perf_counter()
            if handover is not None:
                end = handover.end
                sending.add_done_callback(lambda _: end())
                handover.pass_on(joined + self._limit.seconds)
            # Wait even if the canary failed: the sending thread ends by itself when it reads the
            # log-probabilities, and its group must not be closed before that.
            wait([sending], timeout=_left_s(joined, self._limit))
            _raise_canary_error(logprobs)
            if scored - joined > self._limit.seconds:
                raise WeightSyncError(
                    f"the learner's canary took {scored - joined:.1f} s, but {PHASE_LIMIT} ="
                    f" {self._limit.seconds:g} s limits the whole transfer; raise this limit",
                    actor=LEARNER,
                    phase=SyncPhase.CANARY,
                )
            self._result(sending, SyncPhase.WIRE, joined, self._limit)
            wire_s = time.perf_counter() - joined - checksummed.gather_s - checksummed.verify_s
        except (WeightSyncError, LearnerError):
            self.close()
            raise
        finally:
            if handover is not None:
                handover.make_rest()
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
        self,
        terms: FullOffer,
        logprobs: Callable[[], Sequence[float]],
        tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> ChecksummedWeights:
        """Return the weights with their checksums, in the form in which they are sent.

        Args:
            logprobs: returns the canary's log-probabilities as soon as they are computed.
            tensors: those of `source`.
        """
        return ChecksummedWeights(tensors, terms, logprobs)

    def close(self) -> None:
        """Close the process groups, for example if the receivers change.

        The next offer opens new ones.
        """
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
                        f"no port of {self.host}, this node's address in Ray, can be opened"
                        f" ({error.strerror}); if the node has another address (`hostname -I`),"
                        " start Ray with `ray start --node-ip-address=ADDRESS`",
                        actor=LEARNER,
                        phase=OFFER,
                    ) from error
                raise ConfigError(
                    f"rollout_matching.vllm.server.servers[{index}].group_port: port"
                    f" {receivers.port} of {self.host} cannot be opened ({error.strerror}); choose"
                    " a free port, or end the process that uses it"
                ) from error
            self._listening.append(listening)
            port = listening.getsockname()[1]
            groups.append(ProcessGroupSpec(self.host, port, world_size, uuid.uuid4().hex))
        self._groups = tuple(groups)

    def _open(self, terms: FullOffer) -> GlooSender | NcclSender:
        assert self._listening, "call `offer` before `send`"
        # The groups take over the sockets, so no other process can have bound the ports.
        listening = self._listening
        self._listening = []
        make = NcclSender if self._transport is TransportKind.NCCL else GlooSender
        return make(terms, listening)

    def _result(self, work: Future[T], phase: SyncPhase, began: float, limit: Timeout) -> T:
        """Wait at most `limit` for the `work` of a phase, and return its result.

        `began` is the time at which the phase began (`time.perf_counter`).
        """
        try:
            return work.result(timeout=_left_s(began, limit))
        except Exception as error:
            num_receivers = sum(group.num_workers for group in self.receivers)
            addresses = ", ".join(f"{group.host}:{group.port}" for group in self._groups)
            check = f"that every rollout engine is alive and can reach {addresses}"
            message = f"{error}; check {check}"
            if isinstance(error, TimeoutError):
                message = late(f"{num_receivers} receivers", limit, check)
            raise WeightSyncError(message, actor=LEARNER, phase=phase) from error


def _left_s(began: float, limit: Timeout) -> float:
    return max(0.0, began + limit.seconds + ENGINE_MARGIN_S - time.perf_counter())


def _raise_canary_error(logprobs: Future[Logprobs]) -> None:
    """Raise the learner's own canary failure. Receivers only get a closed connection."""
    error = logprobs.exception()
    if error is None:
        return
    if isinstance(error, LearnerError):
        raise error
    message = f"the canary failed: {type(error).__name__}: {error}"
    raise LearnerError(message, phase=SyncPhase.CANARY) from error


def _in_thread(work: Callable[[], T], phase: SyncPhase) -> Future[T]:
    # A collective that waits for a receiver cannot be interrupted. A late one ends when `close` or
    # the receiver's end breaks the group.
    result: Future[T] = Future()
    threading.Thread(target=_run, args=(work, result), name=f"weight-{phase}", daemon=True).start()
    return result


def _run(work: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(work())
    except Exception as error:  # the future raises it in the waiting thread
        result.set_exception(error)
