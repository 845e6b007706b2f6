"""The ranks of a replay: this process, or one process for each where the run had several.

    rank 0 -> its rendezvous -> all ranks learn -> one report of each rank for every step

Nothing of Ray: the processes are forked from a server that has imported the learner once, and end
with this one.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from launch.replay.learning import RecordedStep, Recording, learn_again
from learner.model.ranks import RankTopology, Rendezvous
from shared.config import RunConfig
from shared.errors import (
    CollectiveError,
    ConfigError,
    LearnerError,
    PortableError,
    Timeout,
    ended,
    late,
)
from shared.metrics import RankReport, StepReport, merge_reports
from shared.schedule import RunSchedule
from shared.weight_sync.transports import Device, TransportKind

Reports = Generator[RankReport, None, None]
Work = Callable[[Recording, RankTopology, Rendezvous | None], Reports]

_HOST = "127.0.0.1"
_CLOSED_S = 10.0
"""Seconds for a killed process to be gone, and for a rank to follow one that failed for it."""


def learned_steps(
    recording: Recording, work: Work = learn_again
) -> Generator[StepReport, None, None]:
    """Yield the report of each step, of as many ranks as the run had. `work` is what a rank does.

    Raises:
        LearnerError: a rank's process ended, or was late; names the rank.
        PortableError: what a rank raised, rather than what another one made of its absence.
    """
    world_size = recording.config.learner.world_size
    has_gpu = torch.cuda.is_available()
    device = Device.CUDA if has_gpu else Device.CPU
    if world_size == 1:
        place = RankTopology(TransportKind.GLOO, (), device=device)
        # Closed here, and not when the garbage is collected.
        with closing(work(recording, place, None)) as reports:
            for report in reports:
                yield merge_reports([report])
        return
    if has_gpu and torch.cuda.device_count() < world_size:
        raise ConfigError(
            f"run: it has {world_size} learner ranks, and this machine shows"
            f" {torch.cuda.device_count()} GPUs; replay it where each rank has one"
        )
    ranks: list[_Rank] = []
    try:
        # Rank 0 first: the others are told where it is.
        endpoint = ""
        for rank in range(world_size):
            place = RankTopology(
                TransportKind.GLOO, (), _HOST, device, rank, world_size, rendezvous=endpoint
            )
            ranks.append(_Rank.start(recording, place, work))
            if rank == 0:
                (endpoint,) = _answers(ranks, recording.config.timeouts.limit("start_s"))
        is_started = False
        for step in recording.steps:
            limit = _limit(recording.config, step, is_started=is_started)
            is_started = True
            yield merge_reports(_answers(ranks, limit))
        # What has nothing left to say ends by itself, and in order.
        for one in ranks:
            one.process.join(_CLOSED_S)
    finally:
        for one in ranks:
            one.end()


@dataclass(frozen=True, slots=True)
class _Rank:
    process: BaseProcess
    pipe: Connection

    @property
    def name(self) -> str:
        return self.process.name

    @classmethod
    def start(cls, recording: Recording, place: RankTopology, work: Work) -> _Rank:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([learn_again.__module__])
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(theirs, recording, place, work),
            name=f"rank {place.rank}",
            daemon=True,
        )
        process.start()
        # Held by the rank alone, so that its end is seen here.
        theirs.close()
        return cls(process, ours)

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(_CLOSED_S)


def _serve(pipe: Connection, recording: Recording, place: RankTopology, work: Work) -> None:
    """Be a rank: send the rendezvous, if it is rank 0's, and then its reports or its error."""
    if place.device is Device.CUDA:
        # Before anything asks for a GPU. Not run on one.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(rank) for rank in range(place.world_size)]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[place.rank]
    rendezvous = None
    if place.rank == 0:
        rendezvous = Rendezvous(_HOST)
        pipe.send(rendezvous.endpoint)
        place = replace(place, rendezvous=rendezvous.endpoint)
    try:
        for report in work(recording, place, rendezvous):
            pipe.send(report)
    except PortableError as error:
        pipe.send(error)


def _limit(config: RunConfig, step: RecordedStep, *, is_started: bool) -> Timeout:
    """Return the longest that a step may take: of the first one with all that is loaded."""
    timeouts = config.timeouts
    num_rounds = len(step.rounds) * (1 + RunSchedule(config).refill_rounds)
    seconds = timeouts.learn_s * (num_rounds * config.training.updates_per_batch + 1)
    key = "timeouts.learn_s for each round and the update"
    if not is_started:
        return Timeout(seconds + timeouts.start_s, f"timeouts.start_s + {key}")
    return Timeout(seconds, key)


def _answers(ranks: Sequence[_Rank], limit: Timeout) -> list[Any]:
    """Return what each rank sends next, in their order; raise the error that tells most."""
    answers: dict[str, Any] = {}
    waiting = list(ranks)
    blamed: CollectiveError | None = None
    deadline = time.monotonic() + limit.seconds
    while waiting:
        ready = wait([rank.pipe for rank in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            if blamed is not None:
                raise blamed
            names = ", ".join(rank.name for rank in waiting)
            check = "its stack with `py-spy dump`"
            raise LearnerError(late(names, limit, check), phase="replay")
        for rank in [rank for rank in waiting if rank.pipe in ready]:
            waiting.remove(rank)
            try:
                answer = rank.pipe.recv()
            except EOFError as error:
                rank.process.join(_CLOSED_S)
                how = f"exit code {rank.process.exitcode}; its traceback, if any, is above"
                raise LearnerError(ended(f"{rank.name}'s", how), phase="replay") from error
            if isinstance(answer, CollectiveError):
                # Another one has failed, and knows more: it has ended, or is about to say why.
                blamed = blamed or answer
                deadline = min(deadline, time.monotonic() + _CLOSED_S)
            elif isinstance(answer, PortableError):
                raise answer
            answers[rank.name] = answer
    if blamed is not None:
        raise blamed
    return [answers[rank.name] for rank in ranks]
