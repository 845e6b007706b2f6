"""Many rollouts at once: generation and scoring overlap, each within its own bound, and results
come in the order of the inputs (spec: orchestration).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from rollout_actors.environments.chat.tools import num_tool_calls
from rollout_actors.environments.clients.openai import knows_rollouts
from rollout_actors.environments.concurrency import GIVEN_UP, WAITED, ScoringSlot, Stopwatch, within
from rollout_actors.environments.datasets import (
    Examples,
    GenerateMetadata,
    GenerateOutputs,
    mean,
    placed,
    require_one_row_per_id,
    require_own_positions,
)
from rollout_actors.environments.failures import (
    FAILURES,
    in_own_task,
    is_cancelled,
    is_of_signal,
    told,
)
from rollout_actors.environments.lifecycle import all_of, awaited, to_the_end
from rollout_actors.environments.rubric import (
    Rubric,
    compare_rollouts,
    credit,
    groups_of,
    limited,
    score_by,
    settle,
)
from rollout_actors.environments.scope import (
    Begun,
    Inside,
    call_begins,
    require_state,
    rollout_begins,
    scoring_begins,
    whole,
)
from rollout_actors.environments.types import RolloutInput, State

if TYPE_CHECKING:
    from rollout_actors.environments.environment import Environment

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many at a time; None: all."""

    generation: int | None
    scoring: int | None

    @classmethod
    def of(cls, both: int, generation: int | None, scoring: int | None) -> Concurrency:
        """`both` holds for what is None; a number under 1 means all."""
        bounds = [both if one is None else one for one in (generation, scoring)]
        return cls(*(bound if bound > 0 else None for bound in bounds))


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What `Environment.generate` was asked."""

    client: Any
    model: str
    sampling_args: dict[str, Any]
    concurrency: Concurrency
    scores: bool = True
    interleaves: bool = True
    shows_progress: bool = False
    on_rollout: Callable[[int, State], None] | None = None
    rollout_timeout_s: float | None = None
    scoring_timeout_s: float | None = None


async def generate(
    environment: Environment, examples: Examples, call: GenerateCall
) -> GenerateOutputs:
    """See `Environment.generate`. When it is cancelled, so is every rollout, and each cleans up
    after itself.
    """
    started, began_s = datetime.now().astimezone(), time.perf_counter()
    with tqdm(total=len(examples), disable=not call.shows_progress, unit="rollout") as bar:
        rollouts = _Rollouts(environment, examples, call, bar)
        # A plain reward function that hangs in a thread would else keep it, and tools that wait for
        # one are in no limit.
        key = "rollout_timeout_s" if call.scoring_timeout_s is None else "scoring_timeout_s"
        with limited(getattr(call, key), key):
            await rollouts.run()
    states = rollouts.states
    # The reward 0 of a rollout that failed was never measured.
    sound = [state for state in states if state["error"] is None]
    scored = [state["reward"] for state in sound if state["reward"] is not None]
    names = dict.fromkeys(name for state in states for name in state["metrics"] or {})
    metadata = GenerateMetadata(
        env_id=environment.name,
        env_args=environment.env_args,
        model=call.model,
        sampling_args=call.sampling_args,
        num_examples=len({repr((state["task"], state["example_id"])) for state in states}),
        rollouts_per_example=1,
        num_errors=sum(state["error"] is not None for state in states),
        num_truncated=sum(bool(state["is_truncated"]) for state in states),
        avg_reward=mean(scored),
        # Those that failed do not have it, nor do those of another environment of a group.
        avg_metrics={
            name: mean(
                [state["metrics"][name] for state in states if name in (state["metrics"] or {})]
            )
            for name in names
        },
        time_ms=1000 * (time.perf_counter() - began_s),
        date=started.isoformat(timespec="seconds"),
        num_reward_errors=dict(
            Counter(name for state in states for name in state.get("reward_errors", {}))
        ),
        num_given_up=dict(Counter(name for state in states for name in state.get("given_up", ()))),
    )
    if metadata.num_errors:
        first = next(state for state in states if state["error"] is not None)
        _LOGGER.warning(
            "%d of %d rollouts failed, the first of example %r: %s",
            metadata.num_errors,
            len(states),
            first["example_id"],
            first["error"],
        )
    tool_calls = [
        calls
        for state in states
        if state["trajectory"] and (calls := num_tool_calls(state)) is not None
    ]
    if problem := environment._uncalled_tools.problem(len(tool_calls), sum(tool_calls)):
        _LOGGER.warning("%s: %s", environment.name, problem)
    for name, number in metadata.num_reward_errors.items():
        first = next(state for state in states if name in state.get("reward_errors", {}))
        _LOGGER.warning(
            "reward function %s failed for %d of %d rollouts, the first of example %r: %s",
            name,
            number,
            len(states),
            first["example_id"],
            first["reward_errors"][name],
        )
    return GenerateOutputs.of(states, metadata)


class _Rollouts:
    """Those of one call, while they are made."""

    def __init__(
        self, environment: Environment, examples: Examples, call: GenerateCall, bar: Any
    ) -> None:
        self._environment, self._call, self._bar = environment, call, bar
        self._inside = call_begins()
        caller = asyncio.current_task()
        assert caller is not None, "a coroutine is run by one"
        self._caller = caller
        self._num_cancellations = caller.cancelling()
        self._inputs = placed(examples)
        require_one_row_per_id(examples, self._inputs)
        if knows_rollouts(call.client):
            require_own_positions(self._inputs)
        generation, scoring = call.concurrency.generation, call.concurrency.scoring
        self._generation = None if generation is None else asyncio.Semaphore(generation)
        self._scoring = None if scoring is None else asyncio.Semaphore(scoring)
        self._done: list[State | None] = [None] * len(self._inputs)
        self._given_up: list[list[str]] = [[] for _ in self._inputs]
        """The plain functions of each rollout that were given up."""

    @property
    def states(self) -> list[State]:
        """Of all, in order, when they are done."""
        return [self._state(place) for place in range(len(self._done))]

    async def run(self) -> None:
        places = range(len(self._inputs))
        groups = groups_of((one["task"], one["example_id"]) for one in self._inputs)
        if not self._call.scores:
            await self._generate_all(
                [[place] for place in places], lambda unit, _: self._tell(unit[0])
            )
            return
        if self._call.interleaves:
            await self._generate_all(
                self._units(groups), partial(self._begin_scoring, context=copy_context())
            )
        else:
            await self._generate_all([[place] for place in places], lambda *_: None)
            for together in groups_of(id(self._rubric([place])) for place in places):
                await self._score_all(together)
        for group in groups:
            compare_rollouts([self._state(place) for place in group])

    def _units(self, groups: Iterable[list[int]]) -> list[list[int]]:
        """Return what is scored at once, of the places of each example: a rollout, or where they
        are compared, all of it.
        """
        return sorted(
            unit
            for group in groups
            for unit in (
                [group]
                if len(group) == 1 or self._rubric(group).compares_rollouts
                else [[place] for place in group]
            )
        )

    def _rubric(self, unit: Sequence[int]) -> Rubric:
        """Of rollouts of one example."""
        return self._environment.rubric.for_task(self._inputs[unit[0]]["task"])

    async def _generate_all(
        self,
        units: Sequence[Sequence[int]],
        then: Callable[[Sequence[int], asyncio.TaskGroup], None],
    ) -> None:
        """Generate each rollout in a task of its own, and call `then` with each unit whose rollouts
        are all there.

        An error that no rollout can be blamed for, or a cancellation, ends all tasks.
        """
        num_left = [len(unit) for unit in units]

        async def generate_one(number: int, place: int) -> None:
            await self._generate(place)
            num_left[number] -= 1
            if not num_left[number]:
                then(units[number], tasks)

        async with asyncio.TaskGroup() as tasks:
            for number, unit in enumerate(units):
                for place in unit:
                    tasks.create_task(generate_one(number, place))

    def _begin_scoring(
        self, unit: Sequence[int], tasks: asyncio.TaskGroup, *, context: Context
    ) -> None:
        """Score a rollout, or those of an example, in a task and a context of its own: what a
        rollout has left in its own, such as a timer that cancels the task, is not there."""
        if sound := self._set_failed_apart(unit):
            tasks.create_task(self._score_and_finish(unit, sound), context=context.copy())
        else:
            self._finish(unit)

    async def _score_and_finish(self, unit: Sequence[int], sound: Sequence[int]) -> None:
        WAITED.set(None)
        await self._score_unit(self._rubric(unit), sound, self._scoring)
        self._finish(unit)

    async def _generate(self, place: int) -> None:
        if self._generation is not None:
            await self._generation.acquire()
        try:
            began_s, waited = time.perf_counter(), Stopwatch()
            WAITED.set(waited)
            GIVEN_UP.set(self._given_up[place])
            state = await self._rolled_out(place)
            timing = state["timing"]
            timing["generation_ms"] = timing["total_ms"] = 1000 * (
                time.perf_counter() - began_s - waited.total_s
            )
        finally:
            if self._generation is not None:
                self._generation.release()
        self._done[place] = state

    async def _rolled_out(self, place: int) -> State:
        one, environment = self._inputs[place], self._environment
        begun: Begun | None = None
        try:
            begun = Begun(environment.member(one["task"]), one, self._inside_at(place))
            rollout_begins(begun)
            if self._call.rollout_timeout_s is None:
                state = await self._cleaned_up(one, begun)
            else:
                remedy = "check what its turns, tools and cleanups wait for, or allow more"
                async with within(
                    self._call.rollout_timeout_s, "not done after rollout_timeout_s", remedy
                ):
                    state = await self._cleaned_up(one, begun)
        except FAILURES as error:  # of one rollout: it is data, and the others go on
            self._raise_if_for_all(error)
            await self._meet_cancellation()
            _LOGGER.debug("rollout %d failed", place, exc_info=error)
            noted = None if begun is None else begun.first
            state = environment._new_state(dict(one)) if noted is None else _filled(noted, one)
            await self._note_failure(state, error)
        await self._meet_cancellation()
        return state

    async def _note_failure(self, state: State, error: BaseException) -> None:
        state["error"] = told(error)
        state["is_completed"], state["stop_condition"] = True, "error"
        if state["completion"] is None:
            environment = self._environment
            try:
                async with asyncio.timeout(environment.cleanup_timeout_s):
                    await environment._render_completion(state)
            # perhaps the failure itself: the steps are kept, in their own words
            except FAILURES as again:
                self._raise_if_for_all(again)
                state["completion"] = "" if environment.message_type == "completion" else []

    async def _cleaned_up(self, one: RolloutInput, begun: Begun) -> State:
        """A rollout, and however it ended, after it every `@cleanup`, if the environment's own
        `rollout` has not called them.
        """
        call, environment = self._call, self._environment
        state: State | None = None
        try:
            made = await awaited(
                environment.rollout(one, call.client, call.model, call.sampling_args)
            )
            state = _filled(require_state(made, "rollout", environment), one)
            if (num_splits := begun.num_splits) is not None:
                state["num_splits"] = num_splits  # it may be another state than the client knows
        finally:
            member = environment.member(one["task"])
            if member._cleanups and (left := begun.left(state)):
                await to_the_end(
                    all_of(map(partial, repeat(member._cleanup), left)), member.cleanup_timeout_s
                )
        return state

    async def _meet_cancellation(self) -> None:
        """Let a cancellation of this task come before it goes on, where its rollout or its rubric
        has asked for one.
        """
        if is_cancelled():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            self._raise_if_for_all(None)

    def _raise_if_for_all(self, error: BaseException | None) -> None:
        """Raise the end of the process, and a cancellation of `generate`: that of one task alone is
        the failure of its rollout, or of its rubric.
        """
        if isinstance(error, SystemExit) and is_of_signal(error):
            raise error
        if self._caller.cancelling() > self._num_cancellations:
            raise (
                error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError
            ) from error

    async def _score_all(self, places: Sequence[int]) -> None:
        """Score the rollouts of one rubric by its `score_rollouts`, when all are generated."""
        rubric, bound = self._rubric(places), self._call.concurrency.scoring
        sound = self._set_failed_apart(places)
        states = [self._state(place) for place in sound]
        place_of = {id(state): place for state, place in zip(states, sound, strict=True)}
        is_overridden = rubric.scores_all_at_once
        in_units = set[int]()

        async def score_unit(
            by: Rubric, of_unit: Sequence[State], turns: asyncio.Semaphore | None
        ) -> None:
            unit = [place_of[id(state)] for state in of_unit]
            await self._score_unit(by, unit, turns)
            in_units.update(unit)
            if not is_overridden:  # or else what it does with them may come after this
                self._finish(unit)

        async def score() -> None:
            score_by(score_unit, self._environment.member(self._inputs[places[0]]["task"]).parser)
            await awaited(rubric.score_rollouts(states, -1 if bound is None else bound))

        began_s = time.perf_counter()
        try:
            await in_own_task(score())
        except FAILURES as error:  # of the rubric's own, as in a unit
            self._raise_if_for_all(error)
            _LOGGER.debug("score_rollouts failed", exc_info=error)
            self._note_unscored(sound, error)
        took_ms = 1000 * (time.perf_counter() - began_s)
        if not is_overridden:
            self._finish(place for place in places if place not in in_units)
            return
        named = groups_of(
            (self._inputs[place]["task"], self._inputs[place]["example_id"]) for place in sound
        )
        for unit in self._units([sound[number] for number in group] for group in named):
            self._settle(rubric, unit)
        for place in sound:
            if place not in in_units:
                # Nobody knows each one's part of it.
                self._state(place)["timing"]["scoring_ms"] = took_ms
        self._finish(places)

    async def _score_unit(
        self, rubric: Rubric, unit: Sequence[int], turns: asyncio.Semaphore | None
    ) -> None:
        """Score rollouts that have not failed: one, or where they are compared, an example's."""
        states, turn = list(map(self._state, unit)), ScoringSlot(turns)
        async with turn:
            try:
                await self._scored(rubric, states, unit[0])
            except FAILURES as error:  # of one unit, as above
                self._raise_if_for_all(error)
                _LOGGER.debug("scoring of %s failed", unit, exc_info=error)
                self._note_unscored(unit, error)
        await self._meet_cancellation()
        self._settle(rubric, unit)
        for state in states:
            # Each rubric of a group may have had its turn.
            state["timing"]["scoring_ms"] += 1000 * turn.so_far_s()

    async def _scored(self, rubric: Rubric, states: Sequence[State], place: int) -> None:
        """In this task, whose context says what is scored. `place` is the first one's."""
        one = self._inputs[place]
        # those of a group's function are noted once, with its first rollout
        GIVEN_UP.set(self._given_up[place])
        score_by(None, self._environment.member(one["task"]).parser)
        scoring_begins(one, self._inside_at(place))
        await awaited(
            rubric.score_group(states)
            if rubric.compares_rollouts
            else rubric.score_rollout(states[0])
        )

    def _settle(self, rubric: Rubric, unit: Sequence[int]) -> None:
        states = [self._state(place) for place in unit]
        try:
            settle([state for state in states if state["error"] is None], rubric)
        except FAILURES as error:  # of what a rubric of the user's has left
            self._raise_if_for_all(error)
            self._note_unscored(unit, error)

    def _note_unscored(self, places: Iterable[int], error: BaseException) -> None:
        """Nobody knows what a rubric that failed itself had still to do: nothing of it stays."""
        for state in map(self._state, places):
            state["error"], state["metrics"] = told(error), {}
            state.pop("reward_errors", None)

    def _set_failed_apart(self, places: Sequence[int]) -> list[int]:
        """Return those to be scored. A rollout that failed has no metrics: nobody has judged it."""
        sound = []
        for place in places:
            state = self._state(place)
            if state["error"] is None:
                sound.append(place)
            else:
                state["metrics"] = {}
        return sound

    def _finish(self, places: Iterable[int]) -> None:
        """Close what is scored, or has failed."""
        for place in places:
            state = self._state(place)
            timing = state["timing"]
            if state["error"] is not None:
                credit(state, 0.0)
            timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]
            self._tell(place)

    def _inside_at(self, place: int) -> Inside | None:
        """Where this call is made in a rollout."""
        return None if self._inside is None else self._inside.of(place)

    def _state(self, place: int) -> State:
        state = self._done[place]
        assert state is not None, "it is generated first"
        return state

    def _tell(self, place: int) -> None:
        self._bar.update()
        if self._given_up[place]:
            self._state(place)["given_up"] = self._given_up[place]
        if self._call.on_rollout is not None:
            self._call.on_rollout(place, self._state(place))


def _filled(state: State, one: RolloutInput) -> State:
    """With all that a rollout of this row has, whatever an environment of a user's has left out."""
    if not dict.__contains__(state, "input"):
        state["input"] = {key: value for key, value in one.items() if key not in state}
    return whole(state)
