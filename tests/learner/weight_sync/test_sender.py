"""The sender offers what it will send, gives up in time, and begins afresh after a failure."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from config_support import configuration
from torch import nn

from learner.model.checkpoint import CheckpointWeights
from learner.model.ranks import RankTopology, ReceiverGroup
from learner.weight_sync.publisher import make_sender as make_configured_sender
from learner.weight_sync.sender import WeightSender
from shared.errors import ConfigError, LearnerError, Timeout, WeightSyncError
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.gloo import GlooReceiver, GlooSender, address_towards
from shared.weight_sync.offer import CANARY as CANARY_TENSOR
from shared.weight_sync.offer import CHECKSUMS, FullOffer, ProcessGroupSpec, TensorSpec, offsets
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.shared_memory import NAME, this_machine
from shared.weight_sync.transports import TransportKind

FOLDER = Path("/dev/shm")
SERVER_LIMIT = "rollout_matching.vllm.server.timeout_s"
PROBE = CanaryProbe((1, 2, 3), (), (1, 2, 3), (-0.1, -2.5), tolerance=1e-4)
QUESTION = replace(PROBE, expected_logprobs=None)
LIMIT_S = 60.0
"""Of waits that end before it, also on a busy machine."""
CUT_OFF = "closed by peer|reset by peer|Broken pipe"
"""What gloo says if the other end has left, and not if a limit is over."""
Machine = Callable[[], tuple[int, ...]]
Tensors = dict[str, torch.Tensor]


def score() -> tuple[float, ...]:
    return (-0.1, -2.5)


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3, dtype=torch.bfloat16)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


class Counted(CheckpointWeights):
    """Counts how often its tensors were made."""

    passes = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        return super().tensors()


MakeSender = Callable[..., WeightSender]


@pytest.fixture
def make_sender() -> Iterator[MakeSender]:
    """Senders of a small model over gloo, to one receiver unless named otherwise."""
    senders = []

    def make(*receivers: ReceiverGroup, source: Any = None, **settings: Any) -> WeightSender:
        sender = WeightSender(
            source or CheckpointWeights(TiedModel()),
            receivers=receivers or (ReceiverGroup(1),),
            **{"transport": "rollmatch_gloo", "bucket_bytes": 10, "timeout_s": LIMIT_S, **settings},
        )
        senders.append(sender)
        return sender

    yield make
    for sender in senders:
        sender.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def elsewhere() -> tuple[int, ...]:
    """Name the machine as a receiver on another one does."""
    return (0,) * len(this_machine())


def mappings() -> int:
    """Count the mappings of weights in this process, which is both ends."""
    return Path("/proc/self/maps").read_text().count(NAME)


def join(
    group: ProcessGroupSpec,
    rank: int,
    timeout_s: float = LIMIT_S,
    *,
    join_s: float = LIMIT_S,
    machine: Machine = this_machine,
) -> GlooReceiver:
    return GlooReceiver(
        group.host,
        group.port,
        rank=rank,
        world_size=group.world_size,
        join_s=join_s,
        timeout_s=timeout_s,
        machine=machine,
    )


def arriving(joined: GlooReceiver, terms: FullOffer) -> Iterator[tuple[str, torch.Tensor]]:
    """Do what an engine's transport does, without an engine."""
    for bucket, packed in joined.receive(terms.sent, terms.bucket_bytes):
        for spec, start in zip(bucket, offsets(bucket)[:-1], strict=True):
            values = packed[start : start + spec.num_bytes].view(torch.__dict__[spec.dtype])
            yield spec.name, values.view(spec.shape).clone()


def receive(terms: FullOffer) -> Tensors:
    return dict(arriving(join(terms.group, 1), terms))


