"""The plugin `rollmatch`, which vLLM calls in each of its processes (`vllm.general_plugins`)."""

from __future__ import annotations

import gc
import os
import sys
from functools import cache
from multiprocessing import current_process, parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from threading import Thread

from rollout_actors.engine.failure import write_failures_down
from rollout_actors.engine.left_over import write_process_down
from rollout_actors.warm.warm_python import end_at_once
from shared.weight_sync.transports import TransportKind

# vLLM's name of an engine's process.
ENGINE_CORE = "EngineCore"
# That process imports this module only if its devices have their own processes.
SEVERAL_DEVICES = "vllm.v1.executor.multiproc_executor"
# Priority of the finalizer that multiprocessing calls last when a process ends.
LAST = -1000


@cache
def register() -> None:
    """Add the transports of a weight sync to vLLM.

    In vLLM's own processes, also record process id and errors, and end the process with its parent.

    vLLM may call its plugins again, and refuses to register a name twice. So only the first call
    has an effect.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for transport, receiver in (
        (TransportKind.GLOO, "GlooTransferEngine"),
        (TransportKind.INPROC, "InProcessTransferEngine"),
    ):
        WeightTransferEngineFactory.register_engine(
            transport, "rollout_actors.weight_sync.worker", receiver
        )
    # Only in vLLM's own processes: an engine's actor or a learner must not end in this way.
    if (parent := parent_process()) is not None:
        write_process_down()
        write_failures_down()
        Thread(target=_end_with, args=(parent,), name="ends-with-its-parent", daemon=True).start()
        if current_process().name.startswith(ENGINE_CORE):
            Finalize(None, _end_at_once, exitpriority=LAST)
            gc.unfreeze = _unfreeze


def _end_with(parent: BaseProcess) -> None:
    """End this process with its parent. vLLM would need minutes to notice a killed parent."""
    parent.join()
    os._exit(1)


_python_unfreeze = gc.unfreeze


def _unfreeze() -> None:
    """Do nothing in place of `gc.unfreeze`, unless each device of the engine has its own process.

    vLLM calls `gc.unfreeze` before its last garbage collection. In a fork of the warm server,
    unfreezing would copy every memory page with an object on it.
    """
    if SEVERAL_DEVICES in sys.modules:
        _python_unfreeze()


def _end_at_once() -> None:
    """End a vLLM process that has finished its work, without Python's cleanup."""
    # With several devices the cleanup is needed, because it frees named memory.
    if SEVERAL_DEVICES not in sys.modules:
        # Passes on the error that ended the process, if there is one.
        end_at_once(sys.exception())
