"""Loading of a LoRA adapter into an engine, on its unchanged base weights (decision 38)."""

from __future__ import annotations

import tempfile
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol

from vllm.lora.request import LoRARequest

from shared.weight_sync.offer import AdapterOffer

ADAPTER_ID = 1
"""vLLM's id of the only LoRA adapter, which every weight sync replaces."""
_NAME = "policy"


class AdapterEngine(Protocol):
    """The methods of vLLM's `AsyncLLM` that load and remove LoRA adapters."""

    async def add_lora(self, request: LoRARequest, /) -> bool: ...
    async def list_loras(self) -> set[int]: ...
    async def remove_lora(self, adapter_id: int, /) -> bool: ...


@dataclass(eq=False, repr=False)
class AdapterLoader:
    """Loads, verifies and removes the LoRA adapter that an engine uses for its rollouts."""

    llm: AdapterEngine
    _: KW_ONLY
    enabled: bool
    """Whether the engine was started with `enable_lora`."""
    request: LoRARequest | None = field(init=False, default=None)
    """The loaded adapter, for every request to vLLM; None: only the base weights are used."""

    async def take(self, terms: AdapterOffer) -> None:
        """Load the adapter of a weight sync's offer in place of the previous one.

        Raises:
            ValueError: the engine has no LoRA, or the adapter did not arrive as it was sent.
            Exception: the files cannot be written, or vLLM refuses the adapter.
        """
        if not self.enabled:
            raise ValueError(
                "the engine was started without LoRA; set rollout_matching.vllm.enable_lora: true,"
                " or rollout_matching.vllm.sync.mode: full"
            )
        if not terms.is_intact:
            raise ValueError("the adapter did not arrive as it was sent: its sha256 differs")
        # No adapter until it is loaded: after a failure no request may use the old one.
        self.request = None
        # The files are deleted before the engine serves the adapter, so a killed actor leaves none.
        with tempfile.TemporaryDirectory(prefix="rollmatch-adapter-") as folder:
            terms.files.save(Path(folder))
            await self.llm.add_lora(LoRARequest(_NAME, ADAPTER_ID, folder, load_inplace=True))
        # Without `load_inplace`, because vLLM would load it again for every request.
        self.request = LoRARequest(_NAME, ADAPTER_ID, folder)

    async def verify(self) -> None:
        """Raise RuntimeError if vLLM did not load the adapter. The canary checks its values."""
        if (loaded := set(await self.llm.list_loras())) != {ADAPTER_ID}:
            raise RuntimeError(
                f"vLLM has the adapters {sorted(loaded)} instead of only {ADAPTER_ID}, which this"
                " sync loaded; this is a bug: report it with error.txt"
            )

    async def drop(self) -> None:
        """Remove the adapter: from now on the engine generates with the base weights only."""
        self.request = None
        if self.enabled:
            await self.llm.remove_lora(ADAPTER_ID)
