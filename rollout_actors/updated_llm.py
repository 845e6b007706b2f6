"""The engine beside the learner, vLLM's `LLM`, as what `rollout_actors.weight_intake` asks of an engine (DESIGN 9).

The weights pass from hand to hand, so that there is no wire and no rendezvous; names, checksums, caches and canary are checked as in any other sync.
On CPU the hand is a reference; on a GPU, where the engine has a process of its own, a handle of CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from rollout_actors.ipc_handles import SharingDevice, packed_buckets
from rollout_actors.weight_intake import UpdateRequest
from shared.checksummed_weights import ChecksummedWeights
from shared.transports import Transport

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest


class UpdatedLLM:
    """An `UpdatedEngine`. Every method is done when it returns: the work is in the calling thread, nobody else is waited for, and no limit can end it."""

    def __init__(self, llm: LLM, *, transport: Transport, devices: Sequence[SharingDevice], wake: Callable[[], None]) -> None:
        """`transport` is `inproc` or `ipc`.

        Args:
            devices: the engine's, where the transport is `ipc`.
            wake: takes back what of the engine's memory an update does not need.
        """
        self._llm = llm
        self._transport = transport
        self._devices = devices
        self._wake = wake
        self._weights: ChecksummedWeights | None = None

    @contextmanager
    def handing_over(self, weights: ChecksummedWeights) -> Iterator[None]:
        """Those of the next update. However it ends, nothing of them is kept afterwards."""
        self._weights = weights
        try:
            yield
        finally:
            self._weights = None

    async def pause_generation(self, *, mode: Literal["wait"], clear_cache: bool) -> None:
        """Nothing is running: who would have asked for it is in this call."""

    async def resume_generation(self) -> None:
        """The weights are loaded: now there is room for the cache, which the canary needs."""
        self._wake()

    async def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    async def update_weights(self, request: UpdateRequest) -> None:
        assert self._weights is not None, "an update is made while they are handed over"
        assert request.update_info["names"] == [spec.name for spec in self._weights.terms.sent], "the update is of these"
        if self._transport is Transport.INPROC:
            self._llm.update_weights({"update_info": {"weights": self._weights}})
            return
        self._llm.init_weight_transfer_engine({"init_info": {"packed": True}})
        # Closed, so that a failure, whose traceback refers to it, does not keep the buffers.
        with closing(packed_buckets(self._weights, self._devices)) as packed:
            for bucket in packed:
                # When it returns, every worker has copied what it needs: the next bucket takes the
                # place of this one.
                self._llm.update_weights({"update_info": bucket})

    async def finish_weight_update(self) -> None:
        self._llm.finish_weight_update()
        for device in self._devices:
            device.collect()

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        return self._llm.collective_rpc(method, args=args)

    async def reset_prefix_cache(self) -> bool:
        return self._llm.reset_prefix_cache()

    async def reset_mm_cache(self) -> None:
        self._llm.reset_mm_cache()

    async def reset_encoder_cache(self) -> None:
        self._llm.llm_engine.reset_encoder_cache()

    async def update_weight_version(self, new_version: str) -> None:
        self._llm.update_weight_version(new_version)

    async def add_lora(self, request: LoRARequest) -> bool:
        return self._llm.llm_engine.add_lora(request)

    async def list_loras(self) -> set[int]:
        return self._llm.llm_engine.list_loras()

    async def remove_lora(self, adapter_id: int) -> bool:
        return self._llm.llm_engine.remove_lora(adapter_id)
