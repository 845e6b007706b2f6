"""A receiver before, during and after a sync, and its account of one, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from counted_time import counted
from fake_server import make_offer

from rollout_actors.weight_sync.receiver import (
    InitRequest,
    LoadReport,
    TransferGroup,
    UpdateRequest,
    WeightReceiver,
    check_load_reports,
)
from shared.errors import Timeout, WeightSyncError
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync.canary import CanaryProbe, Differences, Scores
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.phases import ENGINE_MARGIN_S, SyncPhase
from shared.weight_sync.transports import TransportKind

PROBE = CanaryProbe((1, 2), (), (1, 2, 7), (-0.5, -0.25), 1e-4)
REPORT = LoadReport([5], [5], [], [], load_s=30.0, verify_s=20.0, logprobs=[])
"""Seconds that nobody has waited for: what a slow machine adds is told from them."""


class FakeLLM:
    """An `UpdatedEngine` that does nothing. `trouble` is raised by its next update."""

    def __init__(self) -> None:
        self.trouble: Exception | None = None
        self.report = REPORT
        self.joined: list[dict[str, Any]] = []
        self.asked: list[str] = []

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def shutdown_weight_transfer_engine(self) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def finish_weight_update(self) -> None: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        return True

    async def init_weight_transfer_engine(self, request: InitRequest) -> None:
        self.joined.append(request.init_info)

    async def update_weights(self, request: UpdateRequest) -> None:
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            raise trouble

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append(method)
        return [asdict(self.report)] if method == "load_report" else [None]


class Engine:
    """An intake over such an engine."""

    def __init__(self, *, joins: bool = True) -> None:
        self.llm = FakeLLM()
        group = (
            TransferGroup(self.llm, transport=TransportKind.GLOO, rank_offset=3) if joins else None
        )
        self.intake = WeightReceiver("actor-0", self.llm, group, score=self.score, adapter=None)
        self.scored: Sequence[float] = (-0.5, -0.25)
        self.score_s = 0.0

    async def score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        await asyncio.sleep(self.score_s)
        return (1, 2, 7), self.scored

    def sync(self, offer: WeightOffer, handed: ChecksummedWeights | None = None) -> SyncReport:
        return asyncio.run(self.intake.run_all_phases(offer, handed))

    @property
    def served(self) -> tuple[int, str]:
        return self.intake.version, self.intake.unavailable_reason


def an_offer(version: int = 1, **terms: Any) -> WeightOffer:
    return replace(make_offer(version, **terms), canary=PROBE)


def test_from_the_first_phase_to_the_last_nothing_is_served_and_the_version_is_the_old_one() -> (
    None
):
    async def run() -> None:
        engine = Engine()
        assert engine.served == (0, "")
        for phase in list(SyncPhase)[:-1]:
            assert await engine.intake.run_phase(phase, an_offer(4)) is None
            assert engine.served == (0, "its sync to version 4 is under way, or was not completed")
        report = await engine.intake.run_phase(SyncPhase.CANARY, an_offer(4))
        assert report is not None
        assert (report.version, engine.served) == (4, (4, ""))

    asyncio.run(run())


def test_a_failed_sync_leaves_the_door_shut_until_one_is_completed_and_the_next_one_joins_again() -> (
    None
):
    engine = Engine()
    engine.sync(an_offer(1))
    engine.llm.trouble = ZeroDivisionError("told to fail")
    with pytest.raises(WeightSyncError, match="wire on actor-0: told to fail"):
        engine.sync(an_offer(2))
    assert engine.served == (1, "its sync to version 2 is under way, or was not completed")
    assert engine.llm.asked[-1] == "abandon_update"
    engine.sync(an_offer(3))
    engine.sync(an_offer(4))
    assert engine.served == (4, "")
    assert [info["rank_offset"] for info in engine.llm.joined] == [3, 3], (
        "once at the start, and once more after the failure"
    )


def test_a_sender_that_has_opened_its_group_anew_is_joined_anew_without_any_failure() -> None:
    engine = Engine()
    engine.sync(an_offer(1))
    engine.sync(an_offer(2))
    assert len(engine.llm.joined) == 1, "the group is kept from sync to sync"
    terms = an_offer(3).terms
    anew = replace(terms, groups=(replace(terms.group, key="opened again"),))
    engine.sync(replace(an_offer(3), terms=anew))
    assert len(engine.llm.joined) == 2


async def refuses() -> bool:
    return False


async def fails() -> bool:
    raise ZeroDivisionError("told to fail")


@pytest.mark.parametrize(
    ("cache", "reset", "told"),
    [
        ("prefix", refuses, "the prefix cache is in use"),
        ("prefix", fails, "told to fail"),
        ("mm", fails, "told to fail"),
        ("encoder", fails, "told to fail"),
    ],
)
def test_an_engine_that_keeps_what_a_cache_holds_of_the_old_weights_serves_nothing(
    cache: str, reset: Callable[[], Awaitable[bool]], told: str
) -> None:
    """Of the three, vLLM tells only of the prefix cache whether it was reset."""
    engine = Engine()
    setattr(engine.llm, f"reset_{cache}_cache", reset)
    with pytest.raises(WeightSyncError, match=f"reset on actor-0: {told}"):
        engine.sync(an_offer())
    assert engine.served == (0, "its sync to version 1 is under way, or was not completed")


def test_an_engine_that_is_stuck_in_a_phase_is_waited_for_as_long_as_the_offer_says_and_no_longer() -> (
    None
):
    """But for a margin, in which whoever is stuck with it may say more."""

    class Stuck(FakeLLM):
        async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
            await asyncio.sleep(3600)

    async def run() -> None:
        engine = Engine()
        engine.intake = WeightReceiver("actor-0", Stuck(), None, score=engine.score, adapter=None)
        with pytest.raises(
            WeightSyncError,
            match=r"pause on actor-0: no answer from the engine after timeouts\.sync_phase_s = 5 s",
        ):
            await engine.intake.run_all_phases(an_offer(timeout_s=5.0))
        assert engine.served == (0, "its sync to version 1 is under way, or was not completed")

    _, spent_s = counted(run())
    assert spent_s == pytest.approx(5.0 + ENGINE_MARGIN_S)


def test_servers_have_a_limit_of_their_own_for_joining_the_communicator() -> None:
    """Spec: `timeout_s` applies to communicator init. Shorter or longer than that of the other
    phases."""

    class Alone(FakeLLM):
        async def init_weight_transfer_engine(self, request: InitRequest) -> None:
            await asyncio.sleep(3600)

    async def run() -> None:
        engine = Engine()
        group = TransferGroup(Alone(), transport=TransportKind.GLOO, rank_offset=1)
        engine.intake = WeightReceiver(
            "server-0", engine.llm, group, score=engine.score, adapter=None
        )
        terms = replace(
            an_offer(timeout_s=5.0).terms,
            join=Timeout(240.0, "rollout_matching.vllm.server.timeout_s"),
        )
        told = (
            r"rendezvous on server-0: no answer from the engine after"
            r" rollout_matching\.vllm\.server\.timeout_s = 240 s"
        )
        with pytest.raises(WeightSyncError, match=told):
            await engine.intake.run_all_phases(replace(an_offer(), terms=terms))

    _, spent_s = counted(run())
    assert spent_s == pytest.approx(240.0 + ENGINE_MARGIN_S)


def test_an_adapter_is_no_longer_served_when_weights_arrive_into_which_it_is_merged() -> None:
    done: list[str] = []

    class Adapter:
        async def drop(self) -> None:
            done.append("drop")

    class Noting(FakeLLM):
        async def update_weights(self, request: UpdateRequest) -> None:
            done.append("update_weights")

    intake = WeightReceiver("actor-0", Noting(), None, score=Engine().score, adapter=Adapter())
    asyncio.run(intake.run_all_phases(an_offer()))
    assert done == ["drop", "update_weights"]


def test_the_door_that_a_later_sync_has_shut_is_not_opened_by_the_one_before_it() -> None:
    async def run() -> None:
        engine = Engine()
        for phase in list(SyncPhase)[:-1]:
            await engine.intake.run_phase(phase, an_offer(1))
        engine.score_s = 0.1
        first = asyncio.create_task(engine.intake.run_phase(SyncPhase.CANARY, an_offer(1)))
        await asyncio.sleep(0)
        await engine.intake.run_phase(SyncPhase.PAUSE, an_offer(2))
        assert (await first) is not None
        assert engine.served == (1, "its sync to version 2 is under way, or was not completed")

    asyncio.run(run())


def test_nothing_of_the_sync_before_is_reported_for_this_one() -> None:
    engine = Engine()
    engine.scored = (-0.5, -0.25005)
    assert engine.sync(an_offer(1)).canary_max_abs == pytest.approx(5e-5)
    engine.scored = PROBE.expected_logprobs or ()
    engine.llm.report = replace(REPORT, load_s=10.0)
    report = engine.sync(an_offer(2))
    assert (report.canary_max_abs, report.phase_s["load"]) == (0.0, pytest.approx(10.0, abs=2.0))


def test_the_time_of_an_update_is_taken_apart_by_the_workers_account() -> None:
    report = Engine().sync(an_offer())
    assert set(report.phase_s) == {*map(str, SyncPhase), "load"}
    told = {"wire": -50.0, "load": 30.0, "verify": 20.0}
    assert {phase: report.phase_s[phase] for phase in told} == pytest.approx(told, abs=2.0)
    assert report.bytes == 24


def test_from_hand_to_hand_the_senders_own_times_stand_for_the_wire_and_no_group_is_joined() -> (
    None
):
    engine, what = Engine(joins=False), an_offer()
    handed = ChecksummedWeights([], what.terms)
    handed.gather_s, handed.verify_s = 5.0, 100.0
    report = engine.sync(what, handed)
    assert set(report.phase_s) == {*map(str, SyncPhase), "gather", "load"} - {"wire"}
    assert (report.phase_s["gather"], report.phase_s["verify"]) == (
        5.0,
        pytest.approx(120.0, abs=2.0),
    )
    assert engine.llm.joined == []


def test_weights_over_another_transport_than_the_engines_are_refused() -> None:
    engine = Engine()
    with pytest.raises(
        WeightSyncError,
        match=(
            "pause on actor-0: the learner offers nccl, the engine was started for rollmatch_gloo"
        ),
    ):
        asyncio.run(
            engine.intake.run_phase(
                SyncPhase.PAUSE, replace(an_offer(), transport=TransportKind.NCCL)
            )
        )


IN_BFLOAT16 = replace(PROBE, tolerance=None)
NOISY = ((-0.52, -0.26), (-0.5, -0.25), (-0.54, -0.25))


class NoisyEngine(Engine):
    """It answers with the next of `NOISY` each time, and notes what it was asked before."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = list(NOISY)
        self.asked_before: list[list[str]] = []

    async def score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        self.asked_before.append(list(self.llm.asked))
        return (1, 2, 7), self.answers.pop(0)

    def sync_with(self, version: int, probe: CanaryProbe) -> SyncReport:
        return self.sync(replace(an_offer(version), canary=probe))


