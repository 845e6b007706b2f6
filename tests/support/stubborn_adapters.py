"""Engine's sides that do not let go of their adapter, or do not apply it. Imported inside the engines' processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.lora.request import LoRARequest

from rollout_actors.adapter_intake import ADAPTER_ID, AdapterIntake, ServesAdapters
from shared.weight_terms import AdapterTerms


class StubbornAdapters(AdapterIntake):
    def __init__(self, llm: ServesAdapters, folder: Path) -> None:
        super().__init__(llm, enabled=True)
        self._folder = folder

    @contextmanager
    def _arriving(self, terms: AdapterTerms) -> Iterator[LoRARequest]:
        terms.files.save(self._folder)
        yield LoRARequest("policy", ADAPTER_ID, str(self._folder), load_inplace=True)
        self.request = LoRARequest("policy", ADAPTER_ID, str(self._folder))

    async def drop(self) -> None:
        pass


class IdleAdapters(AdapterIntake):
    @contextmanager
    def _arriving(self, terms: AdapterTerms) -> Iterator[LoRARequest]:
        with super()._arriving(terms) as request:
            yield request
        self.request = None
