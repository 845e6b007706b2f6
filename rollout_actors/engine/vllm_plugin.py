"""The entry point `rollmatch` of `vllm.general_plugins`, called in every process of vLLM."""

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

# vLLM's name for the process of an engine.
ENGINE_CORE = "EngineCore"
# A module that such a process imports only if its devices have processes of their own.
SEVERAL_DEVICES = "vllm.v1.executor.multiproc_executor"
# Priority of a finalizer that multiprocessing calls last of all when a process ends.
LAST = -1000


@cache
def register() -> None:
    """Register the weight transports, and have an engine's processes write themselves and their
    errors down.

    vLLM may call its plugins again, and refuses a name twice: only the first call acts.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for transport, receiver in (
        (TransportKind.GLOO, "GlooTransferEngine"),
        (TransportKind.INPROC, "InProcessTransferEngine"),
    ):
        WeightTransferEngineFactory.register_engine(
            transport, "rollout_actors.weight_sync.worker", receiver
        )
    # Only in vLLM's own processes: an engine's actor, or a learner, must not end here.
    if (parent := parent_process()) is not None:
        write_process_down()
        write_failures_down()
        Thread(target=_end_with, args=(parent,), name="ends-with-its-parent", daemon=True).start()
        if current_process().name.startswith(ENGINE_CORE):
            Finalize(None, _end_at_once, exitpriority=LAST)
            gc.unfreeze = _unfreeze


def _end_with(parent: BaseProcess) -> None:
    """End this process with its parent: vLLM would take minutes to notice that it was killed."""
    parent.join()
    os._exit(1)


_python_unfreeze = gc.unfreeze


def _unfreeze() -> None:
    """Replace `gc.unfreeze`, which vLLM calls before a last collection.

    In a fork of the warm server that would copy every page with an object on it.
    """
    if SEVERAL_DEVICES in sys.modules:
        _python_unfreeze()


def _end_at_once() -> None:
    """End a process of vLLM's whose work is done."""
    # With several devices it ends as Python does: only then does it give back named memory.
    if SEVERAL_DEVICES not in sys.modules:
        # Still the error that ended the process, if one did.
        end_at_once(sys.exception())
