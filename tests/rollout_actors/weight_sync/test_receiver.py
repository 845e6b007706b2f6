"""A receiver before, during and after a sync, and its account of one, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
from counted_time import counted
from fake_server import make_offer
from idle_llm import IdleLLM

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
from shared.weight_sync.offer import FullOffer
from shared.weight_sync.phases import ENGINE_MARGIN_S, SyncPhase
from shared.weight_sync.transports import TransportKind

PROBE = CanaryProbe((1, 2), (), (1, 2, 7), (-0.5, -0.25), 1e-4)
REPORT = LoadReport([5], [5], [], [], load_s=3e6, verify_s=2e6, logprobs=[])
"""Seconds that nobody has waited for: what a slow machine adds is told from them."""
SLOW_S = 1e5
"""More than any machine adds."""


class NotingLLM(IdleLLM):
    """Raises `trouble` at its next update, and notes what its workers are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.trouble: Exception | None = None
        self.report = REPORT
        self.asked: list[str] = []

    async def update_weights(self, request: UpdateRequest) -> None:
        self.asked.append("update_weights")
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            raise trouble

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        self.asked.append(method)
        return [asdict(self.report)] if method == "load_report" else [None]


class Engine:
    """A receiver over such an engine, whose canary is answered with the next of `answers`."""

    def __init__(self, *answers: Sequence[float], joins: bool = True, adapter: Any = None) -> None:
        self.llm = NotingLLM()
        group = (
            TransferGroup(self.llm, transport=TransportKind.GLOO, rank_offset=3) if joins else None
        )
        self.intake = WeightReceiver("actor-0", self.llm, group, score=self.score, adapter=adapter)
        self.answers = list(answers)
        self.asked_before: list[list[str]] = []
        """What the workers were asked before each answer."""
        self.score_s = 0.0

    async def score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        await asyncio.sleep(self.score_s)
        self.asked_before.append(list(self.llm.asked))
        return (1, 2, 7), self.answers.pop(0) if self.answers else (-0.5, -0.25)

    def sync(self, offer: WeightOffer, handed: ChecksummedWeights | None = None) -> SyncReport:
        return asyncio.run(self.intake.run_all_phases(offer, handed))

    @property
    def served(self) -> tuple[int, str]:
        return self.intake.version, self.intake.unavailable_reason


def an_offer(version: int = 1, probe: CanaryProbe = PROBE, **terms: Any) -> WeightOffer:
    offer = make_offer(version)
    return replace(offer, canary=probe, terms=replace(offer.terms, **terms))


def under_way(version: int) -> str:
    return f"its sync to version {version} is running, or did not complete"


def test_from_the_first_phase_to_the_last_nothing_is_served_and_the_version_is_the_old_one() -> (
    None
):
    async def run() -> None:
        engine = Engine()
        assert engine.served == (0, "")
        for phase in list(SyncPhase)[:-1]:
            assert await engine.intake.run_phase(phase, an_offer(4)) is None
            assert engine.served == (0, under_way(4))
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
    assert engine.served == (1, under_way(2))
    assert engine.llm.asked[-1] == "abandon_update"
    engine.sync(an_offer(3))
    engine.sync(an_offer(4))
    assert engine.served == (4, "")
    assert [info["rank_offset"] for info in engine.llm.joined] == [3, 3], (
        "once at the start, and once more after the failure"
    )


def test_an_engine_that_cannot_join_says_which_address_it_has_to_reach() -> None:
    engine = Engine()

    async def refuses(request: InitRequest) -> None:
        raise RuntimeError("told to fail")

    engine.llm.init_weight_transfer_engine = refuses  # type: ignore[method-assign]
    offer = an_offer(1)
    assert isinstance(offer.terms, FullOffer)
    address = f"{offer.terms.group.host}:{offer.terms.group.port}"
    with pytest.raises(WeightSyncError, match=f"rendezvous on actor-0: told to fail; .*{address}"):
        engine.sync(offer)
    assert engine.served == (0, under_way(1))


def test_a_sender_that_has_opened_its_group_anew_is_joined_anew_without_any_failure() -> None:
    engine = Engine()
    engine.sync(an_offer(1))
    engine.sync(an_offer(2))
    assert len(engine.llm.joined) == 1, "the group is kept from sync to sync"
    group = replace(an_offer().terms.group, key="opened again")
    engine.sync(an_offer(3, groups=(group,)))
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
    assert engine.served == (0, under_way(1))


