"""A rollout engine on the other side of HTTP, of either kind (spec: server mode)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout_actors.backends.http_client import HttpClient
from rollout_actors.engine_settings import EngineSettings
from rollout_actors.server.messages import CallLimits
from shared.protocols import RolloutEngine
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync import SyncPhase


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    world_size: int
    """Rollout devices."""
    version: int
    """Of the weights that it holds; 0: the checkpoint's, or it does not say."""
    process: str
    """As `PooledEngine.process`."""
    limits: CallLimits | None
    """Of one call; None: it has none of its own."""
    problems: tuple[str, ...]
    """What it was started with that the run cannot use, each with the remedy."""


class RemoteEngine(RolloutEngine, ABC):
    """What the clients of both kinds have in common. Holds no connection."""

    def __init__(self, http: HttpClient, *, index: int, expected: EngineSettings) -> None:
        self._http, self._index, self._expected = http, index, expected
        self._process = ""

    async def start(self) -> int:
        """Waits for the server. Returns its rollout devices. Raises RolloutError(phase="start"), also where the server does not suit the run: with everything
        that differs, and the command line that would suit."""
        await self._http.wait_until_up()
        facts = await self.inspect()
        if facts.problems:
            raise self._http.error(f"does not suit the run: {'; '.join(facts.problems)}. All of it: `{self._http.command}`", "start")
        await self._claim(facts)
        self._process = facts.process
        return facts.world_size

    @abstractmethod
    async def inspect(self) -> ServerFacts:
        """What a server that is up says of itself; changes nothing there. Raises RolloutError(phase="start") where it does not say it."""

    @abstractmethod
    async def _claim(self, facts: ServerFacts) -> None:
        """Begin to use a server that suits."""

    @abstractmethod
    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]: ...

    @abstractmethod
    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None: ...

    @property
    def process(self) -> str:
        return self._process

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the server's weights, as far as this client has seen; 0 is the checkpoint's."""

    @property
    def is_dead(self) -> bool:
        """Never: a server that has ended may be started again. Its weights are then no longer this run's, and it, or their label, says so."""
        return False

    def close(self) -> None:
        """Nothing is held, and the server was launched by somebody else."""


def too_few_sequences(actual: int, expected: EngineSettings, *, world_size: int, remedy: str) -> Iterator[str]:
    """`actual` is the server's `max_num_seqs`; the `remedy` is followed by what it should be."""
    least = expected.sequences_per_device * world_size
    if actual < least:
        yield (
            f"its max_num_seqs is {actual}, the run decodes {expected.sequences_per_device} on each of its {world_size} devices "
            f"(rollout_matching.decode_batch_size): {remedy}{least}"
        )
