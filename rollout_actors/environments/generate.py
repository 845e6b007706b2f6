"""Concurrent generation and scoring of an environment's rollouts, each with its own limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from rollout_actors.backends.calls import ASKER, ASKERS, Asker
from rollout_actors.environments.answers.parsers import Parser
from rollout_actors.environments.chat.responses import is_cut
from rollout_actors.environments.chat.tools import num_tool_calls
from rollout_actors.environments.clients.openai import is_rollout_client
from rollout_actors.environments.concurrency import (
    FAILURES,
    QUEUE_TIME,
    Stopwatch,
    describe_error,
    reraise_cancellation,
    run_in_task,
)
from rollout_actors.environments.datasets import (
    Examples,
    GenerateMetadata,
    GenerateOutputs,
    check_one_row_per_id,
    check_positions,
    with_positions,
)
from rollout_actors.environments.lifecycle import awaited
from rollout_actors.environments.rewards import (
    compare_rollouts,
    give_to_steps,
    group_indices,
    note_failed_rubric,
    settle,
    time_limit,
)
from rollout_actors.environments.rubric import Rubric, lent_parser, score_unit
from rollout_actors.environments.scope import (
    RolloutScope,
    current_scope,
    enter_scope,
    new_state,
    require_state,
    with_defaults,
)
from rollout_actors.environments.types import Arguments, Client, State
from rollout_actors.threads import GIVEN_UP, within
from shared.metrics import mean

if TYPE_CHECKING:
    from rollout_actors.environments.environment import Environment

_LOGGER = logging.getLogger(__name__)
_UNLIMITED = nullcontext()


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Limits of rollouts generated and scored at a time; None: no limit."""

    generation: int | None
    scoring: int | None

    @classmethod
    def from_limits(cls, both: int, generation: int | None, scoring: int | None) -> Concurrency:
        """Make the limits from the arguments of `Environment.generate`.

        `both` replaces a limit that is None; a number under 1 means no limit.
        """
        limits = [both if limit is None else limit for limit in (generation, scoring)]
        return cls(*(limit if limit > 0 else None for limit in limits))


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The arguments of one call of `Environment.generate`, with defaults filled in."""

    client: Client
    model: str
    sampling_args: Arguments
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
    """Play and score one rollout for each dataset row, as `Environment.generate` describes.

    If it is cancelled, every rollout is cancelled and cleaned up.
    """
    started = datetime.now().astimezone()
    began_s = time.perf_counter()
    # Scoring uses the rollouts' limit by default: a hanging function would hold a tool's thread.
    key = "rollout_timeout_s" if call.scoring_timeout_s is None else "scoring_timeout_s"
    with tqdm(total=len(examples), disable=not call.shows_progress, unit="rollout") as bar:
        batch = _Batch(environment, examples, call, bar)
        with time_limit(getattr(call, key), key):
            await batch.run()
    states = batch.states
    metadata = metadata_of(environment, call.model, call.sampling_args, states)
    metadata.date = started.isoformat(timespec="seconds")
    metadata.time_ms = 1000 * (time.perf_counter() - began_s)
    _warn_of_failures(environment, metadata, states)
    return GenerateOutputs.from_states(states, metadata)


class _Batch:
    """The rollouts of one `generate` call, each identified by the index of its input.

    A unit is scored together: one rollout, or all rollouts of an example if they are compared.
    """

    def __init__(
        self, environment: Environment, examples: Examples, call: GenerateCall, bar: tqdm[NoReturn]
    ) -> None:
        self._environment = environment
        self._call = call
        self._bar = bar
        self._together = SCORED_TOGETHER.get() or ScoredTogether(1)
        SCORED_TOGETHER.set(None)  # `generate` calls of its rollouts are scored separately
        self._inputs = with_positions(examples)
        check_one_row_per_id(examples, self._inputs)
        if is_rollout_client(call.client):
            # Only these clients derive seeds from positions.
            check_positions(self._inputs)
        self._generation = _bound(call.concurrency.generation)
        self._scoring = _bound(call.concurrency.scoring)
        outer = current_scope()
        self._outermost = None if outer is None else outer.outermost
        self._path = None if outer is None else outer.child_path()
        self._finished: list[State | None] = [None] * len(self._inputs)
        self._askers: list[Asker | None] = [None] * len(self._inputs)
        askers = ASKERS.get()
        if askers is not None and ASKER.get() is None:
            # All join now, because rollouts that have not begun yet will make calls too.
            joining = [Asker() for _ in self._inputs]
            askers += joining
            self._askers = [*joining]

    @property
    def states(self) -> list[State]:
        """All states in input order. Every rollout must be finished."""
        return [self._state(index) for index in range(len(self._inputs))]

    async def run(self) -> None:
        """Generate all rollouts, and score them if the call asks for it."""
        # Grouped by task too: two environments of a group may use the same ids.
        groups = group_indices((row["task"], row["example_id"]) for row in self._inputs)
        singles = [[index] for index in range(len(self._inputs))]
        if not self._call.scores:
            await self._for_all(singles, self._generate_unit, self._finish)
            return
        units = self._units(groups)
        if self._call.interleaves:
            await self._for_all(units, self._generate_unit, self._score_unit)
        else:
            # `interleave_scoring=False` means: generate all before the first is scored.
            await self._for_all(singles, self._generate_unit)
            await self._for_all(units, self._score_unit)
        await self._score_at_once()
        for group in groups:
            compare_rollouts([self._state(index) for index in group])

    def _units(self, groups: Sequence[list[int]]) -> list[list[int]]:
        """Split examples into units of scoring, in input order."""
        units: list[list[int]] = []
        for group in groups:
            if self._rubric(group[0]).compares_rollouts:
                units.append(group)
            else:
                units.extend([index] for index in group)
        return sorted(units)

    async def _for_all(
        self, units: Sequence[list[int]], *phases: Callable[[list[int]], Awaitable[None]]
    ) -> None:
        """Run the phases of each unit one after the other, in a task for each unit."""

        async def run_phases(unit: list[int]) -> None:
            for phase in phases:
                await phase(unit)

        # An error that does not belong to a rollout, or a cancellation, ends all tasks.
        async with asyncio.TaskGroup() as tasks:
            for unit in units:
                tasks.create_task(run_phases(unit))

    def _generate_unit(self, unit: list[int]) -> Awaitable[None]:
        if len(unit) == 1:
            return self._generate(unit[0])
        return self._for_all([[index] for index in unit], self._generate_unit)

    async def _generate(self, index: int) -> None:
        async with self._generation or _UNLIMITED:
            queue_time = Stopwatch()
            given_up: list[str] = []
            began_s = time.perf_counter()
            row = self._inputs[index]
            scope = self._scope(index)
            try:
                state = await run_in_task(self._rollout(index, scope, queue_time, given_up))
            except FAILURES as error:  # recorded in the state; the other rollouts continue
                reraise_cancellation(error)
                _LOGGER.debug("rollout %d failed", index, exc_info=error)
                state = scope.state or new_state({"example_id": row.get("id", 0), **row})
                state = with_defaults(state, row)
                await self._note_failure(state, error)
            finally:
                if (asker := self._askers[index]) is not None:
                    asker.is_done = True
            # Without time in queues, which depends on the engines' load and not on the rollout.
            duration_ms = 1000 * (time.perf_counter() - began_s - queue_time.total_s)
            state["timing"]["generation_ms"] = duration_ms
            state["timing"]["total_ms"] = duration_ms
            if given_up:
                state["given_up"] = given_up
        self._finished[index] = state

    def _scope(self, index: int) -> RolloutScope:
        row = self._inputs[index]
        path = "" if self._path is None else f"{self._path}.{index}"
        return RolloutScope(None, row, self._outermost or row, path)

    async def _rollout(
        self, index: int, scope: RolloutScope, queue_time: Stopwatch, given_up: list[str]
    ) -> State:
        """Play a rollout in its own task, so that its context variables end with it."""
        if (asker := self._askers[index]) is not None:
            ASKER.set(asker)
        QUEUE_TIME.set(queue_time)
        GIVEN_UP.set(given_up)
        environment = self._environment
        call = self._call
        scope.environment = environment.member(scope.input["task"])
        remedy = "check what its turns, tools and cleanups wait for, or raise rollout_timeout_s"
        enter_scope(scope)
        async with within(
            call.rollout_timeout_s, "rollout not done after rollout_timeout_s", remedy
        ):
            result = await awaited(
                environment.rollout(scope.input, call.client, call.model, call.sampling_args)  # type: ignore[arg-type]
            )
        state = with_defaults(require_state(result, "rollout", environment), scope.input)
        # An environment may call the model and write the steps itself.
        responses = [step.get("response") for step in state["trajectory"]]
        state["is_truncated"] = bool(state["is_truncated"]) or any(map(is_cut, responses))
        return state

    async def _note_failure(self, state: State, error: BaseException) -> None:
        state["error"] = describe_error(error)
        state["is_completed"] = True
        state["stop_condition"] = "error"
        if state["completion"] is None:
            environment = self._environment
            try:
                async with asyncio.timeout(environment.cleanup_timeout_s):
                    await run_in_task(environment._render_completion(state))
            except FAILURES as again:  # possibly the same error; the steps are kept
                reraise_cancellation(again)
                state["completion"] = "" if environment.message_type == "completion" else []

    async def _score_unit(self, unit: list[int]) -> None:
        """Score and report a unit, unless its rubric scores all rollouts of the call together."""
        if not self._rubric(unit[0]).scores_all_at_once:
            await self._score(unit)
            await self._finish(unit)

    async def _score_at_once(self) -> None:
        """Score and report the rollouts whose rubrics override `score_rollouts`."""
        indices = [
            index for index in range(len(self._inputs)) if self._rubric(index).scores_all_at_once
        ]
        await self._together.score(
            [(self._rubric(index), self._parser(index), self._state(index)) for index in indices],
            self._call.concurrency.scoring,
        )
        await self._finish(indices)

    async def _score(self, unit: list[int]) -> None:
        """Score the rollouts of a unit that have not failed."""
        if states := _sound([self._state(index) for index in unit]):
            scope = self._scope(unit[0])
            scope.path += "="  # model calls of reward functions have their own seeds
            enter_scope(scope)
            QUEUE_TIME.set(None)  # it belongs to an outer rollout, which is not scored here
            with lent_parser(self._parser(unit[0])):
                await score_unit(self._rubric(unit[0]), states, self._scoring)

    async def _finish(self, indices: Sequence[int]) -> None:
        """Complete the reward and the total time of rollouts, and report that they are done."""
        for index in indices:
            state = self._state(index)
            timing = state["timing"]
            # A number, because every column of results has one; averages exclude failed rollouts.
            if state["error"] is not None and self._call.scores:
                state["reward"] = 0.0
                give_to_steps(state)
            timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]
            self._bar.update()
            if self._call.on_rollout is not None:
                self._call.on_rollout(index, state)

    def _rubric(self, index: int) -> Rubric:
        return self._environment.rubric.for_task(self._inputs[index]["task"])

    def _parser(self, index: int) -> Parser:
        return self._environment.member(self._inputs[index]["task"]).parser

    def _state(self, index: int) -> State:
        state = self._finished[index]
        assert state is not None, "rollouts are generated before they are scored"
        return state


class ScoredTogether:
    """Scores the rollouts of several `Environment.generate` calls by one call of their rubric.

    Each `generate` call waits until all of these calls have generated their rollouts.
    """

    def __init__(self, num_calls: int) -> None:
        self._num_missing = num_calls
        self._rollouts: list[tuple[Rubric, Parser, State]] = []
        self._is_done = asyncio.Event()

    async def score(
        self, rollouts: Sequence[tuple[Rubric, Parser, State]], bound: int | None
    ) -> None:
        """Wait for the other `generate` calls, and score these rollouts together with theirs.

        `bound`: limit of rollouts that are scored at a time; None: no limit.
        """
        self._rollouts += rollouts
        self._num_missing -= 1
        if not self._num_missing:
            # One call per rubric, because it compares all rollouts that it receives.
            for same in group_indices(id(rubric) for rubric, _, _ in self._rollouts):
                rubric, parser, _ = self._rollouts[same[0]]
                states = _sound([self._rollouts[index][2] for index in same])
                await _score_at_once(rubric, parser, states, bound)
            self._is_done.set()
        await self._is_done.wait()


SCORED_TOGETHER: ContextVar[ScoredTogether | None] = ContextVar("scored_together", default=None)
"""Scores the next `Environment.generate` call in this context together with other calls.
None: the call scores its own rollouts."""


async def _score_at_once(
    rubric: Rubric, parser: Parser, states: Sequence[State], bound: int | None
) -> None:
    if not states:
        return
    began_s = time.perf_counter()
    try:
        with lent_parser(parser):
            await run_in_task(
                awaited(rubric.score_rollouts(states, -1 if bound is None else bound))
            )
    except FAILURES as error:
        reraise_cancellation(error)
        note_failed_rubric(states, error)
    settle(states, rubric)
    for state in states:
        if not state["timing"]["scoring_ms"]:  # the share of each rollout is unknown
            state["timing"]["scoring_ms"] = 1000 * (time.perf_counter() - began_s)


def _sound(states: Sequence[State]) -> list[State]:
    """Return the states to score. Failed rollouts are not scored and have no metrics."""
    for state in states:
        if state["error"] is not None:
            state["metrics"] = {}
    return [state for state in states if state["error"] is None]


def _bound(limit: int | None) -> asyncio.Semaphore | None:
    return None if limit is None else asyncio.Semaphore(limit)


def metadata_of(
    environment: Environment, model: str, sampling_args: Arguments, states: Sequence[State]
) -> GenerateMetadata:
    """Return counts and averages over finished rollouts; failed ones are not in the averages."""
    sound = [state for state in states if state["error"] is None]
    metrics = dict.fromkeys(name for state in states for name in state["metrics"] or {})
    return GenerateMetadata(
        env_id=environment.name,
        env_args=environment.env_args,
        model=model,
        sampling_args=sampling_args,
        num_examples=len({repr((state["task"], state["example_id"])) for state in states}),
        rollouts_per_example=1,
        num_errors=len(states) - len(sound),
        num_truncated=sum(bool(state["is_truncated"]) for state in states),
        avg_reward=mean([state["reward"] for state in sound if state["reward"] is not None]),
        avg_metrics={
            name: mean(
                [state["metrics"][name] for state in states if name in (state["metrics"] or {})]
            )
            for name in metrics
        },
        num_reward_errors=dict(
            Counter(name for state in states for name in state.get("reward_errors", {}))
        ),
        num_given_up=dict(Counter(name for state in states for name in state.get("given_up", ()))),
    )


def _warn_of_failures(
    environment: Environment, metadata: GenerateMetadata, states: Sequence[State]
) -> None:
    if metadata.num_errors:
        first = next(state for state in states if state["error"] is not None)
        _LOGGER.warning(
            "%d of %d rollouts failed, the first of example %r: %s",
            metadata.num_errors,
            len(states),
            first["example_id"],
            first["error"],
        )
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
    counts = [num_tool_calls(state) for state in states if state["trajectory"]]
    offered = [count for count in counts if count is not None]
    if problem := environment._uncalled_tools.problem(len(offered), sum(offered)):
        _LOGGER.warning("%s: %s", environment.name, problem)
