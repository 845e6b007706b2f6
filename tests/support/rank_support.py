"""Learner ranks in processes of their own, without Ray: the same processes for one job after the other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from learner.model.ranks import LearnerPlace, ReceiverGroup
from shared.errors import CollectiveError
from shared.weight_sync.transports import Transport

RankJob = Callable[..., Any]
"""`job(place, rendezvous, *arguments)`, of a module that the processes can import."""

_TIMEOUT_S = 240.0


class RankProcesses:
    def __init__(self, world_size: int) -> None:
        # Forked by a server that has imported what takes long: once in a session, and not once for each process.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["learner.learner", "learner.model.ranks", "transformers.models.auto.modeling_auto"])
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: RankJob, *arguments: Any) -> list[Any]:
        """What every rank's job returned, in rank order. Raises what one of them raised."""
        results = self.outcomes(job, *arguments)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            # A rank that waited in vain knows less than the one it waited for.
            raise min(errors, key=lambda error: isinstance(error, CollectiveError))
        return results

    def outcomes(self, job: RankJob, *arguments: Any) -> list[Any]:
        """As `run`, with an exception in the place of a result: EOFError of a process that ended."""
        world_size = len(self._pipes)
        address = ""
        if world_size > 1:
            self._pipes[0].send("rendezvous")
            address = self._answer(self._pipes[0])
        for rank, pipe in enumerate(self._pipes):
            place = LearnerPlace(Transport.GLOO, (ReceiverGroup(1),), rank=rank, world_size=world_size, rendezvous=address)
            pipe.send((job, place, arguments))
        return [self._answer(pipe) for pipe in self._pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()

    @staticmethod
    def _answer(pipe: Connection) -> Any:
        assert pipe.poll(_TIMEOUT_S), f"a rank did not answer in {_TIMEOUT_S:g} s"
        try:
            return pipe.recv()
        except EOFError as error:
            return error


def _serve(pipe: Connection) -> None:
    from learner.model.ranks import Rendezvous

    rendezvous = None
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message == "rendezvous":
            rendezvous = Rendezvous("127.0.0.1")
            pipe.send(rendezvous.endpoint)
            continue
        job, place, arguments = message
        try:
            answer = job(place, rendezvous if place.rank == 0 else None, *arguments)
        except Exception as error:  # handed to the test, which expects it or not
            answer = error
        rendezvous = None
        pipe.send(answer)
