"""The entry point `rollmatch` of `vllm.general_plugins`: vLLM calls it in every one of its processes."""

from __future__ import annotations

from functools import cache

from shared.transports import Transport


@cache
def register() -> None:
    """Make this package's weight transports known. vLLM may call its plugins again, and refuses a name twice: only the first call acts."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for transport, receiver in ((Transport.GLOO, "GlooWeightReceiver"), (Transport.INPROC, "InProcessWeightReceiver")):
        WeightTransferEngineFactory.register_engine(transport, "rollout_actors.weight_receiver", receiver)