def test_noise_is_measured_once_before_the_first_weights_and_bounds_every_later_sync() -> None:
    engine = NoisyEngine()
    report = engine.sync_with(1, IN_BFLOAT16)
    assert report.canary_noise == Differences.from_values([0.52 - 0.5, 0.26 - 0.25])
    assert report.canary_mean_abs == 0.0
    before, after = engine.asked_before
    assert (before, "load_report" in after) == ([], True)
    report = engine.sync_with(2, IN_BFLOAT16)
    assert (report.canary_noise, report.canary_mean_abs) == (None, pytest.approx(0.02))
    assert len(engine.asked_before) == 3
    engine.answers = [(-0.6, -0.3)]
    with pytest.raises(WeightSyncError, match=r"on average by 0\.0750 \(0\.0450 is allowed\)"):
        engine.sync_with(3, IN_BFLOAT16)


@pytest.mark.parametrize(
    ("version", "probe"),
    [
        (1, replace(IN_BFLOAT16, noise=Differences(0.004, 0.02))),  # the run is resumed
        (7, IN_BFLOAT16),  # the engine was restarted: its checkpoint is not what the learner has
        (1, PROBE),  # float32
    ],
)
def test_noise_is_not_measured_where_it_is_known_or_would_be_more_than_noise(
    version: int, probe: CanaryProbe
) -> None:
    engine = NoisyEngine()
    engine.answers = [probe.expected_logprobs or ()]
    assert engine.sync_with(version, probe).canary_noise is None
    assert len(engine.asked_before) == 1


