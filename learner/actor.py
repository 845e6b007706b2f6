"""A learner rank on Ray: a shell around `Learner`, in a process of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from shared.config import RunConfig
from shared.config.derive import rollout_servers
from shared.errors import RolloutError
from shared.protocols import MakeBackend, RankBackend, end_with_parent
from shared.rollouts import SyncReport, WeightOffer
from shared.run_files import Span
from shared.sent_requests import PictureShelf, SentRequests
from shared.trajectory import ExampleCounts

# The driver imports this module, and need not pay for torch, transformers and peft.
if TYPE_CHECKING:
    import torch

    from learner.learner import Learner
    from learner.model.ranks import RankTopology, Rendezvous

STOPPING = "stopping"
"""Ray's concurrency group for `stop` and `close`: a thread beside the learner's own."""


class EngineHost:
    """A learner rank as the backend in its process sees it (`shared.protocols.BackendHost`)."""

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        """Raises ConfigError where `rollout_matching.offload` asks for what cannot be done here."""
        from learner.model.offload import require_offload

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
            self._config,
            learner.loaded.model,
            learner.optimizer,
            learner.loaded.device,
            with_model=model,
            reference=None if learner.reference is None else learner.reference.copy,
        )


class LearnerActor:
    """A `Learner`, and the backend beside it where the rank generates its own rollouts."""

    _learner: Learner
    _rendezvous: Rendezvous | None = None
    _backend: RankBackend | None = None
    _requests: list[Any]
    """Requests of the step, the refill or the report that was begun last."""

    def __init__(self) -> None:
        end_with_parent()
        self._shelf = PictureShelf(ray.put)

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
        self._learner = Learner(config, topology, self._rendezvous, examples)
        if make_backend is not None:
            self._backend = make_backend(EngineHost(config, self._learner))
        return torch.get_num_threads(), self._learner.publisher.offers_adapter

    def begin(self, method: str, *arguments: Any) -> int:
        """Begin a step (`next_requests`), a refill (`refill_requests`) or a report
        (`held_out_requests`).

        Returns the number of its requests, which `requests` gives.
        """
        self._requests = getattr(self._learner, method)(*arguments)
        return len(self._requests)

    def requests(self, first: int, stop: int) -> SentRequests:
        """Return some of the requests, whose pictures are read here."""
        # Engines have these while the next ones are made.
        return self._shelf.send(self._requests[first:stop])

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the learner or of a part of it, such as `publisher.offer`."""
        return attrgetter(method)(self._learner)(*arguments)

    def call_on_rollouts(self, method: str, *shares: list[Any]) -> Any:
        """Call a method of the learner with this rank's rollouts, which Ray resolves here."""
        return self.call(method, list(itertools.chain(*shares)))

    def answers_ahead(self) -> list[Any]:
        return self._learner.answers_ahead()

    def save(self, folder: Path, run: str, background: bool, *shares: list[Any]) -> str | None:
        """Save a checkpoint, with the answers of this rank's part of the next round."""
        answers = list(itertools.chain(*shares))
        return self._learner.save(folder, run, answers, background=background)

    def finish_save(self, wait: bool) -> list[Span] | None:
        return self._learner.finish_save(wait=wait)

    def num_updates(self) -> int:
        return self._learner.num_updates

    @ray.method(concurrency_group=STOPPING)
    def stop(self) -> None:
        """Have the learner stop, beside whatever it is doing."""
        self._learner.stop()

    @ray.method(concurrency_group=STOPPING)
    def close(self) -> None:
        """End the backend, if there is one, whatever it is doing: this process will be killed."""
        if self._backend is not None:
            self._backend.close()

    def generate(self, *objects: SentRequests, places: range) -> tuple[list[Any], int]:
        """Generate by the backend beside the learner, as `EngineActor.generate` does, or
        `EnvironmentActor.generate`.
        """
        assert self._backend is not None, "this rank was started without a backend"
        answers = self._backend.generate(SentRequests.chosen(objects, places).with_data(ray.get))
        return answers, len(answers)

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        assert self._backend is not None, "this rank was started without a backend"
        return self._backend.receive_weights(offer)


def _node_address(config: RunConfig) -> str:
    """Return an address of this node that engines and other ranks reach."""
    section = rollout_servers(config)
    has_local_servers = section is None or all(server.is_loopback for server in section.servers)
    if config.cluster.address == "local" and has_local_servers:
        return "127.0.0.1"  # nothing then leaves the machine
    return str(ray.util.get_node_ip_address())
