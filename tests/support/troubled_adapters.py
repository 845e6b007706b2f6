"""Engine's sides that do not let go of their adapter, or do not apply it."""

from __future__ import annotations

from typing import Any

from rollout_actors.weight_intake import TakesAdapters
from shared.weight_terms import AdapterTerms


class KeptAdapter:
    """A full sync does not take it away."""

    def __init__(self, sound: TakesAdapters) -> None:
        self.sound = sound

    @property
    def request(self) -> Any:
        return self.sound.request

    async def take(self, terms: AdapterTerms) -> None:
        await self.sound.take(terms)

    async def verify(self) -> None:
        await self.sound.verify()

    async def drop(self) -> None:
        pass


class IdleAdapter(KeptAdapter):
    """vLLM holds what it is sent, and no request asks for it."""

    request = None

    async def drop(self) -> None:
        await self.sound.drop()
