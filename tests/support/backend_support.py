"""What tests of backends share: a host for those that live in the learner's process, and a common face of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from engine_support import SmallLearner, generated, small_settings
from serve_process import OneServer

from launch.runtime.rollout_client import ActorPool
from rollout_actors.engine.settings import EngineSettings
from shared.errors import RolloutError
from shared.protocols import RolloutBackend
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.transports import Transport


class ModelHost:
    """`shared.protocols.BackendHost` over the small learner's model. Remembers when it was offloaded."""

    def __init__(self, learner: SmallLearner, name: str = "colocated") -> None:
        self._learner = learner
        self._name = name
        self.is_offloaded = False
        self.offloads: list[bool] = []
        """Whether the model went along, each time."""
        self.num_asked = 0
        """How often whoever generates asked whether to go on."""
        self.stops_at: int | None = None
        """At which of these times the answer is no."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def model(self) -> Any:
        return self._learner.model

    @property
    def processor(self) -> Any:
        return self._learner.processor

    def require_going_on(self) -> None:
        self.num_asked += 1
        if self.num_asked == self.stops_at:
            raise RolloutError("told to stop", actor=self._name, phase="generate")

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    @contextmanager
    def offloaded(self, *, model: bool = True) -> Iterator[None]:
        assert not self.is_offloaded, "the host was offloaded twice"
        self.is_offloaded = True
        self.offloads.append(model)
        try:
            yield
        finally:
            self.is_offloaded = False


def colocated_settings(checkpoint: Path, **changes: Any) -> EngineSettings:
    """Of engines in the tests' own process. They have one worker extension, because vLLM mixes the first into its worker's class for good."""
    return small_settings(checkpoint, transport=Transport.INPROC, worker_extension="counting_worker.CountingWorker", **changes)


def what_was_said(rollouts: Sequence[Rollout]) -> list[tuple[object, ...]]:
    """Everything in a rollout that must not depend on who generated it, when, and beside whom."""
    return [
        (r.step, r.position, r.sample_id, r.prompt_token_ids, r.response_token_ids, r.logprobs, r.stop_token_id, r.stop_token_logprob, r.finish_reason, r.seed)
        for r in rollouts
    ]


@dataclass
class UnderTest:
    """One backend, as its contract sees it."""

    name: str
    backend: RolloutBackend
    learner: SmallLearner
    """Its weights are what a sync brings; it knows what the right answer is."""
    take_rows: Callable[[], list[int]] | None = None
    """How many sequences were decoded together in each step since the last time; None where nothing is decoded."""
    is_model: bool = True
    """Whether it runs the learner's model; a script does not."""
    is_engine: bool = True
    """Whether vLLM does."""
    guard: RepeatGuardSettings | None = None
    processes: list[psutil.Process] = field(default_factory=list)
    """Its own that are no children of this process."""
    children_before: set[psutil.Process] = field(default_factory=set)
    """Of this process, from before it was made."""
    servers: list[psutil.Process] = field(default_factory=list)
    """Those of a server that it calls and has not started."""
    openai: tuple[str, str] | None = None
    """Address and key of that server, where it has the routes of the OpenAI API too."""

    def forget(self) -> None:
        """The learner has the checkpoint's weights again."""
        with torch.no_grad():
            for name, parameter in self.learner.model.named_parameters():
                parameter.copy_(self.learner.start[name])

    def sync(self) -> SyncReport:
        return self.backend.receive_weights(self.learner.offer_weights())


class OfEngines:
    """Engines in processes of their own, as a backend: the driver's part of a round and of a sync is played here."""

    def __init__(self, pool: ActorPool | OneServer, learner: SmallLearner) -> None:
        self._pool = pool
        self._learner = learner

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return generated(self._pool, requests) if isinstance(self._pool, ActorPool) else self._pool.generate(requests)

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        receiving = self._pool.receive_weights(offer)
        self._learner.send_weights(offer).result()
        return receiving.result()

    @property
    def version(self) -> int:
        return self._pool.version

    def close(self) -> None:
        self._pool.close()


def child_processes() -> set[psutil.Process]:
    """Of this process, Ray's apart, which come and go by themselves."""
    children = set()
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if not any("ray" in word for word in child.cmdline()[:4]):
                children |= {child, *child.children(recursive=True)}
    return children
