"""Engine's sides that do not let go of their adapter, or do not apply it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollout_actors.weight_sync.adapters import AdapterLoader
from shared.weight_sync.offer import AdapterOffer


class IdleAdapter(AdapterLoader):
    """vLLM holds what it is sent, and no request asks for it."""

    request: Any = None

    def __init__(self, sound: AdapterLoader) -> None:
        self.sound = sound

    async def take(self, terms: AdapterOffer) -> None:
        await self.sound.take(terms)

    async def verify(self) -> None:
        await self.sound.verify()

    async def drop(self) -> None:
        await self.sound.drop()


class KeptAdapter(IdleAdapter):
    """It stays in this folder, and a full sync does not take it away."""

    def __init__(self, sound: AdapterLoader, folder: Path) -> None:
        super().__init__(sound)
        self._folder = folder

    async def take(self, terms: AdapterOffer) -> None:
        await super().take(terms)
        terms.files.save(self._folder)
        self.request = msgspec.structs.replace(self.sound.request, lora_path=str(self._folder))

    async def drop(self) -> None:
        pass
