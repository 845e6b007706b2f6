"""A learner rank: a `Learner` and the backend next to it, and the Ray actor that holds both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray

from shared.config import RunConfig
from shared.errors import RolloutError
from shared.protocols import MakeBackend, RankBackend, end_with_parent
from shared.rollouts import SyncReport, WeightOffer
from shared.sent_requests import PictureShelf, SentRequests
from shared.trajectory import ExampleCounts

# The driver imports this module, and need not pay for torch, transformers and peft.
if TYPE_CHECKING:
    import torch

    from learner.learner import Learner
    from learner.model.ranks import RankTopology, Rendezvous

T = TypeVar("T")

STOPPING = "stopping"
"""Ray's concurrency group for what must not wait: a second thread, next to the learner's own."""


class EngineHost:
    """A learner rank as the backend in its process sees it (`shared.protocols.BackendHost`)."""

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        """Raises ConfigError where `rollout_matching.offload` asks for what cannot be done here."""
        from learner.model.offload import require_offload

        self._rollouts = config.rollout_matching
        self._learner = learner
        require_offload(config.rollout_matching, config.learner, learner.loaded.device)

    @property
    def name(self) -> str:
        return self._learner.name

    @property
    def model(self) -> Any:
        return self._learner.loaded.model

    @property
    def processor(self) -> Any:
        return self._learner.loaded.processor

    @property
    def tokenizer(self) -> Any:
        return self._learner.loaded.tokenizer

    def raise_if_stopping(self) -> None:
        if self._learner.is_told_to_stop:
            raise RolloutError(
                "told to stop, because the run is being ended", actor=self.name, phase="generate"
            )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._learner.parallel.weights.tensors()

    def offloaded(self, *, model: bool = True) -> AbstractContextManager[None]:
        from learner.model.offload import offloaded

        learner = self._learner
        return offloaded(
            self._rollouts,
            learner.loaded.model,
            learner.optimizer,
            learner.loaded.device,
            with_model=model,
            reference=None if learner.reference is None else learner.reference.copy,
        )


class LearnerRank:
    """One learner rank: its learner, and its backend if the rank generates its own rollouts.

    The driver's `launch.processes.learner_client.LearnerClient` runs functions on it.
    """

    loaded: Learner | None = None
    """None before `start`."""
    backend: RankBackend | None = None
    _rendezvous: Rendezvous | None = None
    _requests: Sequence[Any] = ()
    """Requests of the step, the refill or the report that began last."""

    def __init__(
        self, shelf: PictureShelf, get: Callable[[list[Any]], list[Mapping[str, np.ndarray]]]
    ) -> None:
        """`get` returns the values of the references that the shelf makes."""
        self._shelf = shelf
        self._get = get

    @property
    def learner(self) -> Learner:
        assert self.loaded is not None, "start comes first"
        return self.loaded

    def open_rendezvous(self, config: RunConfig) -> str:
        """Open the ranks' meeting point, on rank 0. Returns `address:port`."""
        from learner.model.ranks import Rendezvous

        self._rendezvous = Rendezvous(_node_address(config))
        return self._rendezvous.endpoint

    def start(
        self,
        config: RunConfig,
        topology: RankTopology,
        make_backend: MakeBackend | None,
        examples: ExampleCounts | None,
    ) -> tuple[int, bool]:
        """Load model and data. Returns the number of torch's threads, and whether the next offer is
        of an adapter.
        """
        # Not in the constructor, whose exceptions Ray turns into a dead actor.
        import torch

        from learner.learner import Learner

        topology = replace(topology, address=_node_address(config))
        self.loaded = Learner(config, topology, self._rendezvous, examples)
        if make_backend is not None:
            self.backend = make_backend(EngineHost(config, self.learner))
        return torch.get_num_threads(), self.learner.publisher.offers_adapter

    def begin(self, requests: Sequence[Any]) -> int:
        """Keep the requests of a step, a refill or a report for `requests`; return their number."""
        self._requests = requests
        return len(requests)

    def requests(self, first: int, stop: int) -> SentRequests:
        """Return some of the requests, whose pictures are read here."""
        # Engines have these while the next ones are made.
        return self._shelf.send(self._requests[first:stop])

    def generate(self, objects: Sequence[SentRequests], places: range) -> list[Any]:
        """Generate by the backend next to the learner."""
        assert self.backend is not None, "this rank was started without a backend"
        return self.backend.generate(SentRequests.chosen(objects, places).with_data(self._get))

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        assert self.backend is not None, "this rank was started without a backend"
        return self.backend.receive_weights(offer)

    def close(self) -> None:
        """End the backend, if there is one, whatever it is doing."""
        if self.backend is not None:
            self.backend.close()


class LearnerActor:
    """A `LearnerRank` on Ray, in a process of its own, which runs functions in order."""

    def __init__(self) -> None:
        end_with_parent()
        self._rank = LearnerRank(PictureShelf(ray.put), ray.get)

    def run(self, task: Callable[..., T], *arguments: Any) -> T:
        """Call `task(rank, *arguments)`. Ray replaces references by their values before."""
        return task(self._rank, *arguments)

    def run_kept(self, task: Callable[..., list[T]], *arguments: Any) -> tuple[list[T], int]:
        """Return the task's answers, and their number for a caller who leaves the answers here."""
        answers = task(self._rank, *arguments)
        return answers, len(answers)

    @ray.method(concurrency_group=STOPPING)
    def run_at_once(self, task: Callable[[LearnerRank], T]) -> T:
        """Call `task(rank)` while another function may be running."""
        return task(self._rank)


def _node_address(config: RunConfig) -> str:
    """Return an address of this node that engines and other ranks reach."""
    section = config.rollout_matching.servers
    has_local_servers = section is None or all(server.is_loopback for server in section.servers)
    if config.cluster.address == "local" and has_local_servers:
        return "127.0.0.1"  # nothing then leaves the machine
    return str(ray.util.get_node_ip_address())
