"""Both ends cut the weights alike, and of two failures the one that says more is shown."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout_actors.engine.ray_calls import PEER_ERROR_GRACE_S
from shared.errors import LearnerError, Timeout, WeightSyncError
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync.canary import Differences
from shared.weight_sync.checksum import BucketChecksum, ChecksummedWeights
from shared.weight_sync.offer import (
    CHECKSUMS,
    AdapterFiles,
    AdapterOffer,
    FullOffer,
    ProcessGroupSpec,
    TensorSpec,
    buckets,
    offsets,
)
from shared.weight_sync.phases import (
    CLIENT_MARGIN_S,
    ENGINE_MARGIN_S,
    POOL_MARGIN_S,
    RECEIVER_ERROR_S,
    SendReport,
    SyncPhase,
    phase_limit,
    sender_s,
    sync_weights,
    whole_sync_s,
)
from shared.weight_sync.transports import TransportKind

TENSORS = tuple(
    TensorSpec(f"t{i}", "float32", (size // 4,), size) for i, size in enumerate((4, 100, 8, 8, 200))
)
GROUPS = (
    ProcessGroupSpec("127.0.0.1", 1234, world_size=2, key="a"),
    ProcessGroupSpec("10.0.0.1", 5678, world_size=3, key="b"),
)
TERMS = FullOffer(GROUPS, timeout_s=0.05, bucket_bytes=100, tensors=TENSORS)
ADAPTER = AdapterOffer.make(AdapterFiles(b"tensors", "{}"), timeout_s=0.05)
SENT = SendReport(phase_s={"send_rendezvous": 0.1, "send_wire": 0.2})
RECEIVED = SyncReport(version=4, bytes=320, phase_s={"wire": 0.3}, canary_max_abs=0.0)
RECEIVER_ERROR = WeightSyncError("no room", actor="actor-1", phase="wire")
SENDER_ERROR = WeightSyncError("connection closed", actor="learner", phase="wire")
DIVERGED = LearnerError("the weights have diverged", phase="canary")
UNWRITABLE = WeightSyncError("no such layer", actor="learner", phase="offer")
OUT_OF_MEMORY = LearnerError("out of memory", phase="send_weights")


class Side:
    """A learner and the rollout actors in one, whose futures end as they are told; None: never.

    With `adapter` the learner offers an adapter first, and that is how it ends.
    """

    def __init__(
        self,
        sent: Any = SENT,
        received: Any = RECEIVED,
        *,
        adapter: Any = None,
        falls_back: bool = True,
    ) -> None:
        self._sent = sent
        self._received = received
        self._adapter = adapter
        self.offers_adapter = adapter is not None
        self.falls_back = falls_back
        self.num_done = 0
        self.is_idle = False
        self.noise: Differences | None = None

    replaces_lost = False

    def join_replacements(self) -> bool:
        return False

    def replace_named(self, error: WeightSyncError) -> bool:
        raise AssertionError("nobody is replaced")

    def leave_groups(self) -> None:
        raise AssertionError("the groups are whole")

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        if not self.offers_adapter:
            return WeightOffer(4, "rollmatch_gloo", TERMS, None)
        if self._adapter is UNWRITABLE:
            raise UNWRITABLE
        return WeightOffer(4, TransportKind.ADAPTER, ADAPTER, None)

    def fall_back_to_full(self) -> None:
        self.offers_adapter = False

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        return self._future(SendReport(phase_s={}) if offer.sends_adapter else self._sent)

    def sync_done(self, noise: Differences | None) -> None:
        self.num_done += 1
        self.noise = noise

    def wait_idle(self) -> None:
        self.is_idle = True

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        assert self.is_idle, "a sync begins when nothing is being generated"
        return self._future(self._adapter if offer.sends_adapter else self._received)

    @staticmethod
    def _future(end: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(end, Exception):
            future.set_exception(end)
        elif end is not None:
            future.set_result(end)
        return future


def test_a_report_holds_both_sides_seconds_and_the_learner_is_told_the_noise_that_was_measured() -> (
    None
):
    measured = Differences(0.004, 0.03)
    side = Side(received=replace(RECEIVED, canary_noise=measured))
    report = sync_weights(side, side)
    assert (side.num_done, side.noise) == (1, measured)
    assert report.version == 4
    assert report.ports == tuple(group.port for group in GROUPS)
    assert report.phase_s == {"wire": 0.3, "send_rendezvous": 0.1, "send_wire": 0.2}
    assert report.total_s == 0.3, "the sender's seconds run beside the receivers'"


def test_an_adapter_sync_that_succeeds_is_all_there_is() -> None:
    side = Side(adapter=replace(RECEIVED, mode="adapter"))
    report = sync_weights(side, side)
    assert (report.mode, report.fell_back, report.version, side.num_done) == ("adapter", None, 4, 1)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (RECEIVER_ERROR, "wire on actor-1: no room"),
        (KeyError("lora_A"), "KeyError: 'lora_A'"),
        (OUT_OF_MEMORY, "out of memory"),
        (UNWRITABLE, "offer on learner: no such layer"),
    ],
    ids=["sync error", "key error", "learner error", "no offer"],
)
def test_an_adapter_sync_that_fails_in_any_way_is_followed_by_full_ones_and_says_why(
    trouble: Exception, reason: str
) -> None:
    side = Side(adapter=trouble)
    report = sync_weights(side, side)
    assert (report.mode, report.version, side.num_done) == ("full", 4, 1)
    assert report.fell_back is not None and reason in report.fell_back
    again = sync_weights(side, side)
    assert (again.mode, again.fell_back) == ("full", None)


class Mending(Side):
    """Its engines are replaced; one sync after the other fails as told, until there is none left.

    `log`: what was done about it.
    """

    replaces_lost = True

    def __init__(self, *troubles: Exception, ended: Sequence[int] = (), **options: Any) -> None:
        """`ended`: of these failures, an engine's end was the cause; 0: before the first sync."""
        super().__init__(**options)
        self._troubles = list(troubles)
        self._ended = ended
        self._num_failed = 0
        self.log: list[str] = []

    def join_replacements(self) -> bool:
        has_new = self._num_failed in self._ended
        if has_new:
            self._ended = [number for number in self._ended if number != self._num_failed]
            self.log.append("replaced the ended")
        return has_new

    def replace_named(self, error: WeightSyncError) -> bool:
        self.log.append(f"replaced {error.actor}")
        return error.actor != "learner"

    def leave_groups(self) -> None:
        self.log.append("left")

    def offer_weights(self, *, again: bool = False) -> WeightOffer:
        self.log.append("offered again" if again else "offered")
        return super().offer_weights()

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        if self._troubles:
            self._num_failed += 1
            return self._future(self._troubles.pop(0))
        return super().receive_weights(offer)


