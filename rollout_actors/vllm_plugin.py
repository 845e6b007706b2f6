"""The entry point `rollmatch` of `vllm.general_plugins`: vLLM calls it in every one of its processes."""

from __future__ import annotations

from functools import cache

TRANSPORT = "rollmatch_gloo"


@cache
def register() -> None:
    """Make the weight transport `rollmatch_gloo` known. vLLM may call its plugins again, and refuses a name twice: only the first call acts."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(TRANSPORT, "rollout_actors.weight_receiver", "GlooWeightReceiver")
