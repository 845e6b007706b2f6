"""What one vLLM engine is started with. Imports no vllm, so that whoever places the engines need not either."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The same for every engine of a run."""

    model_path: str
    """A checkpoint directory of transformers, with tokenizer and processor files."""
    dtype: str
    """As in `torch.<dtype>`; the learner's weights are converted to it on arrival."""
    max_model_len: int
    """Expanded prompt and response together, in tokens."""
    max_num_seqs: int
    """Decoded at a time: the configuration's decode_batch_size."""
    seed: int
    """Of the engine; every request brings its own."""
    transport: str
    """Of the weight sync: rollmatch_gloo or nccl."""
    device: Device
    tensor_parallel_size: int = 1
    max_images_per_prompt: int = 1
    kv_cache_memory_bytes: int | None = None
    """None: what `gpu_memory_utilization` leaves. On CPU give bytes, or the engine refuses to start beside other processes."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the device's memory; on CPU of the machine's."""
    enforce_eager: bool = True
    worker_extension: str = "rollout_actors.weight_receiver.ReceiptWorker"
    """Mixed into vLLM's worker, as `module.Class`; a subclass of the default may watch, or spoil, what a sync loads."""


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment variables that must be set before the engine's process imports torch or vllm, and that its children inherit."""
    common = {
        "VLLM_PLUGINS": "rollmatch",  # ours, and nobody else's
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "ERROR",  # one level lower, layers that have no weights "failed to load" them in every sync
    }
    if settings.enforce_eager:
        # Eager or not, vLLM compiles its counting of ranks at the first request: on CPU 20 s and a C++ compiler, for nothing.
        common["TORCHDYNAMO_DISABLE"] = "1"
    if settings.device is Device.CUDA:
        return common
    return common | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's core process: half the start-up
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would bind to the same core
        "OMP_NUM_THREADS": "1",  # with more, log-probabilities depend on the batch
    }
