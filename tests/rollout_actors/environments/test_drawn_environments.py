"""Environments of which drawn rollouts fail, in a drawn place and way, and batches that are
cancelled at a drawn moment. What holds of every one of them is checked here; what an error says,
and other single cases, in the files of the parts.

Seconds are counted, not waited for. All runs off the main thread, as in an actor: there an exit is
never that of a signal's handler.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any, NamedTuple

import pytest
from counted_time import counted
from environment_support import Documented, Talk, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_client import Answer, ScriptedClient, status_error

from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.lifecycle import cleanup
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.training.examples import (
    merge_trajectories_for_training,
    process_trajectories_for_training,
)

METHODS = ["init_state", "setup_state", "env_response", "is_completed", "_render_completion"]
IN_ROLLOUT = [*METHODS, "put_away", "rollout", "client"]

FUNCTIONS = {"reward": "judged", "plain reward": "plain", "group reward": "compared"}


class Gone(BaseException):
    pass


async def waits_for_a_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


async def cancels_its_own_task() -> None:
    """Limit the time without `asyncio.timeout`: nobody takes the cancellation back."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.01, task.cancel)
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        raise RuntimeError("sandbox too slow") from None


RAISED = {
    "error": (lambda: RuntimeError("broken"), "RuntimeError: broken"),
    "exit": (lambda: SystemExit(3), "called exit()"),
    "interrupt": (KeyboardInterrupt, "KeyboardInterrupt"),
    "no Exception": (Gone, "Gone"),
}
AWAITED = {
    "cancelled": (waits_for_a_cancelled_task, "CancelledError"),
    "hangs": (lambda: asyncio.sleep(3600), "TimeoutError"),
    "cancels itself": (cancels_its_own_task, "RuntimeError: sandbox too slow"),
}
SAID = {name: said for name, (_, said) in {**RAISED, **AWAITED}.items()}
SAID["forgets"] = "returned nothing; return the state"
FAULTS = {
    **dict.fromkeys(METHODS, (*RAISED, *AWAITED)),
    **dict.fromkeys(("init_state", "setup_state", "rollout"), (*RAISED, *AWAITED, "forgets")),
    "put_away": (*RAISED, "cancelled", "hangs"),
    "client": ("error",),
    "plain reward": (*RAISED,),
    "reward": ("error", "exit", "interrupt", "cancelled", "hangs"),
    "group reward": ("error", "exit", "interrupt", "cancelled", "hangs"),
    "rubric": (*RAISED, "cancelled"),
}


class Drawn(NamedTuple):
    place: str
    fault: str
    group_sizes: list[int]
    victims: set[int]
    compares: bool
    writes_its_own_loop: bool
    is_in_a_group: bool
    bound: int

    def groups(self) -> list[list[int]]:
        """The rollouts of each example, by their indices."""
        ends = [sum(self.group_sizes[: number + 1]) for number in range(len(self.group_sizes))]
        return [
            list(range(end - size, end)) for end, size in zip(ends, self.group_sizes, strict=True)
        ]

    def failed(self) -> set[int]:
        """Victims; if their place is one of a whole group, those of their examples."""
        if self.place != "group reward" and not (self.place == "rubric" and self.compares):
            return self.victims
        return {one for group in self.groups() if self.victims & {*group} for one in group}

    def worth(self, index: int) -> float:
        return index + 0.5 + 0.25 * self.compares


