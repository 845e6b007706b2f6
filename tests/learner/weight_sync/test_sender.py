"""The sender offers what it will send, gives up in time, and begins afresh after a failure."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from config_support import configuration
from torch import nn

from learner.model.checkpoint import CheckpointWeights, WeightSource
from learner.model.ranks import RankTopology, ReceiverGroup
from learner.weight_sync.publisher import make_sender as make_configured_sender
from learner.weight_sync.sender import WeightSender
from shared.errors import ConfigError, LearnerError, Timeout, WeightSyncError
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.gloo import GlooReceiver, GlooSender, address_towards
from shared.weight_sync.offer import CANARY as CANARY_TENSOR
from shared.weight_sync.offer import CHECKSUMS, FullOffer, ProcessGroupSpec, TensorSpec, offsets
from shared.weight_sync.shared_memory import NAME, this_machine
from shared.weight_sync.transports import TransportKind

FOLDER = Path("/dev/shm")
PROBE = CanaryProbe((1, 2, 3), (), (1, 2, 3), (-0.1, -2.5), tolerance=1e-4)
QUESTION = replace(PROBE, expected_logprobs=None)


def score() -> tuple[float, ...]:
    return (-0.1, -2.5)


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3, dtype=torch.bfloat16)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def make_sender(
    *receivers: ReceiverGroup,
    source: WeightSource | None = None,
    timeout_s: float = 0.5,
    **settings: Any,
) -> WeightSender:
    """Over gloo, to one receiver unless said otherwise; of a small model."""
    return WeightSender(
        source or CheckpointWeights(TiedModel()),
        **{"transport": "rollmatch_gloo", "bucket_bytes": 10, **settings},
        receivers=receivers or (ReceiverGroup(1),),
        timeout_s=timeout_s,
    )


def test_an_offer_names_every_parameter_once_with_its_size() -> None:
    sender = make_sender()
    terms = sender.offer(3, QUESTION, score).terms
    assert [
        (tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in terms.tensors
    ] == [
        ("embedding.weight", "float32", (7, 3), 84),
        ("norm.weight", "bfloat16", (3,), 6),
        ("norm.bias", "bfloat16", (3,), 6),
    ]
    assert (terms.num_bytes, terms.group.world_size) == (96, 2)
    assert [spec.shape for spec in terms.sent[-2:]] == [(2 * 8,), (2 * 8,)], (
        "behind the weights: a checksum for each bucket, and the canary's numbers"
    )
    sender.close()


class Counted:
    """A source that tells how often its tensors were made."""

    def __init__(self, model: nn.Module) -> None:
        self._full = CheckpointWeights(model)
        self.passes = 0

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        return self._full.specs()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        return self._full.tensors()


def test_an_offer_computes_nothing_of_the_weights() -> None:
    source = Counted(TiedModel())
    sender = make_sender(source=source)
    sender.offer(1, QUESTION, score)
    assert source.passes == 0
    sender.close()


def test_a_port_is_bound_before_it_is_offered_and_kept_for_the_next_offer() -> None:
    sender = make_sender()
    first, second = (
        sender.offer(1, QUESTION, score).terms.group,
        sender.offer(2, QUESTION, score).terms.group,
    )
    assert first == second
    with pytest.raises(OSError, match="in use"):
        socket.create_server((first.host, first.port))
    sender.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_each_group_of_receivers_has_its_port_and_opens_the_configured_one_again_under_another_key() -> (
    None
):
    port = free_port()
    sender = make_sender(ReceiverGroup(2, port), ReceiverGroup(1))
    terms = sender.offer(1, QUESTION, score).terms
    assert [group.world_size for group in terms.groups] == [3, 2]
    assert terms.groups[0].port == port != terms.groups[1].port
    sender.close()
    again = sender.offer(2, QUESTION, score).terms.groups[0]
    assert (again.port, again.key == terms.groups[0].key) == (port, False)
    sender.close()


def test_a_configured_port_that_is_taken_is_an_error_with_port_and_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sender = make_sender(ReceiverGroup(1), ReceiverGroup(1, port))
        with pytest.raises(
            ConfigError,
            match=(
                rf"rollout_matching\.vllm\.server\.servers\[1\]\.group_port: port {port} of"
                r" 127.0.0.1 cannot be opened"
            ),
        ):
            sender.offer(1, QUESTION, score)
    assert sender.offer(1, QUESTION, score).terms.groups[1].port == port, "free again"
    sender.close()


def elsewhere() -> tuple[int, ...]:
    """What a receiver on another machine says of it."""
    return (0,) * len(this_machine())


def mappings() -> int:
    """Of weights, in this process, which is both ends."""
    return Path("/proc/self/maps").read_text().count(NAME)


def join(
    group: ProcessGroupSpec,
    rank: int,
    timeout_s: float,
    *,
    join_s: float | None = None,
    is_elsewhere: bool = False,
) -> GlooReceiver:
    opened = {"machine": elsewhere} if is_elsewhere else {}
    limits = {"join_s": timeout_s if join_s is None else join_s, "timeout_s": timeout_s}
    return GlooReceiver(
        group.host, group.port, rank=rank, world_size=group.world_size, **limits, **opened
    )


def receive(
    joined: GlooReceiver, terms: FullOffer, num_buckets: int | None = None
) -> dict[str, torch.Tensor]:
    """What an engine's transport does, without an engine."""
    tensors = {}
    for bucket, packed in itertools.islice(
        joined.receive(terms.sent, terms.bucket_bytes), num_buckets
    ):
        *starts, _ = offsets(bucket)
        for spec, start in zip(bucket, starts, strict=True):
            tensors[spec.name] = (
                packed[start : start + spec.num_bytes]
                .view(torch.__dict__[spec.dtype])
                .view(spec.shape)
                .clone()
            )
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize(
    "remote",
    [set(), {2}, {1, 3}],
    ids=["all on this machine", "one elsewhere", "one of each group elsewhere"],
)
def test_every_receiver_of_every_group_gets_the_weights_and_their_checksums_again_and_again(
    remote: set[int],
) -> None:
    model = TiedModel()
    sender = make_sender(
        ReceiverGroup(2), ReceiverGroup(1), source=CheckpointWeights(model), timeout_s=20.0
    )
    places = {1: (0, 1), 2: (0, 2), 3: (1, 1)}
    joined: dict[int, GlooReceiver] = {}

    def take(who: int, terms: FullOffer) -> dict[str, torch.Tensor]:
        group, rank = places[who]
        if who not in joined:
            joined[who] = join(terms.groups[group], rank, 20.0, is_elsewhere=who in remote)
        return receive(joined[who], terms)

    with ThreadPoolExecutor(len(places)) as threads:
        for version in (1, 2, 3):
            if version == 3:  # over new groups, as after a change of receivers
                sender.close()
                joined.clear()
            with torch.no_grad():
                model.norm.bias += 1
            offer = sender.offer(version, QUESTION, score)
            terms = offer.terms
            arriving = [threads.submit(take, who, terms) for who in places]
            report = sender.send(offer)
            # By the prefix a report's total leaves them out: they run beside the receivers' phases.
            assert set(report.phase_s) == {
                "send_gather",
                "send_rendezvous",
                "send_wire",
                "send_verify",
                "send_canary",
            }
            expected = dict(ChecksummedWeights(CheckpointWeights(model).tensors(), terms, score))
            for arrived in arriving:
                tensors = arrived.result(timeout=20)
                assert list(tensors) == list(expected)
                assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
            # The group of 2 receivers, the group of 1, and the sender.
            assert mappings() == (2 * (not remote & {1, 2}) + (3 not in remote)) + (
                remote != {1, 3}
            )
    sender.close()
    for group in joined.values():
        group.close()
    assert mappings() == 0


