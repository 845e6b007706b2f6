"""One engine's place in the sender's process group, by vLLM's weight-transfer API (DESIGN 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from shared.transports import Transport
from shared.weight_terms import FullTerms


@dataclass(frozen=True, slots=True)
class InitRequest:
    """As vLLM reads its `WeightTransferInitRequest`, which is not to be had without importing all of vLLM."""

    init_info: dict[str, Any]


class JoinsGroups(Protocol):
    """Of vLLM's `AsyncLLM`, by itself or by the routes of a server."""

    async def init_weight_transfer_engine(self, request: InitRequest) -> None: ...
    async def shutdown_weight_transfer_engine(self) -> None: ...


class TransferGroup:
    """Kept from sync to sync."""

    def __init__(self, llm: JoinsGroups, *, transport: Transport, rank_offset: int) -> None:
        """`rank_offset`: the rank of the engine's first worker."""
        self.transport = transport
        self._llm = llm
        self._rank_offset = rank_offset
        self._joined = ""

    async def join(self, terms: FullTerms) -> None:
        """Nothing where the sender has opened no other group since the last time."""
        group = terms.group
        if self._joined == group.key:
            return
        self.forget()
        await self._llm.shutdown_weight_transfer_engine()
        info: dict[str, Any] = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": self._rank_offset,
            "world_size": group.world_size,
            "packed_buffer_size_bytes": terms.bucket_bytes,
        }
        info |= (
            {"join_s": terms.join_limit.seconds, "timeout_s": terms.timeout_s}
            if self.transport is Transport.GLOO
            else {"packed": True, "packed_num_buffers": 2}
        )
        await self._llm.init_weight_transfer_engine(InitRequest(init_info=info))
        self._joined = group.key

    def forget(self) -> None:
        """Join again next time, whatever the sender offers."""
        self._joined = ""
