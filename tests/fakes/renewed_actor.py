"""A Ray actor whose engine is exchanged between two tests, so that they need no process each."""

from __future__ import annotations

from rollout_actors.engine.actor import EngineActor, MakeEngine


class RenewedActor(EngineActor):
    def __init__(self) -> None:
        """`become` comes first."""

    async def become(self, make_engine: MakeEngine) -> None:
        """Begin anew as `EngineActor(make_engine)`."""
        super().__init__(make_engine)
