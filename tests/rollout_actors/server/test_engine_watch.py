"""An engine that is stuck behind a server that answers: the server notices, and takes nobody else's
silence for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from counted_time import counted
from fake_server import ObedientEngine, make_offer, make_service, make_settings

from rollout_actors.server.engine_thread import EngineWatch
from rollout_actors.server.messages import SyncCall
from shared.errors import RolloutError, WeightSyncError
from shared.weight_sync.phases import SyncPhase

LIMIT_S = 60.0
LONG_S = 1000.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Engine(ObedientEngine):
    """Samples and answers as a function of the seconds since the start tells it to."""

    def __init__(
        self,
        *,
        samples: Callable[[float], bool] = lambda _: False,
        answers_after_s: Callable[[float], float] = lambda _: 0.0,
    ) -> None:
        super().__init__()
        self.samples = samples
        self.answers_after_s = answers_after_s
        self.num_asked = 0
        self.phase_s: dict[SyncPhase, float] = {}
        self.fails = False

    @property
    def num_tokens(self) -> int:
        return sum(self.samples(float(second)) for second in range(int(now_s())))

    async def check_alive(self) -> None:
        self.num_asked += 1
        await asyncio.sleep(self.answers_after_s(now_s()))

    async def run_sync_phase(self, phase, offer):
        await asyncio.sleep(self.phase_s.get(phase, 0.0))
        if self.fails:
            raise WeightSyncError("late", actor="server-0", phase=phase)


@pytest.fixture
def given_up_s(tmp_path):
    """Return the second in which a server gives up its engine; None: not in `LONG_S`."""

    told = []

    def watch(
        engine: Engine,
        limit_s: float | None = LIMIT_S,
        *,
        away: tuple[float, float] = (0.0, 0.0),
        sync: tuple[SyncPhase, ...] = (),
        sync_every_s: float = LONG_S,
    ) -> float | None:
        async def sync_again(service) -> None:
            while True:
                next_s = now_s() + sync_every_s
                for phase in sync:
                    call = SyncCall.of(phase, make_offer(), "a run")
                    with suppress(WeightSyncError):
                        await service.run_sync_phase(phase, call)
                await asyncio.sleep(next_s - now_s())

        async def serve() -> float | None:
            service = make_service(engine, make_settings(tmp_path / "model"))
            one = EngineWatch(service, limit_s, clock_s=now_s)
            one.look()  # it is starting
            await service.start()
            syncing = asyncio.create_task(sync_again(service))
            while now_s() < LONG_S:
                await asyncio.sleep(0.5)
                try:
                    if not away[0] < now_s() < away[1]:
                        one.look()
                except RolloutError as error:
                    told.append(error.message)
                    return now_s()
            assert not syncing.done(), "no phase was refused"
            return None

        return counted(serve())[0]

    yield watch
    for message in told:
        assert " stall_s = 60 s; " in message


def test_an_engine_that_neither_samples_nor_answers_is_given_up_after_the_limit(given_up_s):
    second = given_up_s(Engine(samples=lambda s: s < 100, answers_after_s=lambda _: LONG_S))
    assert 160 <= second <= 162, "from its last token"
    second = given_up_s(Engine(answers_after_s=lambda s: LONG_S if s > 100 else 0.0))
    assert 154 <= second <= 162, "from its last answer"


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(Engine(), id="it has nothing to do"),
        pytest.param(Engine(answers_after_s=lambda _: 50.0), id="its steps are long"),
        pytest.param(
            Engine(samples=lambda s: s % 50 == 0, answers_after_s=lambda _: LONG_S),
            id="it samples, and answers nothing else",
        ),
    ],
)
def test_an_engine_that_samples_or_answers_is_left_alone(given_up_s, engine):
    assert given_up_s(engine) is None


def test_an_engine_that_samples_is_not_asked(given_up_s):
    engine = Engine(samples=lambda _: True)
    assert given_up_s(engine) is None
    assert engine.num_asked == 0


@pytest.mark.parametrize("phase", [SyncPhase.RENDEZVOUS, SyncPhase.WIRE])
def test_time_in_which_a_sync_waits_for_others_does_not_count(given_up_s, phase):
    engine = Engine(answers_after_s=lambda _: LONG_S)
    engine.phase_s = {phase: 500.0}
    second = given_up_s(engine, sync=(SyncPhase.PAUSE, SyncPhase.RENDEZVOUS, SyncPhase.WIRE))
    assert 559 <= second <= 561


def test_syncs_that_fail_at_a_stuck_engine_do_not_hide_it(given_up_s):
    engine = Engine(answers_after_s=lambda s: LONG_S if s > 30 else 0.0)
    engine.phase_s = {SyncPhase.PAUSE: 62.0}
    engine.fails = True
    second = given_up_s(engine, sync=(SyncPhase.PAUSE,), sync_every_s=100.0)
    assert 84 <= second <= 92


def test_a_stuck_engine_is_noticed_between_syncs_that_wait_for_others(given_up_s):
    engine = Engine(answers_after_s=lambda _: LONG_S)
    engine.phase_s = {SyncPhase.WIRE: 62.0}
    order = (SyncPhase.PAUSE, SyncPhase.RENDEZVOUS, SyncPhase.WIRE)
    second = given_up_s(engine, sync=order, sync_every_s=100.0)
    assert 183 <= second <= 186, "38 s behind the first one, and 22 s behind the second"


def test_time_in_which_nobody_looked_does_not_count(given_up_s):
    """As where the server itself was stopped, with its engine."""
    engine = Engine(answers_after_s=lambda s: 401.0 - s if 90 < s < 400 else 0.0)
    assert given_up_s(engine, away=(100.0, 400.0)) is None
    assert given_up_s(engine) is not None


def test_without_a_limit_nobody_is_given_up(given_up_s):
    engine = Engine(answers_after_s=lambda _: LONG_S)
    assert given_up_s(engine, None) is None
    assert engine.num_asked == 0