@pytest.mark.slow
def test_a_sender_that_waits_for_its_receivers_holds_nothing_that_a_kill_would_leave_behind() -> (
    None
):
    before = set(FOLDER.iterdir())
    sender = make_sender(timeout_s=2.0)
    offer = sender.offer(1, QUESTION, score)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send, offer)
        while not sending.done():
            assert mappings() == 0
            assert not {path for path in set(FOLDER.iterdir()) - before if NAME in path.name}
            time.sleep(0.1)
    assert isinstance(sending.exception(), WeightSyncError)


@pytest.mark.slow
def test_a_group_that_has_formed_is_left_where_another_does_not_form() -> None:
    sender = make_sender(ReceiverGroup(1), ReceiverGroup(1), timeout_s=2.0)
    offer = sender.offer(1, QUESTION, score)
    terms = offer.terms
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, terms.groups[0], 1, 20.0)
        with pytest.raises(WeightSyncError, match="rendezvous on learner") as failed:
            sender.send(offer)
        joined = joining.result(timeout=60)
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            receive(joined, terms)
        assert time.monotonic() - started < 10, (
            f"it is told at once, while the error is still there: {failed.value}"
        )
        joined.close()
    assert mappings() == 0


def listening() -> set[tuple[str, int]]:
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_both_ends_of_a_group_listen_where_the_other_reaches_them_whatever_the_hosts_name_says() -> (
    None
):
    """Where the name is 127.0.1.1, as Debian has it, gloo by itself would publish that, which is
    another machine on every other node.
    """
    bound = socket.create_server(("127.0.0.2", 0))
    before = listening()
    group = ProcessGroupSpec("127.0.0.2", bound.getsockname()[1], world_size=2, key="a")
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, group, 1, 20.0)
        wire = GlooSender(
            FullOffer(
                (group,),
                timeout_s=20.0,
                bucket_bytes=10,
                tensors=(TensorSpec("t", "uint8", (4,), 4),),
            ),
            [bound],
        )
        joined = joining.result(timeout=20)
    opened = listening() - before
    assert {address for address, _ in opened} == {
        "127.0.0.2",
        address_towards("127.0.0.2", group.port),
    }
    wire.close()
    joined.close()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_after_the_joining_either_end_waits_for_the_other_no_longer_than_in_any_phase(
    who: str,
) -> None:
    bound = socket.create_server(("127.0.0.1", 0))
    group = ProcessGroupSpec("127.0.0.1", bound.getsockname()[1], world_size=2, key="a")
    tensor = TensorSpec("t", "uint8", (4,), 4)
    terms = FullOffer(
        (group,), timeout_s=0.1, bucket_bytes=10, tensors=(tensor,), join=Timeout(3600.0, "a key")
    )
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, group, 1, 0.1, join_s=3600.0)
        wire = GlooSender(terms, [bound])
        joined = joining.result(timeout=20)
    weights = [(spec.name, torch.zeros(spec.shape, dtype=torch.uint8)) for spec in terms.sent]
    waits = {
        "sender": lambda: wire.send(weights, terms),
        "receiver": lambda: list(joined.receive(terms.sent, terms.bucket_bytes)),
    }
    with pytest.raises(RuntimeError, match="Timed out waiting 100ms"):
        waits[who]()
    wire.close()
    joined.close()