@pytest.mark.parametrize(
    ("method", "phase", "key", "limit_s"),
    [
        ("pause_generation", "pause", "timeouts.sync_phase_s", 5.0),
        (
            "init_weight_transfer_engine",
            "rendezvous",
            "rollout_matching.vllm.server.timeout_s",
            240.0,
        ),
    ],
    ids=["in any phase", "while servers join, for which they have a limit of their own"],
)
def test_an_engine_that_is_stuck_is_waited_for_as_long_as_the_offer_says_and_no_longer(
    method: str, phase: str, key: str, limit_s: float
) -> None:
    """But for a margin, in which whoever is stuck with it may say more."""

    async def stuck(*args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(3600)

    async def run() -> None:
        engine = Engine()
        setattr(engine.llm, method, stuck)
        join = Timeout(240.0, "rollout_matching.vllm.server.timeout_s")
        told = f"{phase} on actor-0: no answer from the engine after {key} = {limit_s:g} s"
        with pytest.raises(WeightSyncError, match=told):
            await engine.intake.run_all_phases(an_offer(timeout_s=5.0, join=join))
        assert engine.served == (0, under_way(1))

    _, spent_s = counted(run())
    assert spent_s == pytest.approx(limit_s + ENGINE_MARGIN_S)


def test_an_adapter_is_no_longer_served_when_weights_arrive_into_which_it_is_merged() -> None:
    class Adapter:
        async def drop(self) -> None:
            engine.llm.asked.append("drop")

    engine = Engine(joins=False, adapter=Adapter())
    engine.sync(an_offer())
    assert engine.llm.asked == ["drop", "begin_verified_load", "update_weights", "load_report"]


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
        assert engine.served == (1, under_way(2))

    asyncio.run(run())


def test_a_sync_is_reported_by_its_own_workers_account_which_takes_the_time_of_its_update_apart() -> (
    None
):
    engine = Engine((-0.5, -0.25005))
    report = engine.sync(an_offer(1))
    assert set(report.phase_s) == {*map(str, SyncPhase), "load"}
    parts = {"wire": -5e6, "load": 3e6, "verify": 2e6}
    assert {phase: report.phase_s[phase] for phase in parts} == pytest.approx(parts, abs=SLOW_S)
    assert (report.bytes, report.canary_max_abs) == (24, pytest.approx(5e-5))
    engine.llm.report = replace(REPORT, load_s=1e6)
    report = engine.sync(an_offer(2))
    assert (report.canary_max_abs, report.phase_s["load"]) == (0.0, pytest.approx(1e6, abs=SLOW_S))


def test_from_hand_to_hand_the_senders_own_times_stand_for_the_wire_and_no_group_is_joined() -> (
    None
):
    engine, offer = Engine(joins=False), an_offer()
    handed = ChecksummedWeights([], offer.terms)
    handed.gather_s = 5.0
    handed.verify_s = 1e7
    phase_s = engine.sync(offer, handed).phase_s
    assert set(phase_s) == {*map(str, SyncPhase), "gather", "load"} - {"wire"}
    assert (phase_s["gather"], phase_s["verify"]) == (5.0, pytest.approx(1.2e7, abs=SLOW_S))
    assert engine.llm.joined == []


def test_weights_over_another_transport_than_the_engines_are_refused() -> None:
    told = (
        "pause on actor-0: the learner offers nccl, but the engine was started for rollmatch_gloo"
    )
    with pytest.raises(WeightSyncError, match=told):
        Engine().sync(replace(an_offer(), transport=TransportKind.NCCL))


IN_BFLOAT16 = replace(PROBE, tolerance=None)
OF_A_RUN = replace(IN_BFLOAT16, noise=Differences(0.004, 0.02))
NOISY = (-0.52, -0.26)


def test_noise_is_measured_once_before_the_first_weights_and_bounds_every_later_sync() -> None:
    engine = Engine(NOISY, (-0.5, -0.25), (-0.54, -0.25), (-0.6, -0.3))
    report = engine.sync(an_offer(1, IN_BFLOAT16))
    assert report.canary_noise == Differences.from_values([0.52 - 0.5, 0.26 - 0.25])
    assert report.canary_mean_abs == 0.0
    before, after = engine.asked_before
    assert (before, "load_report" in after) == ([], True)
    report = engine.sync(an_offer(2, IN_BFLOAT16))
    assert (report.canary_noise, report.canary_mean_abs) == (None, pytest.approx(0.02))
    assert len(engine.asked_before) == 3
    with pytest.raises(WeightSyncError, match=r"mean difference is 0\.0750 \(0\.0450 is allowed\)"):
        engine.sync(an_offer(3, IN_BFLOAT16))


@dataclass(frozen=True)
class Sync:
    """One sync of a row below, what the engine answers in it, and what comes of it."""

    version: int
    probe: CanaryProbe
    answers: tuple[tuple[float, float], ...]
    outcome: float | str
    """The mean difference, or the error."""
    measures: bool = False


MEASURED = Sync(1, IN_BFLOAT16, (NOISY, (-0.5, -0.25)), 0.0, measures=True)
SYNCS = {
    "not where the run is resumed": [Sync(1, OF_A_RUN, ((-0.5, -0.25),), 0.0)],
    "not of an engine that was restarted, for the learner has no checkpoint any more": [
        Sync(7, IN_BFLOAT16, ((-0.5, -0.25),), 0.0)
    ],
    "not in float32": [Sync(1, PROBE, ((-0.5, -0.25),), 0.0)],
    "anew by another run on a server that goes on": [
        MEASURED,
        Sync(1, replace(IN_BFLOAT16, expected_logprobs=(-0.7, -0.25)), ((-0.58, -0.25),), 0.06),
        Sync(
            2,
            replace(IN_BFLOAT16, expected_logprobs=(-0.9, -0.25)),
            ((-0.58, -0.13),),
            r"\(0\.1000 is allowed\)",
        ),
    ],
    "not by full weights in place of a first sync that failed": [
        Sync(
            1,
            IN_BFLOAT16,
            ((-0.51, -0.25), (-0.9, -0.25)),
            r"canary on actor-0: .*\(0\.0150 is allowed\)",
        ),
        Sync(1, IN_BFLOAT16, ((-0.58, -0.25),), 0.04),
    ],
    "and the run's counts before the engine's own": [
        MEASURED,
        Sync(2, OF_A_RUN, ((-0.54, -0.25),), r"\(0\.0120 is allowed\)"),
    ],
    "not where a server has other weights before": [
        Sync(1, IN_BFLOAT16, ((-1.5, -0.25), (-0.5, -0.25)), 0.0),
        Sync(
            2,
            IN_BFLOAT16,
            ((-0.75, -0.25),),
            r"mean difference is 0\.1250 \(0\.1000 is allowed\)",
        ),
    ],
}


@pytest.mark.parametrize("syncs", SYNCS.values(), ids=SYNCS.keys())
def test_noise_is_measured_where_it_is_nothing_but_noise_and_not_known(syncs: list[Sync]) -> None:
    engine = Engine()
    for sync in syncs:
        engine.answers = list(sync.answers)
        offer = an_offer(sync.version, sync.probe)
        if isinstance(sync.outcome, str):
            with pytest.raises(WeightSyncError, match=sync.outcome):
                engine.sync(offer)
        else:
            report = engine.sync(offer)
            assert (report.canary_noise is not None) == sync.measures
            assert report.canary_mean_abs == pytest.approx(sync.outcome)
        assert engine.answers == [], "it is asked so often"
    assert len(engine.asked_before) == sum(len(sync.answers) for sync in syncs)


GOOD = LoadReport([1, 2], [1, 2], [], [], load_s=0.0, verify_s=0.0, logprobs=[])
DAMAGED = "of 2 did not arrive as they were sent"
SEVERAL = "not loaded: a, not loaded: c, not a parameter: b, ..."
BAD = [
    ({"checksums": [1, 3]}, f"buckets [1] {DAMAGED}", "bucket checksums", 1),
    ({"checksums": [3, 2]}, f"buckets [0] {DAMAGED}", "bucket checksums", 1),
    ({"checksums": [2, 1]}, f"buckets [0, 1] {DAMAGED}", "bucket checksums", 2),
    ({"checksums": [1]}, "1 buckets arrived with 2 checksums", "number of buckets", None),
    ({"missing": ["a"]}, "not loaded: a", "set of loaded names", 1),
    ({"unexpected": ["b"]}, "not a parameter: b", "set of loaded names", 1),
    ({"missing": ["a", "c"], "unexpected": ["b", "d"]}, SEVERAL, "set of loaded names", 4),
]


@pytest.mark.parametrize("index", [0, 1], ids=["of the first worker", "of another worker"])
@pytest.mark.parametrize(
    ("changes", "told", "quantity", "size"), BAD, ids=[told for _, told, _, _ in BAD]
)
def test_an_account_that_is_not_as_it_should_be_is_an_error_that_names_what_differs(
    changes: dict[str, Any], told: str, quantity: str, size: int | None, index: int
) -> None:
    reports = [GOOD, GOOD]
    check_load_reports(reports, "actor-0")
    reports[index] = replace(GOOD, **changes)
    with pytest.raises(WeightSyncError) as caught:
        check_load_reports(reports, "actor-0")
    error = caught.value
    assert error.message.startswith(told)
    assert (error.actor, error.phase) == ("actor-0", SyncPhase.VERIFY)
    assert (error.quantity, error.size) == (quantity, size)