@st.composite
def drawn(draw: Any) -> Drawn:
    place = draw(st.sampled_from(sorted(FAULTS)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    victims = draw(st.sets(st.integers(0, sum(sizes) - 1), min_size=1, max_size=3))
    compares = place == "group reward" or draw(st.booleans())
    own, grouped = draw(st.booleans()), draw(st.booleans())
    fault = draw(st.sampled_from(FAULTS[place]))
    return Drawn(place, fault, sizes, victims, compares, own, grouped, draw(st.integers(-1, 2)))


def index_of(row: Any) -> int:
    return int(row["prompt"][0]["content"][1:])


def environment_of(one: Drawn) -> tuple[Any, list[int]]:
    """Make the environment, and a list of the rollouts that it cleans up after."""
    cleaned: list[int] = []

    def fails_plainly(place: str, row: Any) -> bool:
        is_here = one.place == place and index_of(row) in one.victims
        if is_here and one.fault in RAISED:
            raise RAISED[one.fault][0]()
        return is_here

    async def fails(place: str, row: Any) -> bool:
        """Return whether the result is forgotten."""
        is_here = fails_plainly(place, row)
        if is_here and one.fault in AWAITED:
            await AWAITED[one.fault][0]()
        return is_here and one.fault == "forgets"

    base: type[MultiTurnEnv] = Documented if one.writes_its_own_loop else Talk

    class Failing(base):  # type: ignore[valid-type, misc]
        cleanup_timeout_s = 5.0

        async def rollout(self, input: Any, *args: Any, **kwargs: Any) -> Any:
            state = await super().rollout(input, *args, **kwargs)
            return None if await fails("rollout", input) else state

        @cleanup
        async def put_away(self, state: Any) -> None:
            cleaned.append(index_of(state))
            await fails("put_away", state)

    def failing(name: str) -> Any:
        async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            # The state or the input comes first, but for `env_response`.
            is_forgotten = await fails(name, args[name == "env_response"])
            result = await getattr(base, name)(self, *args, **kwargs)
            return None if is_forgotten else result

        return method

    for name in METHODS:
        setattr(Failing, name, failing(name))

    class Judge(Rubric):
        async def score_rollout(self, state: Any) -> None:
            await super().score_rollout(state)
            await fails("rubric", state)

    class GroupJudge(Rubric):
        async def score_group(self, states: Any) -> None:
            await super().score_group(states)
            for state in states:
                await fails("rubric", state)

    async def judged(state: Any) -> float:
        await fails("reward", state)
        return index_of(state)

    def plain(state: Any) -> float:
        fails_plainly("plain reward", state)
        return 0.5

    async def compared(states: Any) -> list[float]:
        for state in states:
            await fails("group reward", state)
        return [0.25] * len(states)

    rubric = GroupJudge([judged, plain, compared]) if one.compares else Judge([judged, plain])
    environment = Failing(max_turns=2, rubric=rubric, env_id="mine")
    return EnvGroup([environment]) if one.is_in_a_group else environment, cleaned


def script_of(one: Drawn) -> Any:
    def answer(call: Any) -> Any:
        is_refused = one.place == "client" and int(call.prompt[0]["content"][1:]) in one.victims
        return status_error(400, "RuntimeError: broken") if is_refused and call.turn else "a"

    return answer


@settings(deadline=None, max_examples=150)
@given(drawn(), st.booleans())
def test_wherever_and_however_rollouts_fail_they_are_data_and_the_others_are_as_without_them(
    one, interleave_scoring
):
    environment, cleaned = environment_of(one)
    inputs = [
        {"question": f"q{index}", "example_id": number, "task": "mine"}
        for number, group in enumerate(one.groups())
        for index in group
    ]
    client = ScriptedClient(script_of(one))
    work = environment.generate(
        inputs,
        client,
        "model",
        RETURNS_TOKENS,
        use_tqdm=False,
        max_concurrent=one.bound,
        interleave_scoring=interleave_scoring,
        rollout_timeout_s=10.0,
    )
    with ThreadPoolExecutor(1) as pool:
        results, _ = pool.submit(counted, work).result(60)

    failed = one.failed()
    everyone = range(len(inputs))
    assert [index_of(state) for state in results.state] == [*everyone], "in the order of the inputs"
    assert {i for i in everyone if results.state[i]["error"] is not None} == failed
    for index in failed:
        state = results.state[index]
        # A loop of one's own takes what its methods return, and fails in its own way.
        is_of_its_loop = one.writes_its_own_loop and one.place in ("init_state", "setup_state")
        if not (is_of_its_loop and one.fault == "forgets"):
            assert SAID[one.fault] in state["error"]
        if one.place in FUNCTIONS:
            name = FUNCTIONS[one.place]
            assert {*state["metrics"]} == {*environment.rubric.reward_names} - {name}
            assert [*state["reward_errors"]] == [name]
        else:
            assert (state["metrics"], "reward_errors" in state) == ({}, False)
        if one.place in IN_ROLLOUT:
            assert (state["is_completed"], state["stop_condition"]) == (True, "error")
            assert isinstance(state["completion"], list)
    never_begun = (
        one.victims if (one.place, one.fault == "forgets") == ("init_state", False) else ()
    )
    assert Counter(cleaned) == Counter(i for i in everyone if i not in never_begun)

    for group in one.groups():
        sound = [index for index in group if index not in failed]
        for index in group:
            state = results.state[index]
            reward = one.worth(index) if index in sound else 0.0
            advantage = reward - fmean(map(one.worth, sound)) if index in sound else None
            assert state["reward"] == results.reward[index] == reward
            assert state["advantage"] == pytest.approx(advantage)
            for step in state["trajectory"]:
                assert (step["reward"], step["advantage"]) == (state["reward"], state["advantage"])
    sound_rewards = [one.worth(index) for index in everyone if index not in failed]
    assert results.metadata.num_errors == len(failed)
    errors = {FUNCTIONS[one.place]: len(failed)} if one.place in FUNCTIONS else {}
    assert results.metadata.num_reward_errors == errors
    mean = fmean(sound_rewards) if sound_rewards else math.nan
    assert results.metadata.avg_reward == pytest.approx(mean, nan_ok=True)

    for examples in (
        process_trajectories_for_training(results.state),
        merge_trajectories_for_training(results.state).examples,
    ):
        assert {example.rollout for example in examples} == {*everyone} - failed
        for example in examples:
            (group,) = [group for group in one.groups() if example.rollout in group]
            sound = [one.worth(index) for index in group if index not in failed]
            assert example.group_rewards == tuple(sound)


class Slow(Talk):
    """Takes a second for each of its parts."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(max_turns=2, **kwargs)
        self.begun, self.cleaned = [], []

    async def setup_state(self, state: Any) -> Any:
        self.begun.append(index_of(state))
        await asyncio.sleep(1.0)
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(1.0)
        return await super().env_response(messages, state, **kwargs)

    @cleanup(priority=1)
    async def put_away(self, state: Any) -> None:
        await asyncio.sleep(1.0)
        self.cleaned.append(index_of(state))

    @cleanup
    def fails(self, state: Any) -> None:
        if self.cleaned[-1] == 1:
            raise OSError("lost")


class SlowOfItsOwn(Slow, Documented):
    pass


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([Slow, SlowOfItsOwn]), st.integers(-1, 2), st.integers(0, 9), st.booleans())
def test_a_batch_that_is_cancelled_at_any_moment_cleans_up_each_rollout_that_has_begun_once(
    kind, bound, seconds, interleave_scoring
):
    async def judged(state: Any) -> float:
        await asyncio.sleep(1.0)
        return 1.0

    environment = kind(rubric=Rubric([judged]))
    client = ScriptedClient(lambda call: Answer("a", delay_s=1.0))
    done: list[int] = []

    async def cancelled() -> None:
        work = environment.generate(
            rows(3),
            client,
            "model",
            use_tqdm=False,
            max_concurrent=bound,
            interleave_scoring=interleave_scoring,
            on_rollout=lambda index, state: done.append(index),
        )
        task = asyncio.create_task(work)
        await asyncio.sleep(seconds + 0.5)
        if not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(done) < 3

    counted(cancelled())
    assert sorted(environment.cleaned) == sorted(environment.begun)
    assert len({*environment.begun}) == len(environment.begun)
    assert client.num_under_way == 0
