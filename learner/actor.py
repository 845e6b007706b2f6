"""A learner rank on Ray: a thin shell around `Learner`, in a process of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from learner.learner import Learner
from learner.model.offload import offloaded, require_offload
from learner.model.ranks import RankTopology
from shared.config import RunConfig
from shared.config.derive import rollout_servers
from shared.errors import RolloutError
from shared.grounding.evaluation import Outcome
from shared.metrics import RankReport
from shared.protocols import MakeBackend, RolloutBackend
from shared.rollouts import Rollout, SyncReport, WeightOffer
from shared.schedule import StepPlan
from shared.sent_requests import PictureShelf, SentRequests
from shared.trajectory import ExampleCounts
from shared.weight_sync.differences import Differences
from shared.weight_sync.phases import SendReport

if TYPE_CHECKING:
    from learner.learner import Learner
    from learner.model.ranks import Rendezvous


# What a learner rank offers to a backend that lives in its process.


class EngineHost:
    """`shared.protocols.BackendHost` of one rank."""

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        """Raises ConfigError where `rollout_matching.offload` asks for what cannot be done here."""
        self._config = config
        self._learner = learner
        require_offload(config, learner.loaded.device)

    @property
    def name(self) -> str:
        return self._learner.name

    @property
    def model(self) -> Any:
        return self._learner.loaded.model

    @property
    def processor(self) -> Any:
        return self._learner.loaded.processor

    def raise_if_stopping(self) -> None:
        if self._learner.is_told_to_stop:
            raise RolloutError(
                "told to stop, because the run is being ended", actor=self.name, phase="generate"
            )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._learner.parallel.weights.tensors()

    def offloaded(self, *, model: bool = True) -> AbstractContextManager[None]:
        loaded = self._learner.loaded
        return offloaded(
            self._config, loaded.model, self._learner.updater, loaded.device, with_model=model
        )


Share = list[Rollout]

STOPPING = "stopping"
"""Of Ray's concurrency groups: a thread beside the one in which the learner works, where it can be
told to stop.
"""


class LearnerActor:
    """`Learner` with references instead of payloads, and where the rank generates its own rollouts,
    the backend beside it.
    """

    _learner: Learner
    _rendezvous: Rendezvous | None = None
    _backend: RolloutBackend | None = None
    _requests: list[Any]
    """Requests of the step or the report that was begun last."""

    def __init__(self) -> None:
        self._shelf = PictureShelf(ray.put)

    def open_rendezvous(self, config: RunConfig) -> str:
        """On rank 0: where the others find it, `address:port`."""
        from learner.model.ranks import Rendezvous

        self._rendezvous = Rendezvous(_node_address(config))
        return self._rendezvous.endpoint

    def start(
        self,
        config: RunConfig,
        place: RankTopology,
        make_backend: MakeBackend | None,
        examples: ExampleCounts | None,
    ) -> int:
        """Load model and data; the number of torch's threads. Not in the constructor, whose
        exceptions Ray turns into a dead actor.
        """
        # Here and not above: the driver imports this module, and need not pay for torch,
        # transformers and peft.
        import torch

        from learner.learner import Learner

        self._learner = Learner(
            config, replace(place, address=_node_address(config)), self._rendezvous, examples
        )
        if make_backend is not None:
            self._backend = make_backend(EngineHost(config, self._learner))
        return torch.get_num_threads()

    def next_requests(self, plan: StepPlan) -> int:
        """Begin a step. The number of its requests, which `requests` gives."""
        self._requests = self._learner.next_requests(plan)
        return len(self._requests)

    def requests(self, first: int, stop: int) -> SentRequests:
        """Return some of the requests, whose pictures are read here. Engines have them while the
        next ones are made.
        """
        return self._shelf.send(self._requests[first:stop])

    def accumulate(self, *shares: list[Any]) -> None:
        self._learner.accumulate(list(itertools.chain(*shares)))

    def finish_step(self) -> RankReport:
        return self._learner.finish_step()

    def offer_weights(self) -> WeightOffer | None:
        """The offer of rank 0; None on the others, which only take part."""
        return self._learner.publisher.offer()

    def send_weights(self, offer: WeightOffer) -> SendReport:
        return self._learner.publisher.send(offer)

    def sync_done(self, noise: Differences | None) -> None:
        self._learner.publisher.done(noise)

    def fall_back_to_full(self) -> None:
        self._learner.publisher.fall_back_to_full()

    def held_out_requests(self, step: int) -> int:
        """Begin a report, as `next_requests` does a step."""
        self._requests = self._learner.held_out_requests(step)
        return len(self._requests)

    def score(self, *shares: list[Any]) -> list[Outcome]:
        return self._learner.score(list(itertools.chain(*shares)))

    def save(self, folder: Path) -> None:
        self._learner.publisher.save(folder)

    @ray.method(concurrency_group=STOPPING)
    def stop(self) -> None:
        """Beside whatever else the rank is doing."""
        self._learner.stop()

    @ray.method(concurrency_group=STOPPING)
    def close(self) -> None:
        """End the backend beside the learner, if there is one, whatever it is doing: this process
        is going to be killed.
        """
        if self._backend is not None:
            self._backend.close()

    def num_updates(self) -> int:
        return self._learner.num_updates

    def generate(self, *objects: SentRequests, places: range) -> tuple[Share, int]:
        """As `EngineActor.generate`, by the backend beside the learner."""
        assert self._backend is not None, "this rank was started without a backend"
        rollouts = self._backend.generate(SentRequests.chosen(objects, places).with_data(ray.get))
        return rollouts, len(rollouts)

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        assert self._backend is not None, "this rank was started without a backend"
        return self._backend.receive_weights(offer)


def _node_address(config: RunConfig) -> str:
    """An address of this node that engines and other ranks reach: the loopback where all of them
    are on this machine, and nothing then leaves it.
    """
    section = rollout_servers(config)
    if config.cluster.address == "local" and (
        section is None or all(server.is_loopback for server in section.servers)
    ):
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())
