"""How one engine takes an adapter: from the offer through memory into vLLM, beside base weights
that stay as they are (DESIGN 9).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from vllm.lora.request import LoRARequest

from shared.weight_sync.offer import AdapterOffer

ADAPTER_ID = 1
"""vLLM's number of the one adapter, which every sync replaces."""
_NAME = "policy"
_SHARED_MEMORY = Path("/dev/shm")


class ServesAdapters(Protocol):
    """Of vLLM's engines, what an adapter needs."""

    async def add_lora(self, lora_request: LoRARequest, /) -> Any: ...
    async def list_loras(self) -> Any: ...
    async def remove_lora(self, lora_id: int, /) -> Any: ...


class AdapterLoader:
    """What an engine serves on top of its base weights."""

    def __init__(self, llm: ServesAdapters, *, enabled: bool) -> None:
        """`enabled`: whether the engine was started with `enable_lora`."""
        self._llm = llm
        self._enabled = enabled
        self.request: LoRARequest | None = None
        """For every request and every canary; None: the base weights alone."""

    async def take(self, terms: AdapterOffer) -> None:
        """Serve this adapter in place of what was there. Raises what `_arriving` does, and what
        vLLM finds wrong with it.
        """
        with self._arriving(terms) as request:
            await self._llm.add_lora(request)

    async def verify(self) -> None:
        """RuntimeError where vLLM does not hold it. That it is the learner's is for the canary to
        say.
        """
        if set(await self._llm.list_loras()) != {ADAPTER_ID}:
            raise RuntimeError("vLLM does not hold the adapter that it was given")

    async def drop(self) -> None:
        """Serve the base weights alone."""
        self.request = None
        if self._enabled:
            await self._llm.remove_lora(ADAPTER_ID)

    @contextmanager
    def _arriving(self, terms: AdapterOffer) -> Iterator[LoRARequest]:
        """The adapter as files, for as long as vLLM takes to load them: what to load, in place of
        what was there. Afterwards it is what is served.

        Raises ValueError for an adapter that is not as it was sent, and OSError where the files
        cannot be written.
        """
        if not self._enabled:
            raise ValueError(
                "the engine was started without LoRA; set rollout_matching.vllm.enable_lora: true,"
                " or sync.mode: full"
            )
        if not terms.is_intact:
            raise ValueError("the adapter did not arrive as it was sent: its sha256 differs")
        self.request = None
        # Gone before the engine serves it: an actor that is killed later leaves nothing in memory.
        with tempfile.TemporaryDirectory(
            prefix="rollmatch-adapter-", dir=_memory_folder(terms.num_bytes)
        ) as folder:
            terms.files.save(Path(folder))
            yield LoRARequest(_NAME, ADAPTER_ID, folder, load_inplace=True)
            # Without `load_inplace`, or vLLM would load it again with every request.
            self.request = LoRARequest(_NAME, ADAPTER_ID, folder)


def _memory_folder(num_bytes: int) -> Path | None:
    """Where files are kept in memory, if there is room (containers give 64 MB by default); None:
    the folder for temporary files.
    """
    return (
        _SHARED_MEMORY
        if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * num_bytes
        else None
    )
