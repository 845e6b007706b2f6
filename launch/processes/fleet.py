"""Starts, checks, replaces and ends a run's rollout actors, or its environment actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ray
from ray.exceptions import GetTimeoutError, RayError

from launch.processes.replacements import (
    START_CHECK,
    Replacement,
    Replacements,
    StallWatch,
    ended_error,
)
from launch.run_folder.console import Wait
from rollout_actors.engine.ray_calls import RayCall, next_ready, result_of
from shared.config.algorithm import EnvironmentSection, TeacherSection
from shared.config.job import TimeoutsSection
from shared.config.rollout import ServerSection
from shared.errors import ConfigError, LostStartError, RolloutError, Timeout, WeightSyncError
from shared.protocols import CLOSED_S
from shared.rollouts import TRIES
from shared.weight_sync.phases import POOL_MARGIN_S

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

ALIVE_S = 30.0
"""Seconds within which an idle actor must answer a check that it is not stopped or stuck.

`Fleet.lose_silent` waits longer if another limit is longer.
"""
HTTP_CLIENT_MARGIN_S = 60.0
"""Seconds that the driver waits longer than a server's client, for its work around requests."""


@dataclass(frozen=True, slots=True)
class RolloutTimeouts:
    """The time limits of the driver's waits for rollout or environment actors."""

    start: Timeout
    generate: Timeout | None
    """Limit of a round; None: the driver sets no limit, because the actors watch their servers."""
    sync_phase: Timeout
    """Limit of each phase of a weight sync."""
    stall: Timeout | None = None
    """Limit for an engine with open requests to sample a token, and for an actor to answer a check.
    None: no actor is watched in a round."""
    join: Timeout | None = None
    """Limit for the engines to connect to the sending learner rank; None: `sync_phase`."""
    check: str = (
        "the engine's log; if the engine is only slow, raise this limit, or lower"
        " rollout_matching.max_new_tokens"
    )
    """What to check if a round is late; the end of the error's message."""
    start_check: str = START_CHECK
    """What to check if a start is late."""
    closed_s: float = CLOSED_S
    """Seconds for all actors together to end by themselves, before they are killed."""

    @classmethod
    def for_actors(cls, timeouts: TimeoutsSection) -> RolloutTimeouts:
        return cls(
            timeouts.limit("start_s"),
            timeouts.limit("generate_s"),
            timeouts.limit("sync_phase_s"),
            stall=timeouts.limit("stall_s"),
        )

    @classmethod
    def for_servers(
        cls, section: ServerSection, timeouts: TimeoutsSection, *, watched: bool
    ) -> RolloutTimeouts:
        """Return the limits for engines that are servers.

        The servers' clients limit each call themselves, and try it `TRIES` times.

        `watched`: a server that stalls during a round is given up, even if calls to it are open.
        """
        key = "rollout_matching.vllm.server"
        start_s = section.timeout_s + timeouts.start_s
        generate = None
        if section.infer_timeout_s is not None and section.infer_timeout_s > 0:
            generate = Timeout(
                TRIES * section.infer_timeout_s + HTTP_CLIENT_MARGIN_S,
                f"{TRIES} x {key}.infer_timeout_s + {HTTP_CLIENT_MARGIN_S:g}",
            )
        return cls(
            Timeout(start_s, f"{key}.timeout_s + timeouts.start_s"),
            generate,
            timeouts.limit("sync_phase_s"),
            stall=section.answer_limit if watched else None,
            join=section.answer_limit,
        )

    @classmethod
    def for_ranks(
        cls, timeouts: TimeoutsSection, environment: EnvironmentSection | None
    ) -> RolloutTimeouts:
        """Return the limits for learner ranks that generate, perhaps through an environment."""
        if environment is None:
            return cls.for_actors(timeouts)
        return cls.for_environments(timeouts, environment.teacher)

    @classmethod
    def for_environments(
        cls, timeouts: TimeoutsSection, teacher: TeacherSection | None
    ) -> RolloutTimeouts:
        """Return the limits for environment actors. They are longer than the limits of an engine
        or a teacher, so that the error of a late engine or teacher comes first.
        """
        limits = cls.for_actors(timeouts)
        start, start_check = limits.start, limits.start_check
        if teacher is not None:
            # An actor waits for the teacher, and then asks it about its vocabulary.
            waits = 1 + TRIES
            start = Timeout(
                timeouts.start_s + waits * teacher.timeout_s,
                f"{start.key} + {waits} x environment.teacher.timeout_s",
            )
            start_check = "what the environment loads, and whether the teacher answers"
        return replace(
            limits,
            start=start,
            start_check=start_check,
            generate=Timeout(2 * timeouts.generate_s, "2 x timeouts.generate_s"),
            check="what the environment waits for (`py-spy dump`); if tools or rewards only need"
            " longer, raise this limit",
        )