def test_engines_that_ended_are_replaced_before_a_sync_and_join_a_new_group() -> None:
    side = Mending(ended=[0])
    sync_weights(side, side, again=True)
    assert side.log == ["replaced the ended", "left", "offered again"]


def test_a_sync_that_an_engines_end_broke_is_tried_again_with_a_new_engine() -> None:
    side = Mending(RECEIVER_ERROR, RECEIVER_ERROR, RECEIVER_ERROR, ended=[1, 2, 3])
    assert sync_weights(side, side).version == 4
    assert side.log == ["offered", *["replaced the ended", "left", "offered"] * 3]
    assert side.num_done == 1


def test_a_sync_that_fails_without_an_end_is_tried_on_a_new_group_then_with_a_new_engine_then_no_more() -> (
    None
):
    side = Mending(RECEIVER_ERROR, RECEIVER_ERROR)
    sync_weights(side, side)
    assert side.log == ["offered", "left", "offered", "replaced actor-1", "left", "offered"]
    side = Mending(*[RECEIVER_ERROR] * 3)
    with pytest.raises(WeightSyncError) as caught:
        sync_weights(side, side)
    assert caught.value is RECEIVER_ERROR
    assert side.log.count("offered") == 3
    side = Mending(SENDER_ERROR, SENDER_ERROR)
    with pytest.raises(WeightSyncError, match="connection closed"):
        sync_weights(side, side)
    assert side.log.count("offered") == 2, "the learner is no engine"


