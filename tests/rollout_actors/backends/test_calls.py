"""How calls of an event loop come to an engine in another thread, and come together in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from scripted_engines import decode_settings, demo_tokenizer, rollout_of, says

from rollout_actors.backends import calls as engine_calls
from rollout_actors.backends.calls import ASKER, POLL_S, Asker, Call, EngineCalls
from shared.errors import RolloutError
from shared.rollouts import RolloutRequest

TOKENIZER = demo_tokenizer()
REQUEST = RolloutRequest(3, 0, "sample", (1, 2), (), decode_settings(TOKENIZER), seed=5)
NEVER = 3600.0


class Round:
    """An open round, and who may ask in it."""

    def __init__(self, number: int) -> None:
        self.calls = EngineCalls("learner")
        self.calls.open()
        self.askers = [Asker() for _ in range(number)]
        self.calls.askers += self.askers

    def ask(self, position: int) -> asyncio.Task[Any]:
        """Have the rollout of this position ask."""

        async def asked() -> Any:
            ASKER.set(self.askers[position])
            return await self.calls.generate(0, replace(REQUEST, position=position))

        return asyncio.create_task(asked())

    def batch(self, raise_if_stopping: Callable[[], None] = lambda: None) -> asyncio.Task[Any]:
        """Have the engine, in its thread, wait for a batch."""
        taking = asyncio.to_thread(self.calls.take_together, raise_if_stopping)
        return asyncio.create_task(taking)

    def answer(self, batch: list[Call]) -> None:
        self.calls.answer(
            [(call, rollout_of(call.request, says(TOKENIZER, "x"))) for call in batch]
        )


def played(play: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await play

    asyncio.run(within())


def positions(batch: list[Call]) -> list[int]:
    return [call.request.position for call in batch]


@pytest.fixture(autouse=True)
def _nobody_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "QUIET_S", NEVER)


def test_a_batch_waits_for_every_rollout_at_work_and_is_in_the_order_of_positions() -> None:
    async def play() -> None:
        round_ = Round(3)
        batch = round_.batch()
        asked = [round_.ask(2), round_.ask(1)]
        await asyncio.sleep(3 * POLL_S)
        assert not batch.done()
        asked.append(round_.ask(0))
        assert positions(await batch) == [0, 1, 2]
        round_.answer(await batch)
        assert [rollout.position for rollout in await asyncio.gather(*asked)] == [2, 1, 0]
        assert not any(asker.num_waiting for asker in round_.askers)

    played(play())


def test_a_rollout_that_is_done_is_not_waited_for() -> None:
    async def play() -> None:
        round_ = Round(2)
        asked = round_.ask(1)
        batch = round_.batch()
        round_.askers[0].is_done = True
        assert positions(await batch) == [1]
        round_.answer(await batch)
        await asked

    played(play())


def test_of_a_batch_that_was_answered_all_rollouts_are_waited_for_again() -> None:
    """Also where the first of them asks before the others have read their answers."""

    async def play() -> None:
        round_ = Round(3)
        asked = [round_.ask(position) for position in range(3)]
        round_.answer(await round_.batch())
        await asyncio.gather(*asked)
        again = round_.batch()
        asked = [round_.ask(position) for position in range(3)]
        assert positions(await again) == [0, 1, 2]
        round_.answer(await again)
        await asyncio.gather(*asked)

    played(play())


def test_a_rollout_whose_answer_is_not_read_yet_is_waited_for() -> None:
    """The engine's thread may look for the next batch before the event loop has run."""

    async def play() -> None:
        round_ = Round(2)
        asked = [round_.ask(position) for position in range(2)]
        first, second = await round_.batch()
        round_.answer([first])
        assert [one.is_at_work for one in round_.askers] == [True, False]
        round_.answer([second])
        await asyncio.gather(*asked)

    played(play())


def test_a_rollout_with_two_calls_at_once_is_at_work_when_both_have_their_answers() -> None:
    async def play() -> None:
        round_ = Round(1)
        asked = [round_.ask(0), round_.ask(0)]
        await asyncio.sleep(0)
        first, second = await round_.batch()
        round_.answer([first])
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert not round_.askers[0].is_at_work
        round_.answer([second])
        await asyncio.gather(*asked)
        assert round_.askers[0].is_at_work

    played(play())


def test_a_call_that_is_given_up_is_in_no_batch_and_its_rollout_is_at_work_again() -> None:
    async def play() -> None:
        round_ = Round(2)
        asked = [round_.ask(0), round_.ask(1)]
        await asyncio.sleep(0)
        asked[0].cancel()
        await asyncio.wait(asked[:1])
        assert round_.askers[0].is_at_work
        batch = round_.batch()
        await asyncio.sleep(3 * POLL_S)
        assert not batch.done(), "it may ask once more"
        round_.askers[0].is_done = True
        assert positions(await batch) == [1]
        round_.answer(await batch)
        await asked[1]

    played(play())


def test_those_that_wait_for_each_other_are_left_behind_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_calls, "QUIET_S", 2 * POLL_S)

    async def play() -> None:
        round_ = Round(2)
        asked = round_.ask(1)
        batch = await round_.batch()
        assert positions(batch) == [1]
        round_.answer(batch)
        await asked

    played(play())


def test_a_refusal_is_the_calls_own_error() -> None:
    async def play() -> None:
        round_ = Round(2)
        asked = [round_.ask(0), round_.ask(1)]
        refused, other = await round_.batch()
        round_.calls.answer([(refused, RolloutError("no", actor="learner", phase="generate"))])
        round_.answer([other])
        with pytest.raises(RolloutError, match="generate on learner: no"):
            await asked[0]
        assert (await asked[1]).position == 1

    played(play())


def test_the_end_of_a_round_ends_the_wait_and_nobody_is_heard_outside_of_one() -> None:
    async def play() -> None:
        round_ = Round(1)
        batch = round_.batch()
        round_.calls.close()
        assert await batch == []
        with pytest.raises(RolloutError, match=r"sample sample .*outside of a round"):
            await round_.ask(0)

    played(play())


def test_an_engines_thread_hears_that_the_run_is_ending_while_it_waits() -> None:
    def stops() -> None:
        raise RolloutError("told to stop", actor="learner", phase="generate")

    async def play() -> None:
        with pytest.raises(RolloutError, match="told to stop"):
            await Round(1).batch(stops)

    played(play())