def test_an_offer_names_every_parameter_once_with_its_size_and_computes_nothing_of_the_weights(
    make_sender: MakeSender,
) -> None:
    source = Counted(TiedModel())
    terms = make_sender(source=source).offer(3, QUESTION, score).terms
    assert terms.tensors == (
        TensorSpec("embedding.weight", "float32", (7, 3), 84),
        TensorSpec("norm.weight", "bfloat16", (3,), 6),
        TensorSpec("norm.bias", "bfloat16", (3,), 6),
    )
    assert (terms.num_bytes, terms.group.world_size, source.passes) == (96, 2, 0)
    assert [spec.shape for spec in terms.sent[-2:]] == [(2 * 8,), (2 * 8,)], (
        "behind the weights: a checksum for each bucket, and the canary's numbers"
    )


def test_each_group_has_its_port_bound_from_its_offer_on_and_opens_the_configured_one_again_under_another_key(
    make_sender: MakeSender,
) -> None:
    port = free_port()
    sender = make_sender(ReceiverGroup(2, port), ReceiverGroup(1))
    groups = sender.offer(1, QUESTION, score).terms.groups
    assert [group.world_size for group in groups] == [3, 2]
    assert groups[0].port == port != groups[1].port
    assert sender.offer(2, QUESTION, score).terms.groups == groups
    for group in groups:
        with pytest.raises(OSError, match="in use"):
            socket.create_server((group.host, group.port))
    sender.close()
    again = sender.offer(3, QUESTION, score).terms.groups[0]
    assert (again.port, again.key == groups[0].key) == (port, False)


def test_a_configured_port_that_is_taken_is_an_error_with_port_and_key(
    make_sender: MakeSender,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sender = make_sender(ReceiverGroup(1), ReceiverGroup(1, port))
        key = r"rollout_matching\.vllm\.server\.servers\[1\]\.group_port"
        with pytest.raises(ConfigError, match=rf"{key}: port {port} of 127\.0\.0\.1 "):
            sender.offer(1, QUESTION, score)
    assert sender.offer(1, QUESTION, score).terms.groups[1].port == port, "free again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "remote",
    [set(), {2}, {1, 3}],
    ids=["all on this machine", "one elsewhere", "one of each group elsewhere"],
)
def test_every_receiver_of_every_group_gets_the_weights_and_their_checksums_again_and_again(
    make_sender: MakeSender, remote: set[int]
) -> None:
    model = TiedModel()
    source = CheckpointWeights(model)
    sender = make_sender(ReceiverGroup(2), ReceiverGroup(1), source=source)
    positions = {1: (0, 1), 2: (0, 2), 3: (1, 1)}  # group and rank in it
    joined: dict[int, GlooReceiver] = {}
    sharing = [group for group in ({1, 2}, {3}) if not group & remote]
    num_mappings = sum(map(len, sharing)) + bool(sharing)  # theirs, and the sender's

    def take(who: int, terms: FullOffer) -> Tensors:
        group, rank = positions[who]
        if who not in joined:
            machine = elsewhere if who in remote else this_machine
            joined[who] = join(terms.groups[group], rank, machine=machine)
        return dict(arriving(joined[who], terms))

    with ThreadPoolExecutor(len(positions)) as threads:
        for version in (1, 2, 3):
            if version == 3:  # over new groups, as after a change of receivers
                sender.close()
                joined.clear()
            with torch.no_grad():
                model.norm.bias += 1
            offer = sender.offer(version, QUESTION, score)
            taking = [threads.submit(take, who, offer.terms) for who in positions]
            report = sender.send(offer)
            # By the prefix a report's total leaves them out: they run beside the receivers' phases.
            steps = ("gather", "rendezvous", "wire", "verify", "canary")
            assert set(report.phase_s) == {f"send_{step}" for step in steps}
            expected = dict(ChecksummedWeights(source.tensors(), offer.terms, score))
            for taken in taking:
                tensors = taken.result(timeout=LIMIT_S)
                assert list(tensors) == list(expected)
                assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
            assert mappings() == num_mappings
    sender.close()
    for member in joined.values():
        member.close()
    assert mappings() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timeout_s", "joining", "is_configured"),
    [(0.5, None, False), (0.5, None, True), (3600.0, Timeout(0.05, SERVER_LIMIT), False)],
    ids=["within a phase's limit", "at a configured port", "within the servers' own limit"],
)
def test_a_receiver_that_does_not_come_ends_the_send_in_time_and_leaves_neither_port_nor_memory(
    make_sender: MakeSender, timeout_s: float, joining: Timeout | None, is_configured: bool
) -> None:
    named = set(FOLDER.iterdir())
    group = ReceiverGroup(1, free_port() if is_configured else 0)
    sender = make_sender(group, timeout_s=timeout_s, join=joining)
    offer = sender.offer(1, QUESTION, score)
    assert (offer.terms.join, offer.terms.timeout_s) == (joining, timeout_s)
    end_s = time.monotonic() + LIMIT_S
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send, offer)
        while not sending.done():
            assert mappings() == 0
            assert not {path for path in set(FOLDER.iterdir()) - named if NAME in path.name}
            assert time.monotonic() < end_s, "it waits for longer than its limit"
            time.sleep(0.05)
    for thread in threading.enumerate():
        if thread.name == f"weight-{SyncPhase.RENDEZVOUS}":
            thread.join(LIMIT_S)  # on a busy machine it closes its port after the send has ended
    kept = sending.exception()  # whose traceback must not hold the port
    assert isinstance(kept, WeightSyncError)
    assert (kept.actor, kept.phase) == ("learner", "rendezvous")
    assert re.search("check that every rollout engine is alive", str(kept))
    again = sender.offer(2, QUESTION, score).terms.group
    assert (again.port == offer.terms.group.port) == is_configured
    assert again.key != offer.terms.group.key