class Fleet:
    """The rollout actors of a run, or its environment actors. Lost actors are replaced."""

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        names: Sequence[str],
        timeouts: RolloutTimeouts,
        *,
        devices: Sequence[int] = (),
        asks_next_on_failure: bool = False,
        replacements: Replacements | None = None,
    ) -> None:
        """Become the owner of these Ray actors.

        Args:
            devices: number of rollout devices of each actor; empty: the actors report it at the
                start.
            asks_next_on_failure: whether the requests of an actor that raised an UnreachableError
                go to the next actor, which first answers its own requests. For servers launched
                elsewhere.
            replacements: starts new actors in place of lost actors. The requests of a lost actor go
                to other actors. None: a lost actor is an error.
        """
        self.actors = tuple(actors)
        self.names = tuple(names)
        self.timeouts = timeouts
        self.devices = tuple(devices)
        """Number of rollout devices of each actor, in order; empty before the start."""
        self.asks_next_on_failure = asks_next_on_failure
        self._replacements = replacements
        self._starting: list[ObjectRef] = []
        """References to the answers of a start that was begun and is not waited for yet."""

    @property
    def replaces_lost(self) -> bool:
        """Return whether new actors are started in place of lost ones."""
        return self._replacements is not None

    def named(self) -> list[tuple[str, ActorHandle]]:
        return list(zip(self.names, self.actors, strict=True))

    def watch(self) -> StallWatch | None:
        """Return a detector of stalled actors for one round; None if there is no stall limit."""
        limit = self.timeouts.stall
        return None if limit is None else StallWatch(self.names, limit)

    def begin_start(self) -> None:
        """Ask all actors to start, and do not wait: `start` does."""
        self._starting = [actor.start.remote() for actor in self.actors]

    def start(self) -> None:
        """Start all actors at once and wait for them. Actors killed during the start are replaced.

        The time limit begins now, also after `begin_start`.

        Raises:
            RolloutError: phase "start"; a LostStartError if another start may succeed.
            ConfigError: two base_urls lead to the same server.
        """
        timeouts = self.timeouts
        call = RayCall(
            "start", timeouts.start, timeouts.start_check, RolloutError, gone=LostStartError
        )
        deadline = call.deadline()
        if not self._starting:
            self.begin_start()
        waiting = {answer: index for index, answer in enumerate(self._starting)}
        self._starting = []
        devices: dict[int, int] = {}
        processes = [""] * len(self.actors)
        while waiting:
            answer = next_ready(dict.fromkeys(waiting, deadline))
            if answer is None:
                # Not replaced: if the limit is too short for the model, further attempts would be
                # late too.
                names = [self.names[index] for index in waiting.values()]
                raise replace(call, error=LostStartError).timeout_error(names)
            index = waiting.pop(answer)
            if waiting:
                num = len(self.actors)
                Wait.count("start", num - len(waiting), num, "actors have started")
            try:
                devices[index], processes[index] = result_of(call, self.names[index], answer)
            except LostStartError as error:
                if self._replacements is None:
                    raise
                self._replacements.lose(index, self.actors[index], error)
        devices |= self._take_over()
        self.devices = tuple(devices[index] for index in range(len(self.actors)))
        _require_several(processes)

    def lose(self, index: int, error: RolloutError | WeightSyncError) -> None:
        """Replace the lost actor `index`. Raises `error` if no more actors may be replaced."""
        if self._replacements is None:
            raise error
        self._replacements.lose(index, self.actors[index], error)

    def lose_dead(self, *, after_failed_sync: bool = False) -> None:
        """Replace all actors that have ended, or do not answer although they are idle.

        `after_failed_sync`: see `lose_silent`.
        """
        # Servers that are not replaced are asked too, so that one with other weights is reported.
        if self._replacements is not None or self.asks_next_on_failure:
            alive = [actor.check_alive.remote() for actor in self.actors]
            self.lose_silent(alive, after_failed_sync=after_failed_sync)

    def lose_silent(self, answers: Sequence[ObjectRef], *, after_failed_sync: bool = False) -> bool:
        """Replace every actor that fails to answer a check; return whether one was replaced.

        Args:
            answers: references to each actor's answer.
            after_failed_sync: wait longer, because an engine may stay in the failed sync for one
                more phase.
        """
        limit_s = ALIVE_S
        if after_failed_sync:
            # An engine whose peer left a sync stays in it for one phase at most.
            limit_s = max(limit_s, self.timeouts.sync_phase.seconds + POOL_MARGIN_S)
        if self.timeouts.stall is not None:
            limit_s = max(limit_s, self.timeouts.stall.seconds)
        ray.wait(answers, num_returns=len(answers), timeout=limit_s)
        is_lost = False
        for index, (name, answer) in enumerate(zip(self.names, answers, strict=True)):
            error: RolloutError
            try:
                ray.get(answer, timeout=0)
                continue
            except GetTimeoutError:
                check = "check whether its process, or its engine's, is stopped or stuck"
                message = f"no answer in {limit_s:g} s; {check}"
                error = RolloutError(message, actor=name, phase="generate")
            except RayError as raised:
                error = ended_error(name, raised)
            self.lose(index, error)
            is_lost = True
        return is_lost

    def join(self) -> bool:
        """Wait for the replacements of lost actors, and use them from now on.

        Return whether there were any.
        """
        joined = self._take_over()
        for index, num_devices in joined.items():
            if num_devices != self.devices[index]:
                had = f"{self.devices[index]}, which rounds and process groups depend on"
                why = f"came back with {num_devices} rollout devices, but had {had}"
                remedy = "start it with as many devices as before, and continue with `resume=RUN`"
                message = f"{why}; {remedy}"
                raise RolloutError(message, actor=self.names[index], phase="start")
        return bool(joined)

    def _take_over(self) -> dict[int, int]:
        """Wait for the new actors, and put each in the place of the lost actor.

        Return the number of rollout devices of each new actor, by the actor's index.
        """
        joined = {} if self._replacements is None else self._replacements.join()
        actors = list(self.actors)
        for index, (actor, _) in joined.items():
            actors[index] = actor
        self.actors = tuple(actors)
        return {index: num_devices for index, (_, num_devices) in joined.items()}

    def pop_replaced(self) -> list[Replacement]:
        """Return the replacements of lost actors that became ready since the last call."""
        return [] if self._replacements is None else self._replacements.pop_done()

    def close(self) -> None:
        """End all actors, and kill those that still run after `closed_s`.

        A second call is harmless.
        """
        if self._replacements is not None:
            self._replacements.close()
        # An actor that is still loading does not take calls.
        closing = [actor.close.remote() for actor in self.actors if self.devices]
        ray.wait(closing, num_returns=len(closing), timeout=self.timeouts.closed_s)
        for actor in self.actors:
            ray.kill(actor)


def _require_several(processes: Sequence[str]) -> None:
    """Raise ConfigError if two base_urls lead to the same server.

    `processes` are the servers' ids. With two addresses, a server would get each weight sync twice,
    and take the second for a sync of another run.
    """
    for index, process in enumerate(processes):
        first = processes.index(process)
        if process and first != index:
            raise ConfigError(
                f"rollout_matching.vllm.server.servers[{index}].base_url: is the same server as"
                f" servers[{first}] under another name; list every server once"
            )
