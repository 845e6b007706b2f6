"""vLLM's engine as a weight sync sees it, where nothing is to be done."""

from __future__ import annotations

from typing import Any

from rollout_actors.weight_sync.receiver import InitRequest, UpdateRequest


class IdleLLM:
    """An `UpdatedEngine` and a `GroupedEngine` that does nothing but note what it joins."""

    def __init__(self) -> None:
        self.joined: list[dict[str, Any]] = []

    async def init_weight_transfer_engine(self, request: InitRequest) -> None:
        self.joined.append(request.init_info)

    async def shutdown_weight_transfer_engine(self) -> None: ...
    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, request: UpdateRequest) -> None: ...
    async def finish_weight_update(self) -> None: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        return True
