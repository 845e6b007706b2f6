"""The entry point `rollmatch` of `vllm.general_plugins`: vLLM calls it in every one of its processes."""

from __future__ import annotations

import os
from functools import cache
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from threading import Thread

from shared.transports import Transport


@cache
def register() -> None:
    """Make this package's weight transports known. vLLM may call its plugins again, and refuses a name twice: only the first call acts.

    In a forked process none would: they are started anew (`rollout_actors.engine_settings.engine_environment`).
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for transport, receiver in ((Transport.GLOO, "GlooWeightReceiver"), (Transport.INPROC, "InProcessWeightReceiver")):
        WeightTransferEngineFactory.register_engine(transport, "rollout_actors.weight_receiver", receiver)
    if (parent := parent_process()) is not None:
        Thread(target=_end_with, args=(parent,), name="ends-with-its-parent", daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    """A server that was killed tells its engine nothing, which would hold the device for minutes, until vLLM notices."""
    parent.join()
    os._exit(1)
