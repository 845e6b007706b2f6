"""Loading an adapter into an engine whose base weights stay, by files (decision 38)."""

from __future__ import annotations

import tempfile
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol

from vllm.lora.request import LoRARequest

from shared.weight_sync.offer import AdapterOffer

ADAPTER_ID = 1
"""vLLM's number of the one adapter, which every sync replaces."""
_NAME = "policy"


class AdapterEngine(Protocol):
    """The methods of vLLM's `AsyncLLM` that serve adapters."""

    async def add_lora(self, request: LoRARequest, /) -> bool: ...
    async def list_loras(self) -> set[int]: ...
    async def remove_lora(self, adapter_id: int, /) -> bool: ...


@dataclass(eq=False, repr=False)
class AdapterLoader:
    """The adapter that an engine serves on top of its base weights."""

    llm: AdapterEngine
    _: KW_ONLY
    enabled: bool
    """Whether the engine was started with `enable_lora`."""
    request: LoRARequest | None = field(init=False, default=None)
    """For every request and every canary; None: the base weights alone."""

    async def take(self, terms: AdapterOffer) -> None:
        """Serve this adapter in place of the one before.

        Raises:
            ValueError: the engine has no LoRA, or the adapter is not as it was sent.
            Exception: its files cannot be written, or whatever vLLM finds wrong with it.
        """
        if not self.enabled:
            raise ValueError(
                "the engine was started without LoRA; set rollout_matching.vllm.enable_lora: true,"
                " or sync.mode: full"
            )
        if not terms.is_intact:
            raise ValueError("the adapter did not arrive as it was sent: its sha256 differs")
        # Until it is loaded there is no adapter: after a failure no request may name the old one.
        self.request = None
        # Gone before the engine serves it: an actor that is killed later leaves no files.
        with tempfile.TemporaryDirectory(prefix="rollmatch-adapter-") as folder:
            terms.files.save(Path(folder))
            await self.llm.add_lora(LoRARequest(_NAME, ADAPTER_ID, folder, load_inplace=True))
        # Without `load_inplace`, or vLLM would load it again with every request.
        self.request = LoRARequest(_NAME, ADAPTER_ID, folder)

    async def verify(self) -> None:
        """Raise RuntimeError where vLLM does not hold it; that it is right the canary shows."""
        if set(await self.llm.list_loras()) != {ADAPTER_ID}:
            raise RuntimeError("vLLM does not hold the adapter that it was given")

    async def drop(self) -> None:
        """Serve the base weights alone."""
        self.request = None
        if self.enabled:
            await self.llm.remove_lora(ADAPTER_ID)