def test_the_noise_of_a_run_ends_with_it_on_a_server_that_goes_on() -> None:
    engine = NoisyEngine()
    engine.sync_with(1, IN_BFLOAT16)
    other_run = replace(IN_BFLOAT16, expected_logprobs=(-0.7, -0.25))
    engine.answers = [(-0.58, -0.25)]
    assert engine.sync_with(1, other_run).canary_mean_abs == pytest.approx(0.06)
    engine.answers = [(-0.58, -0.13)]
    with pytest.raises(WeightSyncError, match=r"\(0\.1000 is allowed\)"):
        engine.sync_with(2, replace(other_run, expected_logprobs=(-0.9, -0.25)))


def test_full_weights_in_place_of_the_first_sync_that_failed_are_held_to_the_usual_bounds() -> None:
    engine = NoisyEngine()
    engine.answers = [(-0.51, -0.25), (-0.9, -0.25), (-0.58, -0.25)]
    with pytest.raises(WeightSyncError, match=r"canary on actor-0: .*\(0\.0150 is allowed\)"):
        engine.sync_with(1, IN_BFLOAT16)
    report = engine.sync_with(1, IN_BFLOAT16)
    assert (report.canary_noise, report.canary_mean_abs) == (None, pytest.approx(0.04))


def test_the_noise_of_the_run_counts_and_not_the_engines_own() -> None:
    engine = NoisyEngine()
    engine.sync_with(1, IN_BFLOAT16)
    with pytest.raises(WeightSyncError, match=r"\(0\.0120 is allowed\)"):
        engine.sync_with(2, replace(IN_BFLOAT16, noise=Differences(0.004, 0.02)))