def test_the_address_towards_a_host_is_the_one_that_connections_to_it_leave_from() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        assert address_towards(*server.getsockname()) == connection.getsockname()[0]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_log_probabilities_that_the_offer_lacks_are_computed_while_the_engines_load_and_arrive_behind_the_weights(
    is_elsewhere: bool,
) -> None:
    sender = make_sender(timeout_s=20.0)
    arrived = threading.Event()

    def wait() -> tuple[float, ...]:
        assert arrived.wait(20), "the first buckets do not wait for this"
        return score()

    offer = sender.offer(1, QUESTION, wait)
    terms = offer.terms

    def take() -> dict[str, torch.Tensor]:
        joined = join(terms.group, 1, 20.0, is_elsewhere=is_elsewhere)
        tensors = {}
        for bucket, packed in joined.receive(terms.sent, terms.bucket_bytes):
            arrived.set()
            tensors |= {
                spec.name: packed[start : start + spec.num_bytes].clone()
                for spec, start in zip(bucket, offsets(bucket)[:-1], strict=True)
            }
        return tensors

    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(take)
        report = sender.send(offer)
        tensors = taking.result(timeout=20)
    assert list(tensors)[-2:] == [CHECKSUMS, CANARY_TENSOR]
    assert offer.canary.with_logprobs(tensors[CANARY_TENSOR].view(torch.float64).tolist()) == PROBE
    assert report.phase_s["send_canary"] > 0
    sender.close()


