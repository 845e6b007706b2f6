"""The Ray shell of one engine: `ray.remote(VllmActor).options(...).remote(name, settings, index)`.

Its `runtime_env` must carry `engine_environment(settings)`: the variables have to be there before vllm is imported, and reach its children.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

import ray

from rollout_actors.engine_settings import EngineSettings
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync import SyncPhase

if TYPE_CHECKING:
    from rollout_actors.vllm_engine import VllmEngine

T = TypeVar("T")


class VllmActor:
    """Forwards to a `VllmEngine`. Ends its own process when the engine's process has died, or Ray would go on sending it work."""

    def __init__(self, name: str, settings: EngineSettings, index: int) -> None:
        # Here and not above: whoever places the actors imports this module, and need not pay for vllm.
        from rollout_actors.vllm_engine import VllmEngine

        self._engine: VllmEngine = VllmEngine(name, settings, index=index)

    async def start(self) -> None:
        await self._or_exit(self._engine.start())

    async def generate(self, *requests: RolloutRequest) -> tuple[list[Rollout], int]:
        """Called with references, which Ray resolves here. The rollouts are one object, which the driver passes on unread, their number another."""
        rollouts = await self._or_exit(self._engine.generate(requests))
        return rollouts, len(rollouts)

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        return await self._or_exit(self._engine.run_sync_phase(phase, offer))

    async def _or_exit(self, work: Awaitable[T]) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await work
        except EngineDeadError:
            ray.actor.exit_actor()
            raise
