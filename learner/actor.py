"""A learner rank: a `Learner`, an optional engine backend, and the Ray actor that holds both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import ray

from shared.config import RunConfig
from shared.errors import RolloutError
from shared.protocols import MakeBackend, RankBackend, end_with_parent
from shared.rollouts import SyncReport, WeightOffer
from shared.sent_requests import PictureShelf, SentRequests
from shared.trajectory import ExampleCounts

# The driver imports this module and should not load torch, transformers and peft.
if TYPE_CHECKING:
    import torch

    from learner.learner import Learner
    from learner.model.ranks import RankTopology, Rendezvous

T = TypeVar("T")

STOPPING = "stopping"
"""Name of the Ray concurrency group whose calls, such as `Learner.stop`, run in a second thread."""


class EngineHost:
    """The learner's model, tokenizer and weights, for an engine in the learner's process.

    It implements `shared.protocols.BackendHost`.
    """

    updates_next = False

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        """Raises ConfigError if `rollout_matching.offload` is not possible on this device.

        With offload, the learner's tensors are in host memory while the engine generates.
        """
        from learner.model.optimizer.offload import require_offload

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
                "stopped because the run is ending", actor=self.name, phase="generate"
            )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._learner.parallel.weights.tensors()

    def offloaded(self, *, model: bool = True) -> AbstractContextManager[None]:
        from learner.model.optimizer.offload import offloaded

        learner = self._learner
        return offloaded(
            self._rollouts,
            learner.loaded.model,
            learner.optimizer,
            learner.loaded.device,
            with_model=model,
            reference=None if learner.reference is None else learner.reference.copy,
        )


class Started(NamedTuple):
    """Facts about a learner rank that has loaded its model."""

    num_threads: int
    """Number of torch threads."""
    offers_adapter: bool
    """Whether the next weight sync sends only an adapter."""
    findings: tuple[str, ...]
    """What the checks of the model's rows have found, one line each."""


class LearnerRank:
    """The state of one learner rank's process: its learner, and possibly an engine (backend).

    The process has an engine if the rank generates its own rollouts. The driver sends functions,
    which are called with this object (`launch.processes.learner_client.LearnerClient`).
    """

    loaded: Learner | None = None
    """The learner with its model; None before `start`."""
    backend: RankBackend | None = None
    _host: EngineHost | None = None
    """What the backend sees of the learner; None without a backend."""
    _rendezvous: Rendezvous | None = None
    _requests: Sequence[Any] = ()
    """Requests of the latest step, refill or held-out report."""
    _num_left: float = math.inf
    """Number of these that are not answered yet; infinite if an update may not follow them."""

    def __init__(
        self, shelf: PictureShelf, get: Callable[[list[Any]], list[Mapping[str, np.ndarray]]]
    ) -> None:
        """`shelf` puts images of requests into Ray's object store, `get` fetches them from it."""
        self._shelf = shelf
        self._get = get

    @property
    def learner(self) -> Learner:
        assert self.loaded is not None, "call `start` first"
        return self.loaded

    def open_rendezvous(self, config: RunConfig) -> str:
        """Open the key-value store through which the learner ranks find each other.

        Return the store's `address:port`. Only rank 0 calls this method.
        """
        from learner.model.ranks import Rendezvous

        self._rendezvous = Rendezvous(_node_address(config))
        return self._rendezvous.endpoint

    def start(
        self,
        config: RunConfig,
        topology: RankTopology,
        make_backend: MakeBackend | None,
        examples: ExampleCounts | None,
    ) -> Started:
        """Load model and data, and start the engine if `make_backend` is given."""
        # Not in the constructor: Ray turns its exceptions into a dead actor.
        import torch

        from learner.learner import Learner

        topology = replace(topology, address=_node_address(config))
        self.loaded = Learner(config, topology, self._rendezvous, examples)
        if make_backend is not None:
            self._host = EngineHost(config, self.learner)
            self.backend = make_backend(self._host)
        learner = self.learner
        return Started(torch.get_num_threads(), learner.publisher.offers_adapter, learner.findings)

    def begin(self, requests: Sequence[Any], *, updates_next: bool) -> int:
        """Keep the requests of a step, of its refill round or of a held-out report.

        Return the number of requests. The driver then fetches them with the method `requests`.
        `updates_next`: once they are answered, the step's update comes before further requests.
        """
        self._requests = requests
        self._num_left = len(requests) if updates_next else math.inf
        return len(requests)

    def requests(self, first: int, stop: int) -> SentRequests:
        """Return the requests `first` to `stop - 1` of the last `begin`.

        Their images are put into Ray's object store.

        Raises RecordError if an image file is missing or has changed.
        """
        # Engines process these while the next ones are prepared.
        return self._shelf.send(self._requests[first:stop])

    def generate(self, objects: Sequence[SentRequests], places: range) -> list[Any]:
        """Generate rollouts with the engine in this process.

        `objects` are results of the method `requests`. `places` says which requests to generate, as
        indices into the requests of all `objects`, joined in order.
        """
        assert self.backend is not None, "this rank was started without a backend"
        assert self._host is not None, "made with the backend"
        self._num_left -= len(places)
        self._host.updates_next = self._num_left == 0
        return self.backend.generate(SentRequests.chosen(objects, places).with_data(self._get))

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        assert self.backend is not None, "this rank was started without a backend"
        return self.backend.receive_weights(offer)

    def close(self) -> None:
        """Close the engine in this process, if there is one, even while it generates."""
        if self.backend is not None:
            self.backend.close()


class LearnerActor:
    """The Ray actor of a learner rank. It calls functions that the driver sends.

    Each function gets the rank's `LearnerRank`. The functions of `run` and `run_kept` run one after
    another, in the order of the driver's calls.
    """

    def __init__(self) -> None:
        end_with_parent()
        self._rank = LearnerRank(PictureShelf(ray.put), ray.get)

    def run(self, task: Callable[..., T], *arguments: Any) -> T:
        """Call the driver's function `task(rank, *arguments)`, and return its result.

        Ray has already replaced object references in `arguments` by their values.
        """
        return task(self._rank, *arguments)

    def run_kept(self, task: Callable[..., list[T]], *arguments: Any) -> tuple[list[T], int]:
        """Call `task(rank, *arguments)`; return the list that it returns, and the list's length.

        The caller can fetch only the length, while the list stays in Ray's object store.
        """
        answers = task(self._rank, *arguments)
        return answers, len(answers)

    @ray.method(concurrency_group=STOPPING)
    def run_at_once(self, task: Callable[[LearnerRank], T]) -> T:
        """Call the driver's function `task(rank)` at once in a second thread.

        The call does not wait for the function that runs in the learner's thread.
        """
        return task(self._rank)


def _node_address(config: RunConfig) -> str:
    """Return an address of this node that engines and other ranks can reach."""
    section = config.rollout_matching.servers
    has_local_servers = section is None or all(server.is_loopback for server in section.servers)
    if config.cluster.address == "local" and has_local_servers:
        return "127.0.0.1"  # no traffic leaves the machine
    return str(ray.util.get_node_ip_address())