def test_what_a_server_with_other_weights_differs_by_before_the_first_sync_is_not_taken_for_noise() -> (
    None
):
    engine = NoisyEngine()
    engine.answers = [(-1.5, -0.25), (-0.5, -0.25), (-0.75, -0.25)]
    assert engine.sync_with(1, IN_BFLOAT16).canary_noise is None
    with pytest.raises(WeightSyncError, match=r"on average by 0\.1250 \(0\.1000 is allowed\)"):
        engine.sync_with(2, IN_BFLOAT16)


GOOD = LoadReport([1, 2], [1, 2], [], [], load_s=0.0, verify_s=0.0, logprobs=[])

BAD = [
    (
        {"checksums": [1, 3]},
        "buckets [1] of 2 did not arrive as they were sent",
        "bucket checksums",
        1,
    ),
    (
        {"checksums": [3, 2]},
        "buckets [0] of 2 did not arrive as they were sent",
        "bucket checksums",
        1,
    ),
    (
        {"checksums": [2, 1]},
        "buckets [0, 1] of 2 did not arrive as they were sent",
        "bucket checksums",
        2,
    ),
    ({"checksums": [1]}, "1 buckets arrived with 2 checksums", "number of buckets", None),
    ({"missing": ["a"]}, "not loaded: a", "set of loaded names", 1),
    ({"unexpected": ["b"]}, "not a parameter: b", "set of loaded names", 1),
    (
        {"missing": ["a", "c"], "unexpected": ["b", "d"]},
        "not loaded: a, not loaded: c, not a parameter: b, ...",
        "set of loaded names",
        4,
    ),
]


def test_workers_that_have_loaded_everything_as_it_was_sent_are_believed() -> None:
    check_load_reports([GOOD, GOOD], "actor-0")


@pytest.mark.parametrize("index", [0, 1], ids=["of the first worker", "of another worker"])
@pytest.mark.parametrize(
    ("changes", "told", "quantity", "size"), BAD, ids=[told for _, told, _, _ in BAD]
)
def test_an_account_that_is_not_as_it_should_be_is_an_error_that_names_what_differs(
    changes: dict[str, Any], told: str, quantity: str, size: int | None, index: int
) -> None:
    reports = [GOOD, GOOD]
    reports[index] = replace(GOOD, **changes)
    with pytest.raises(WeightSyncError) as caught:
        check_load_reports(reports, "actor-0")
    assert caught.value.message.startswith(told)
    assert (caught.value.actor, caught.value.phase, caught.value.quantity, caught.value.size) == (
        "actor-0",
        SyncPhase.VERIFY,
        quantity,
        size,
    )
