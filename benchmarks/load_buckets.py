"""Measure how long vLLM loads the weights of one sync, by bucket size.

`python -m benchmarks.load_buckets [--mib 4 16 64 256 1024 100000] [--rounds 3]`. One engine on CPU,
in this process. The model has the names and layers of Qwen3-VL-4B but very small matrices. So the
benchmark measures the fixed cost of each `load_weights` call, which first walks the whole model.
The buckets are cut by the sizes of the real matrices.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.tools.demo.model import make_demo_model
from rollout_actors.engine.settings import EngineSettings, engine_arguments, engine_environment
from shared.prompts import DEFAULT_USER_PROMPT
from shared.weight_sync.offer import TensorSpec, buckets
from shared.weight_sync.transports import Device, TransportKind

TEXT_LAYERS = 36
VISION_LAYERS = 24
DEEPSTACK = [5, 11, 17]
"""Layers of the vision tower that feed the language model, as in Qwen3-VL-4B."""
REAL_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 152936,
}
REAL_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 2560,
    "num_position_embeddings": 2304,
}


def make_model(folder: Path) -> tuple[TensorSpec, ...]:
    """Write a small checkpoint with the parameter names of Qwen3-VL-4B.

    Returns names, shapes and bytes of the tensors of the real model, in order."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    make_demo_model(folder, seed=17, prompt=DEFAULT_USER_PROMPT)
    config = Qwen3VLConfig.from_pretrained(folder)
    deep = {"depth": VISION_LAYERS, "deepstack_visual_indexes": DEEPSTACK}
    _change(config.text_config, {"num_hidden_layers": TEXT_LAYERS})
    _change(config.vision_config, deep)
    small = Qwen3VLForConditionalGeneration(config)
    small.save_pretrained(folder)
    _change(config.text_config, REAL_TEXT)
    _change(config.vision_config, REAL_VISION)
    with torch.device("meta"):
        real = Qwen3VLForConditionalGeneration(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in real.named_parameters()}
    assert list(shapes) == [name for name, _ in small.named_parameters()]
    return tuple(
        TensorSpec(name, "bfloat16", shape, 2 * torch.Size(shape).numel())
        for name, shape in shapes.items()
    )


def _change(section: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(section, name, value)


def start_engine(folder: Path) -> Any:
    """Return a vLLM engine (`LLM`) with the small checkpoint."""
    settings = EngineSettings(
        str(folder),
        "float32",
        512,
        2,
        0,
        TransportKind.GLOO,
        Device.CPU,
        0.5,
        kv_cache_memory_bytes=1 << 28,
    )
    os.environ.update(engine_environment(settings))
    import torch
    from vllm import LLM

    torch.set_num_threads(1)
    return LLM(**engine_arguments(settings))


def load_s(
    model: Any, model_config: Any, weights: dict[str, Any], cut: list[tuple[TensorSpec, ...]]
) -> float:
    """Load all weights in the buckets `cut`; return the seconds of all `load_weights` calls."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    started = time.perf_counter()
    for bucket in cut:
        model.load_weights((spec.name, weights[spec.name]) for spec in bucket)
    spent_s = time.perf_counter() - started
    finalize_layerwise_reload(model, model_config)
    return spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[0, 4, 16, 64, 256, 1024, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        specs = make_model(folder)
        llm = start_engine(folder)
        from safetensors.torch import load_file

        weights = load_file(folder / "model.safetensors")
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        print(
            f"{len(specs)} tensors, {sum(spec.num_bytes for spec in specs) / 2**30:.2f} GiB in the"
            " real model"
        )
        for mib in options.mib:
            cut = list(buckets(specs, mib << 20))
            seconds = [
                load_s(worker.model_runner.model, worker.model_config, weights, cut)
                for _ in range(options.rounds)
            ]
            largest = max(sum(spec.num_bytes for spec in bucket) for bucket in cut) / 2**20
            median_s = statistics.median(seconds)
            print(
                f"buckets of {mib:>6} MiB: {len(cut):>4} calls, the largest {largest:.0f} MiB;"
                f" {median_s:.3f} s ({min(seconds):.3f} to {max(seconds):.3f} in {options.rounds}"
                " updates)",
                flush=True,
            )


if __name__ == "__main__":
    main()
