"""Engine's sides that do not let go of their adapter, or do not apply it. Imported inside the engines' processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from rollout_actors.adapter_intake import ADAPTER_ID, AdapterIntake
from shared.weight_terms import AdapterTerms


class StubbornAdapters(AdapterIntake):
    def __init__(self, folder: Path) -> None:
        super().__init__(enabled=True)
        self._folder = folder

    @contextmanager
    def arriving(self, terms: AdapterTerms) -> Iterator[LoRARequest]:
        (self._folder / "adapter_model.safetensors").write_bytes(terms.tensors)
        (self._folder / "adapter_config.json").write_text(terms.config)
        yield LoRARequest("policy", ADAPTER_ID, str(self._folder), load_inplace=True)
        self.request = LoRARequest("policy", ADAPTER_ID, str(self._folder))

    async def drop(self, llm: AsyncLLM) -> None:
        pass


class IdleAdapters(AdapterIntake):
    @contextmanager
    def arriving(self, terms: AdapterTerms) -> Iterator[LoRARequest]:
        with super().arriving(terms) as request:
            yield request
        self.request = None
