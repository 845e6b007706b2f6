"""Both ends cut the weights alike, and of two failures the one that says more is shown."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

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
    SendReport,
    SyncPhase,
    all_phases_s,
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


class Side:
    """A learner and the rollout actors in one, whose futures end as they are told; None: never."""

    offers_adapter = falls_back = False

    def __init__(
        self, sent: SendReport | Exception | None, received: SyncReport | Exception | None
    ) -> None:
        self._sent, self._received = sent, received
        self.num_done = self.num_settled = 0
        self.noise: Differences | None = None

    def offer_weights(self) -> WeightOffer:
        return WeightOffer(4, "rollmatch_gloo", TERMS, None)

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        return self._future(self._sent)

    def sync_done(self, noise: Differences | None) -> None:
        self.num_done += 1
        self.noise = noise

    def wait_idle(self) -> None:
        self.num_settled += 1

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        assert self.num_settled, "a sync begins when nothing is being generated"
        return self._future(self._received)

    @staticmethod
    def _future(end: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(end, Exception):
            future.set_exception(end)
        elif end is not None:
            future.set_result(end)
        return future


SENT = SendReport(phase_s={"send_rendezvous": 0.1, "send_wire": 0.2})
RECEIVED = SyncReport(version=4, bytes=320, phase_s={"wire": 0.3}, canary_max_abs=0.0)
RECEIVER_ERROR = WeightSyncError("no room", actor="actor-1", phase="wire")
SENDER_ERROR = WeightSyncError("connection closed", actor="learner", phase="wire")


def test_the_learner_is_told_the_noise_that_the_engines_have_measured() -> None:
    measured = Differences(0.004, 0.03)
    side = Side(SENT, replace(RECEIVED, canary_noise=measured))
    sync_weights(side, side)
    assert side.noise == measured


ADAPTER = AdapterOffer.make(AdapterFiles(b"tensors", "{}"), timeout_s=0.05)


class AdapterSide(Side):
    """The same with a learner that offers its adapter; `trouble` is how that ends."""

    def __init__(self, trouble: SyncReport | Exception, *, falls_back: bool = True) -> None:
        super().__init__(SENT, RECEIVED)
        self._trouble = trouble
        self.offers_adapter = True
        self.falls_back = falls_back

    def offer_weights(self) -> WeightOffer:
        return (
            WeightOffer(4, TransportKind.ADAPTER, ADAPTER, None)
            if self.offers_adapter
            else super().offer_weights()
        )

    def fall_back_to_full(self) -> None:
        self.offers_adapter = False

    def send_weights(self, offer: WeightOffer) -> Future[SendReport]:
        return self._future(SendReport(phase_s={}) if offer.sends_adapter else SENT)

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        return self._future(self._trouble if offer.sends_adapter else RECEIVED)


def test_an_adapter_sync_that_succeeds_is_all_there_is() -> None:
    side = AdapterSide(replace(RECEIVED, mode="adapter"))
    report = sync_weights(side, side)
    assert (report.mode, report.fell_back, report.version, side.num_done) == ("adapter", None, 4, 1)


TROUBLES = [RECEIVER_ERROR, KeyError("lora_A"), LearnerError("out of memory", phase="send_weights")]


@pytest.mark.parametrize("trouble", TROUBLES, ids=["sync error", "key error", "learner error"])
def test_an_adapter_sync_that_fails_in_any_way_is_followed_by_full_ones_and_says_why(
    trouble: Any,
) -> None:
    side = AdapterSide(trouble)
    report = sync_weights(side, side)
    assert (report.mode, report.version, side.num_done) == ("full", 4, 1)
    assert report.fell_back is not None
    assert str(trouble) in report.fell_back
    again = sync_weights(side, side)
    assert (again.mode, again.fell_back) == ("full", None)


@pytest.mark.parametrize("trouble", TROUBLES[:2], ids=["sync error", "key error"])
def test_without_fallback_it_ends_the_run_with_what_failed_and_the_key_to_change(
    trouble: Any,
) -> None:
    side = AdapterSide(trouble, falls_back=False)
    with pytest.raises(
        WeightSyncError,
        match=r"of the adapter: .*set rollout_matching.vllm.sync.fallback_to_full: true",
    ) as caught:
        sync_weights(side, side)
    assert caught.value.__cause__ is trouble
    assert ("no room" if trouble is RECEIVER_ERROR else "KeyError: 'lora_A'") in str(caught.value)
    assert side.num_done == 0


def test_without_fallback_a_learner_that_fails_is_told_as_such_and_not_as_an_adapter() -> None:
    side = AdapterSide(TROUBLES[2], falls_back=False)
    with pytest.raises(LearnerError, match="out of memory"):
        sync_weights(side, side)


def test_a_learner_whose_canary_fails_has_no_better_one_for_full_weights() -> None:
    side = AdapterSide(LearnerError("the weights have diverged", phase="canary"))
    with pytest.raises(LearnerError, match="diverged"):
        sync_weights(side, side)
    assert side.offers_adapter


@pytest.mark.parametrize("falls_back", [True, False])
def test_a_learner_that_cannot_even_offer_its_adapter_is_an_adapter_sync_that_fails(
    falls_back: bool,
) -> None:
    class Unwritable(AdapterSide):
        def offer_weights(self) -> WeightOffer:
            if self.offers_adapter:
                raise WeightSyncError("no such layer", actor="learner", phase="offer")
            return super().offer_weights()

    side = Unwritable(RECEIVED, falls_back=falls_back)
    if falls_back:
        assert "offer on learner: no such layer" in str(sync_weights(side, side).fell_back)
    else:
        with pytest.raises(
            WeightSyncError,
            match=r"offer on learner: of the adapter: no such layer; set .*fallback_to_full",
        ):
            sync_weights(side, side)


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
    told = WeightOffer(1, "rollmatch_gloo", TERMS, None).for_group(1).terms
    assert (told.group, told.tensors) == (GROUPS[1], TENSORS)


def make_weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(tensor.name, torch.randn(tensor.shape, generator=generator)) for tensor in TENSORS]


def test_behind_the_weights_come_their_checksums_one_for_each_bucket() -> None:
    weights = make_weights()
    sealed = list(ChecksummedWeights(weights, TERMS))
    assert (
        [name for name, _ in sealed]
        == [tensor.name for tensor in TERMS.sent]
        == ["t0", "t1", "t2", "t3", "t4", CHECKSUMS]
    )
    expected = []
    for tensors in (weights[:2], weights[2:]):
        checksum = BucketChecksum()
        for _, tensor in tensors:
            checksum.add(tensor)
        expected.append(checksum.value())
    assert sealed[-1][1].view(torch.int64).tolist() == expected
    assert sealed[-1][1].dtype == torch.uint8
    assert TERMS.sent[-1] == TensorSpec(CHECKSUMS, "uint8", (16,), 16)


def test_weights_other_than_the_offered_ones_are_not_sent() -> None:
    with pytest.raises(AssertionError, match="offered t0"):
        list(ChecksummedWeights(make_weights()[::-1], TERMS))


def test_a_report_holds_both_sides_seconds() -> None:
    side = Side(SENT, RECEIVED)
    report = sync_weights(side, side)
    assert side.num_done == 1, "the learner ranks are told that the version is served"
    assert (report.version, report.phase_s) == (
        4,
        {"wire": 0.3, "send_rendezvous": 0.1, "send_wire": 0.2},
    )
    assert report.total_s == 0.3, "the sender's seconds run beside the receivers'"


def test_when_both_fail_the_receivers_error_is_raised_from_the_senders() -> None:
    with pytest.raises(WeightSyncError, match="no room") as caught:
        sync_weights(*[Side(SENDER_ERROR, RECEIVER_ERROR)] * 2)
    assert caught.value.__cause__ is SENDER_ERROR


def test_of_a_learner_that_fails_by_itself_the_receivers_know_only_that_it_left() -> None:
    diverged = LearnerError("the weights have diverged", phase="canary")
    with pytest.raises(LearnerError, match="diverged") as caught:
        sync_weights(*[Side(diverged, RECEIVER_ERROR)] * 2)
    assert caught.value.__cause__ is RECEIVER_ERROR


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "received", "told"),
    [
        (
            None,
            RECEIVED,
            (
                r"wire on learner: no answer from the learner after the limits of all phases"
                r" \(timeouts\.sync_phase_s\)"
            ),
        ),
        (
            SENT,
            None,
            (
                r"wire on rollout engines: no answer from the rollout engines after the limits of"
                r" all phases \(timeouts\.sync_phase_s\)"
            ),
        ),
    ],
    ids=["learner", "engines"],
)
def test_a_side_that_never_ends_is_waited_for_no_longer_than_all_phases_may_take(
    sent: Any, received: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of which the whole sync has one for each phase
    monkeypatch.setattr("shared.weight_sync.phases.SYNC_MARGIN_S", 0.0)
    side, ended = Side(sent, received), Future[None]()

    def in_a_thread() -> None:
        try:
            sync_weights(side, side)
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=in_a_thread, daemon=True).start()
    with pytest.raises(WeightSyncError, match=told):
        ended.result(timeout=60)  # which only ends a test that hangs
    assert side.num_done == 0


@pytest.mark.parametrize("join_s", [None, 0.2, 240.0])
@pytest.mark.parametrize("timeout_s", [0.1, 60.0, 3600.0])
def test_the_innermost_limit_ends_first(timeout_s: float, join_s: float | None) -> None:
    assert ENGINE_MARGIN_S < CLIENT_MARGIN_S < POOL_MARGIN_S
    join = None if join_s is None else Timeout(join_s, "rollout_matching.vllm.server.timeout_s")
    offer = WeightOffer(1, "rollmatch_gloo", replace(TERMS, timeout_s=timeout_s, join=join), None)
    assert phase_limit(offer, SyncPhase.RENDEZVOUS) == (
        join or Timeout(timeout_s, "timeouts.sync_phase_s")
    )
    of_a_pool = sum(phase_limit(offer, phase).seconds + POOL_MARGIN_S for phase in SyncPhase)
    of_the_sender = (
        phase_limit(offer, SyncPhase.RENDEZVOUS).seconds + timeout_s + 2 * ENGINE_MARGIN_S
    )
    assert of_the_sender < sender_s(offer)
    # A backend beside the learner joins nothing.
    assert max(of_a_pool, sender_s(offer), 0.0 if join else all_phases_s(timeout_s)) < whole_sync_s(
        offer
    )


@pytest.mark.parametrize(
    ("sent", "received", "shown"),
    [(SENDER_ERROR, RECEIVED, "connection closed"), (SENT, RECEIVER_ERROR, "no room")],
)
def test_the_only_failure_is_raised(sent: Any, received: Any, shown: str) -> None:
    side = Side(sent, received)
    with pytest.raises(WeightSyncError, match=shown):
        sync_weights(side, side)
    assert side.num_done == 0, "nobody takes a version for served that is not"


def test_the_rate_is_bytes_over_the_wires_seconds() -> None:
    assert RECEIVED.wire_gb_per_s == pytest.approx(320 / 0.3 / 1e9)
    assert SyncReport(version=1, bytes=0, phase_s={}, canary_max_abs=0.0).wire_gb_per_s is None