@pytest.mark.slow
def test_a_group_that_has_formed_is_left_where_another_does_not_form(
    make_sender: MakeSender,
) -> None:
    def leave() -> tuple[int, ...]:
        raise ZeroDivisionError

    sender = make_sender(ReceiverGroup(1), ReceiverGroup(1))
    offer = sender.offer(1, QUESTION, score)
    formed, unformed = offer.terms.groups
    with ThreadPoolExecutor(2) as threads:
        joining = threads.submit(join, formed, 1)
        leaving = threads.submit(join, unformed, 1, machine=leave)
        with pytest.raises(WeightSyncError, match="rendezvous on learner") as failed:
            sender.send(offer)
        assert isinstance(leaving.exception(timeout=LIMIT_S), ZeroDivisionError)
        joined = joining.result(timeout=LIMIT_S)
        with pytest.raises(RuntimeError, match=CUT_OFF):
            list(arriving(joined, offer.terms))
        del failed  # kept until here: the group is left although the traceback still exists
        joined.close()
    assert mappings() == 0


@contextmanager
def connected(
    host: str, timeout_s: float, join_s: float
) -> Iterator[tuple[GlooSender, GlooReceiver, FullOffer]]:
    """Both ends of a group of two, and what they agree on."""
    bound = socket.create_server((host, 0))
    group = ProcessGroupSpec(host, bound.getsockname()[1], world_size=2, key="a")
    tensor = TensorSpec("t", "uint8", (4,), 4)
    terms = FullOffer((group,), timeout_s, 10, (tensor,), join=Timeout(join_s, "a key"))
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, group, 1, timeout_s, join_s=join_s)
        wire = GlooSender(terms, [bound])
        joined = joining.result(timeout=LIMIT_S)
    yield wire, joined, terms
    wire.close()
    joined.close()