@pytest.mark.parametrize(
    "trouble",
    [WeightSyncError("no", actor="actor-1", phase="verify", quantity="q"), DIVERGED],
    ids=["a difference", "the learner's own"],
)
def test_a_difference_and_the_learners_own_failure_are_not_tried_again(trouble: Exception) -> None:
    side = Mending(trouble)
    with pytest.raises(type(trouble)) as caught:
        sync_weights(side, side)
    assert caught.value is trouble
    assert side.log == ["offered"]


def test_an_adapter_sync_is_tried_again_with_a_new_engine_and_else_full_weights_follow() -> None:
    adapted = replace(RECEIVED, mode="adapter")
    side = Mending(RECEIVER_ERROR, ended=[1], adapter=adapted)
    assert sync_weights(side, side).mode == "adapter"
    side = Mending(RECEIVER_ERROR, RECEIVER_ERROR, adapter=adapted)
    report = sync_weights(side, side)
    assert (report.mode, side.log) == ("full", ["offered", "offered", "left", "offered"])
    assert report.fell_back == str(RECEIVER_ERROR)


KEY = r"; set rollout_matching.vllm.sync.fallback_to_full: true"


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (RECEIVER_ERROR, f"wire on actor-1: adapter sync failed: no room{KEY}"),
        (KeyError("lora_A"), f"adapter sync failed: KeyError: 'lora_A'{KEY}"),
        (UNWRITABLE, f"offer on learner: adapter sync failed: no such layer{KEY}"),
    ],
    ids=["sync error", "key error", "no offer"],
)
def test_without_fallback_it_ends_the_run_with_what_failed_and_the_key_to_change(
    trouble: Exception, told: str
) -> None:
    side = Side(adapter=trouble, falls_back=False)
    with pytest.raises(WeightSyncError, match=told) as caught:
        sync_weights(side, side)
    assert caught.value.__cause__ is trouble
    assert side.num_done == 0


@pytest.mark.parametrize(
    ("trouble", "falls_back"),
    [(OUT_OF_MEMORY, False), (DIVERGED, True)],
    ids=["without fallback", "its canary, of which full weights have no better one"],
)
def test_a_learner_that_fails_is_told_as_such_and_not_as_an_adapter(
    trouble: Exception, falls_back: bool
) -> None:
    side = Side(adapter=trouble, falls_back=falls_back)
    with pytest.raises(LearnerError) as caught:
        sync_weights(side, side)
    assert caught.value is trouble
    assert side.offers_adapter


@pytest.mark.parametrize(
    ("sent", "received", "shown", "cause"),
    [
        (SENDER_ERROR, RECEIVED, SENDER_ERROR, None),
        (SENT, RECEIVER_ERROR, RECEIVER_ERROR, None),
        (SENDER_ERROR, RECEIVER_ERROR, RECEIVER_ERROR, SENDER_ERROR),
        (DIVERGED, RECEIVER_ERROR, DIVERGED, RECEIVER_ERROR),
    ],
    ids=["the only one", "the only one here", "the receiver's", "the learner's own"],
)
def test_of_two_failures_the_one_that_knows_more_is_raised_from_the_other(
    sent: Any, received: Any, shown: Exception, cause: Exception | None
) -> None:
    """Receivers of a learner that fails by itself know only that it left."""
    side = Side(sent, received)
    with pytest.raises(type(shown)) as caught:
        sync_weights(side, side)
    assert caught.value is shown
    assert caught.value.__cause__ is cause
    assert side.num_done == 0, "nobody takes a version for served that is not"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "received", "who"),
    [(None, RECEIVED, "learner"), (SENT, None, "rollout engines")],
    ids=["learner", "engines"],
)
def test_a_side_that_never_ends_is_waited_for_no_longer_than_all_phases_may_take(
    sent: Any, received: Any, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of which the whole sync has one for each phase
    monkeypatch.setattr("shared.weight_sync.phases.SYNC_MARGIN_S", 0.0)
    side = Side(sent, received)
    ended = Future[None]()

    def in_a_thread() -> None:
        try:
            sync_weights(side, side)
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=in_a_thread, daemon=True).start()
    message = rf"wire on {who}: .*all phases \(timeouts\.sync_phase_s\)"
    with pytest.raises(WeightSyncError, match=message):
        ended.result(timeout=240)  # which only ends a test that hangs
    assert side.num_done == 0