def test_a_canary_that_cannot_be_computed_ends_the_send_with_its_reason() -> None:
    def fail() -> tuple[float, ...]:
        raise RuntimeError("out of memory")

    sender = make_sender(timeout_s=5.0)
    offer = sender.offer(1, QUESTION, fail)
    terms = offer.terms
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(lambda: receive(join(terms.group, 1, 5.0), terms))
        with pytest.raises(
            LearnerError,
            match="canary on the learner: its canary failed: RuntimeError: out of memory",
        ):
            sender.send(offer)
        with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer"):
            receiving.result(timeout=60)


@pytest.mark.slow
def test_a_learner_that_scores_for_longer_than_the_phase_blames_itself_and_no_engine() -> None:
    sender = make_sender(timeout_s=2.0)

    def score_slowly() -> tuple[float, ...]:
        time.sleep(2.2)
        return score()

    offer = sender.offer(1, QUESTION, score_slowly)
    terms = offer.terms
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: receive(join(terms.group, 1, 5.0), terms))
        with pytest.raises(
            WeightSyncError,
            match=(
                r"canary on learner: the learner took [1-9]\d*\.\d s to score it, of"
                r" timeouts.sync_phase_s = 2 s"
            ),
        ):
            sender.send(offer)


@pytest.mark.slow
def test_a_configured_port_is_free_again_while_the_error_of_its_rendezvous_is_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sender = make_sender(ReceiverGroup(1, port), timeout_s=1.0)
    with pytest.raises(WeightSyncError, match="rendezvous on learner") as kept:
        sender.send(sender.offer(1, QUESTION, score))
    assert sender.offer(2, QUESTION, score).terms.group.port == port, kept.value
    sender.close()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_receiver_that_leaves_ends_the_send_for_every_group(is_elsewhere: bool) -> None:
    sender = make_sender(ReceiverGroup(1), ReceiverGroup(1), timeout_s=20.0)
    offer = sender.offer(1, QUESTION, score)
    terms = offer.terms
    with ThreadPoolExecutor(2) as threads:
        threads.submit(
            lambda: receive(join(terms.groups[0], 1, 20.0, is_elsewhere=is_elsewhere), terms, 1)
        )
        staying = threads.submit(
            lambda: receive(join(terms.groups[1], 1, 20.0, is_elsewhere=is_elsewhere), terms)
        )
        with pytest.raises(WeightSyncError, match="wire on learner") as failed:
            sender.send(offer)
        assert isinstance(staying.exception(timeout=15), RuntimeError), (
            f"it is told at once, while the error is still there: {failed.value}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("leaving", [1, 2, 3])
def test_a_receiver_that_leaves_ends_the_wait_of_its_whole_group_however_long_errors_are_kept(
    leaving: int, is_elsewhere: bool
) -> None:
    """Gloo's broadcast goes from receiver to receiver, so each that is told has to tell the
    next."""
    sender = make_sender(ReceiverGroup(3), timeout_s=60.0)
    offer = sender.offer(1, QUESTION, score)
    terms = offer.terms
    kept = []

    def take(rank: int) -> None:
        joined = join(terms.group, rank, 60.0, is_elsewhere=is_elsewhere)
        arriving = joined.receive(terms.sent, terms.bucket_bytes)
        kept.append(arriving)  # as a traceback does
        try:
            for _ in arriving:
                if rank == leaving:
                    raise ZeroDivisionError
        finally:
            joined.close()

    started = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        taking = [threads.submit(take, rank) for rank in (1, 2, 3)]
        with pytest.raises(WeightSyncError, match="wire on learner") as failed:
            sender.send(offer)
        errors = [type(future.exception(timeout=60)) for future in taking]
    assert time.monotonic() - started < 30, "nobody waited for the timeout"
    assert errors == [
        ZeroDivisionError if rank == leaving else RuntimeError for rank in (1, 2, 3)
    ], failed.value


def test_within_one_process_there_is_nothing_to_open_or_to_send() -> None:
    sender = make_sender(transport="inproc")
    offer = sender.offer(1, QUESTION, score)
    assert (
        offer.transport,
        offer.terms.groups,
        offer.canary,
        sender.send(offer).phase_s,
    ) == ("inproc", (), PROBE, {})


@pytest.mark.slow
def test_a_receiver_that_does_not_come_ends_the_send_in_time_and_the_next_offer_has_a_new_port() -> (
    None
):
    sender = make_sender()
    offer = sender.offer(1, QUESTION, score)
    started = time.monotonic()
    with pytest.raises(
        WeightSyncError, match=r"rendezvous on learner.*check that every rollout engine is alive"
    ) as caught:
        sender.send(offer)
    assert time.monotonic() - started < 10
    assert (caught.value.actor, caught.value.phase) == ("learner", "rendezvous")
    again, before = sender.offer(2, QUESTION, score).terms.group, offer.terms.group
    assert (again.port != before.port, again.key != before.key) == (True, True)
    sender.close()


def test_the_joining_of_servers_has_a_limit_of_its_own() -> None:
    join = Timeout(0.05, "rollout_matching.vllm.server.timeout_s")
    sender = make_sender(timeout_s=3600.0, join=join)
    offer = sender.offer(1, QUESTION, score)
    assert (offer.terms.join, offer.terms.timeout_s) == (join, 3600.0)
    with pytest.raises(WeightSyncError, match="rendezvous on learner"):
        sender.send(offer)
    sender.close()


@pytest.mark.parametrize(
    ("transport", "given", "bucket_bytes"),
    [
        ("nccl", None, 256 << 20),
        ("ipc", None, 256 << 20),
        ("rollmatch_gloo", None, 16 << 20),
        ("inproc", None, 16 << 20),
        ("nccl", 1 << 20, 1 << 20),
    ],
)
def test_buckets_are_large_where_the_engines_loader_is_called_for_each(
    tmp_path: Path, transport: str, given: int | None, bucket_bytes: int
) -> None:
    config = configuration(
        tmp_path,
        tmp_path,
        tmp_path,
        rollout_matching__vllm={"mode": "actors", "sync": {"bucket_bytes": given}},
    )
    parts: Any = SimpleNamespace(weights=CheckpointWeights(TiedModel()))
    sender = make_configured_sender(config, RankTopology(TransportKind(transport), ()), parts)
    assert sender.offer(1, QUESTION, score).terms.bucket_bytes == bucket_bytes


def test_servers_are_waited_for_by_their_own_key(tmp_path: Path) -> None:
    server = {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 0}], "timeout_s": 7.0}
    config = configuration(
        tmp_path, tmp_path, tmp_path, rollout_matching__vllm={"mode": "server", "server": server}
    )
    parts: Any = SimpleNamespace(weights=CheckpointWeights(TiedModel()))
    sender = make_configured_sender(config, RankTopology(TransportKind.GLOO, ()), parts)
    assert sender.offer(1, QUESTION, score).terms.join == Timeout(
        7.0, "rollout_matching.vllm.server.timeout_s"
    )


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="'carrier_pigeon' is not a valid TransportKind"):
        make_sender(transport="carrier_pigeon")