def listening() -> set[str]:
    return {
        f"{connection.laddr.ip}:{connection.laddr.port}"
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_both_ends_of_a_group_listen_where_the_other_reaches_them_whatever_the_hosts_name_says() -> (
    None
):
    """Where the name is 127.0.1.1, as Debian has it, gloo by itself would publish that, which is
    another machine on every other node.
    """
    before = listening()
    with connected("127.0.0.2", 20.0, 20.0) as (_, _, terms):
        opened = {address.rpartition(":")[0] for address in listening() - before}
        assert opened == {"127.0.0.2", address_towards("127.0.0.2", terms.group.port)}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_after_the_joining_either_end_waits_for_the_other_no_longer_than_in_any_phase(
    who: str,
) -> None:
    with connected("127.0.0.1", 0.1, 3600.0) as (wire, joined, terms):
        weights = [(spec.name, torch.zeros(spec.shape, dtype=torch.uint8)) for spec in terms.sent]
        waits = {
            "sender": lambda: wire.send(weights, terms),
            "receiver": lambda: list(arriving(joined, terms)),
        }
        with pytest.raises(RuntimeError, match="Timed out waiting 100ms"):
            waits[who]()


@pytest.mark.parametrize("machine", [this_machine, elsewhere])
def test_log_probabilities_that_the_offer_lacks_are_computed_while_the_engines_load_and_arrive_behind_the_weights(
    make_sender: MakeSender, machine: Machine
) -> None:
    arrived = threading.Event()

    def wait() -> tuple[float, ...]:
        assert arrived.wait(LIMIT_S), "the first buckets do not wait for this"
        return score()

    sender = make_sender(timeout_s=2 * LIMIT_S)
    offer = sender.offer(1, QUESTION, wait)

    def take() -> Tensors:
        tensors = {}
        joined = join(offer.terms.group, 1, 2 * LIMIT_S, machine=machine)
        for name, tensor in arriving(joined, offer.terms):
            arrived.set()
            tensors[name] = tensor
        return tensors

    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(take)
        report = sender.send(offer)
        tensors = taking.result(timeout=LIMIT_S)
    assert list(tensors)[-2:] == [CHECKSUMS, CANARY_TENSOR]
    assert offer.canary.with_logprobs(tensors[CANARY_TENSOR].view(torch.float64).tolist()) == PROBE
    assert report.phase_s["send_canary"] > 0


def test_a_canary_that_cannot_be_computed_ends_the_send_with_its_reason(
    make_sender: MakeSender,
) -> None:
    def fail() -> tuple[float, ...]:
        raise RuntimeError("out of memory")

    sender = make_sender()
    offer = sender.offer(1, QUESTION, fail)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive, offer.terms)
        with pytest.raises(LearnerError, match=r"canary .*learner: .*RuntimeError: out of memory"):
            sender.send(offer)
        with pytest.raises(RuntimeError, match=CUT_OFF):
            receiving.result(timeout=LIMIT_S)


@pytest.mark.slow
def test_a_learner_that_scores_for_longer_than_the_phase_blames_itself_and_no_engine(
    make_sender: MakeSender,
) -> None:
    def score_slowly() -> tuple[float, ...]:
        time.sleep(2.2)
        return score()

    sender = make_sender(timeout_s=2.0, join=Timeout(LIMIT_S, SERVER_LIMIT))
    offer = sender.offer(1, QUESTION, score_slowly)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(receive, offer.terms)
        message = r"canary on learner: .* [1-9]\d*\.\d s, .*timeouts\.sync_phase_s = 2 s"
        with pytest.raises(WeightSyncError, match=message):
            sender.send(offer)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [this_machine, elsewhere], ids=["here", "elsewhere"])