@pytest.mark.parametrize("join_s", [None, 0.2, 240.0])
@pytest.mark.parametrize("timeout_s", [0.1, 60.0, 3600.0])
def test_the_innermost_limit_ends_first(timeout_s: float, join_s: float | None) -> None:
    assert ENGINE_MARGIN_S < CLIENT_MARGIN_S < POOL_MARGIN_S
    assert PEER_ERROR_GRACE_S < RECEIVER_ERROR_S
    join = None if join_s is None else Timeout(join_s, "rollout_matching.vllm.server.timeout_s")
    offer = WeightOffer(1, "rollmatch_gloo", replace(TERMS, timeout_s=timeout_s, join=join), None)
    joining = phase_limit(offer, SyncPhase.RENDEZVOUS)
    assert joining == (join or Timeout(timeout_s, "timeouts.sync_phase_s"))
    of_a_pool = sum(phase_limit(offer, phase).seconds + POOL_MARGIN_S for phase in SyncPhase)
    # A backend beside the learner joins nothing.
    of_a_backend = 0.0 if join else len(SyncPhase) * timeout_s
    assert joining.seconds + timeout_s + 2 * ENGINE_MARGIN_S < sender_s(offer)
    assert max(of_a_pool, sender_s(offer), of_a_backend) < whole_sync_s(offer)


def test_a_bucket_is_closed_by_the_tensor_that_takes_it_past_its_size() -> None:
    assert [[tensor.name for tensor in bucket] for bucket in buckets(TENSORS, 100)] == [
        ["t0", "t1"],
        ["t2", "t3", "t4"],
    ]
    assert [len(bucket) for bucket in buckets(TENSORS, 0)] == [1, 1, 1, 1, 1]
    assert list(buckets((), 100)) == []


def test_tensors_of_a_bucket_begin_at_aligned_offsets_and_do_not_overlap() -> None:
    assert offsets(TENSORS) == [0, 16, 128, 144, 160, 368]


def test_a_receiver_is_told_of_its_own_group_alone() -> None:
    terms = WeightOffer(1, "rollmatch_gloo", TERMS, None).for_group(1).terms
    assert (terms.group, terms.tensors) == (GROUPS[1], TENSORS)


def make_weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(tensor.name, torch.randn(tensor.shape, generator=generator)) for tensor in TENSORS]


def test_behind_the_weights_come_their_checksums_one_for_each_bucket() -> None:
    weights = make_weights()
    sealed = list(ChecksummedWeights(weights, TERMS))
    assert TERMS.sent == (*TENSORS, TensorSpec(CHECKSUMS, "uint8", (16,), 16))
    assert [name for name, _ in sealed] == [tensor.name for tensor in TERMS.sent]
    expected = []
    for tensors in (weights[:2], weights[2:]):
        checksum = BucketChecksum()
        for _, tensor in tensors:
            checksum.add(tensor)
        expected.append(checksum.value())
    assert sealed[-1][1].view(torch.int64).tolist() == expected
    assert sealed[-1][1].dtype == torch.uint8


def test_weights_other_than_the_offered_ones_are_not_sent() -> None:
    with pytest.raises(AssertionError, match="offered t0"):
        list(ChecksummedWeights(make_weights()[::-1], TERMS))


def test_the_rate_is_bytes_over_the_wires_seconds() -> None:
    assert RECEIVED.wire_gb_per_s == pytest.approx(320 / 0.3 / 1e9)
    assert replace(RECEIVED, bytes=0, phase_s={}).wire_gb_per_s is None
