"""docs/stock_server.md shows the command lines that the code makes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from rollout_actors.backends.stock_server import stock_command
from rollout_actors.engine.settings import EngineSettings
from shared.weight_sync.transports import Device, TransportKind

DOC = Path(__file__).parents[3] / "docs" / "stock_server.md"


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(
        model_path="FOLDER",
        max_model_len=4096,
        max_num_seqs=16,
        seed=0,
        gpu_memory_utilization=0.85,
        **changes,
    )


def test_the_page_shows_the_command_of_a_gpu_and_that_of_a_cpu() -> None:
    on_gpu = settings(
        dtype="bfloat16", transport=TransportKind.NCCL, device=Device.CUDA, enforce_eager=False
    )
    on_cpu = settings(
        dtype="float32",
        transport=TransportKind.GLOO,
        device=Device.CPU,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
    )
    shown = [
        block
        for block in re.findall(r"```\n(.*?)```", DOC.read_text(), re.DOTALL)
        if "vllm serve" in block
    ]
    made = [stock_command(each, "http://127.0.0.1:8000") for each in (on_gpu, on_cpu)]
    assert [shlex.split(block.replace("\\\n", "")) for block in shown] == [
        shlex.split(command) for command in made
    ]