@pytest.mark.parametrize(
    ("sizes", "leaving"),
    [((1, 1), 0), ((3,), 0), ((3,), 1), ((3,), 2)],
    ids=["of another group", "first of its group", "second of its group", "last of its group"],
)
def test_a_receiver_that_leaves_ends_the_wait_of_all_however_long_errors_are_kept(
    make_sender: MakeSender, sizes: tuple[int, ...], leaving: int, machine: Machine
) -> None:
    """Gloo's broadcast goes from receiver to receiver, so each that is told has to tell the
    next."""
    sender = make_sender(*map(ReceiverGroup, sizes))
    offer = sender.offer(1, QUESTION, score)
    members = [
        (group, rank)
        for group, size in zip(offer.terms.groups, sizes, strict=True)
        for rank in range(1, size + 1)
    ]
    kept = []

    def take(index: int) -> None:
        group, rank = members[index]
        joined = join(group, rank, machine=machine)
        tensors = arriving(joined, offer.terms)
        kept.append(tensors)  # as a traceback does
        try:
            for _ in tensors:
                if index == leaving:
                    raise ZeroDivisionError
        finally:
            joined.close()

    with ThreadPoolExecutor(len(members)) as threads:
        taking = [threads.submit(take, index) for index in range(len(members))]
        with pytest.raises(WeightSyncError, match=rf"wire on learner: .*({CUT_OFF})") as failed:
            sender.send(offer)
        errors = [future.exception(timeout=2 * LIMIT_S) for future in taking]
    assert isinstance(errors.pop(leaving), ZeroDivisionError), failed.value
    for error in errors:
        assert re.search(CUT_OFF, str(error)), "nobody waited for the timeout"


def test_receivers_that_wait_for_a_lost_one_at_the_end_notice_it_before_any_of_them_leaves(
    make_sender: MakeSender,
) -> None:
    """With many receivers, a loss that goes from neighbour to neighbour takes seconds."""
    sender = make_sender(ReceiverGroup(3), timeout_s=2 * LIMIT_S)
    offer = sender.offer(1, QUESTION, score)
    noticed = threading.Barrier(2)

    def take(rank: int) -> None:
        joined = join(offer.terms.group, rank, 2 * LIMIT_S)
        tensors = arriving(joined, offer.terms)
        try:
            for _ in islice(tensors, len(offer.terms.sent) if rank == 3 else None):
                pass
        except RuntimeError:
            noticed.wait(timeout=LIMIT_S)
        finally:
            joined.close()

    with ThreadPoolExecutor(3) as threads:
        taking = [threads.submit(take, rank) for rank in (1, 2, 3)]
        with pytest.raises(WeightSyncError, match="wire on learner"):
            sender.send(offer)
        for future in taking:
            future.result(timeout=2 * LIMIT_S)


def test_within_one_process_there_is_nothing_to_open_or_to_send(make_sender: MakeSender) -> None:
    sender = make_sender(transport="inproc")
    offer = sender.offer(1, QUESTION, score)
    assert (offer.transport, offer.terms.groups, offer.canary) == ("inproc", (), PROBE)
    assert sender.send(offer).phase_s == {}


SERVER = {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 0}], "timeout_s": 7.0}


@pytest.mark.parametrize(
    ("transport", "vllm", "bucket_bytes", "joining"),
    [
        ("nccl", {"mode": "actors"}, 256 << 20, None),
        ("ipc", {"mode": "actors"}, 256 << 20, None),
        ("rollmatch_gloo", {"mode": "actors"}, 16 << 20, None),
        ("inproc", {"mode": "actors"}, 16 << 20, None),
        ("nccl", {"mode": "actors", "sync": {"bucket_bytes": 1 << 20}}, 1 << 20, None),
        (
            "rollmatch_gloo",
            {"mode": "server", "server": SERVER},
            16 << 20,
            Timeout(7.0, SERVER_LIMIT),
        ),
    ],
)
def test_buckets_are_large_where_the_engines_loader_is_called_for_each_and_servers_have_a_limit_of_their_own(
    tmp_path: Path,
    transport: str,
    vllm: dict[str, Any],
    bucket_bytes: int,
    joining: Timeout | None,
) -> None:
    config = configuration(tmp_path, tmp_path, tmp_path, rollout_matching__vllm=vllm)
    place = RankTopology(TransportKind(transport), ())
    weights = CheckpointWeights(TiedModel())
    sender = make_configured_sender(weights, place, config.rollout_matching, 1.0)
    terms = sender.offer(1, QUESTION, score).terms
    assert (terms.bucket_bytes, terms.join) == (bucket_bytes, joining)


def test_the_address_towards_a_host_is_the_one_that_connections_to_it_leave_from() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        assert address_towards(*server.getsockname()) == connection.getsockname()[0]
