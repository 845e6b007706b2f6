"""The settings of one vLLM engine. Imports no vllm: the driver, which makes them, need not."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_actors.warm import warm_python
from shared.model_families import (
    EXPERT_MODEL_TYPES,
    HYBRID_MODEL_TYPES,
    TEXT_MODEL_TYPES,
    TILED_MODEL_TYPES,
    VISION_MODEL_TYPES,
)
from shared.protocols import WORKER_CLOSE_S
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.offer import LORA_RANKS
from shared.weight_sync.transports import Device, TransportKind

GUARD_PROCESSOR = "rollout_actors.repeat_guard.vllm:VllmRepeatGuard"
"""The logits processor that is the repeat guard, as vLLM loads it."""

LEAST_UTILIZATION = 0.01
"""vLLM's fraction of memory where the cache has a size in bytes: what has to be free at the start.
"""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of every engine of a run."""

    model_path: str
    """A checkpoint directory of transformers, with tokenizer and processor files."""
    dtype: str
    """Name in `torch`; the learner's weights are converted to it on arrival."""
    max_model_len: int
    """Expanded prompt and response together, in tokens."""
    max_num_seqs: int
    """Most sequences decoded at a time: decode_batch_size for each of the engine's devices."""
    seed: int
    """The engine's seed; every request brings its own."""
    transport: TransportKind
    """nccl between GPUs, rollmatch_gloo between CPUs; beside the learner ipc or inproc."""
    device: Device
    gpu_memory_utilization: float
    """Fraction of the device's memory, on CPU of the machine's, without `kv_cache_memory_bytes`."""
    tensor_parallel_size: int = 1
    max_images_per_prompt: int = 1
    max_image_pixels: int = 0
    """Size of the largest image that will come; 0: not known. Servers alone have a limit."""
    kv_cache_memory_bytes: int | None = None
    """None: what `gpu_memory_utilization` leaves. On CPU give bytes, or the engine may refuse to
    start beside other processes."""
    enforce_eager: bool = True
    worker_extension: str = "rollout_actors.weight_sync.worker.VerifyingWorker"
    """Mixed into vLLM's worker, as `module.Class`: the default, or a subclass of it."""
    repeat_guard: RepeatGuardSettings | None = None
    """None: no sequence is ended for repeating itself."""
    enable_lora: bool = False
    """Whether a sync may bring an adapter alone."""
    max_lora_rank: int = 16
    """The largest rank of such an adapter."""

    @property
    def sequences_per_device(self) -> int:
        """Most sequences decoded at a time by each device: decode_batch_size."""
        return self.max_num_seqs // self.tensor_parallel_size


def family_problems(
    model_path: str, *, device: Device, dtype: str, enable_lora: bool
) -> Iterator[tuple[str, str]]:
    """Name what vLLM does not do with the family of a checkpoint.

    Yields the setting, "dtype" or "enable_lora", and what is wrong and helps.
    """
    kind = model_type(model_path)
    if device is not Device.CPU:
        return
    if kind in HYBRID_MODEL_TYPES and dtype != "bfloat16":
        computes = f"vLLM 0.32 computes the linear attention of a {kind} model on CPU in bfloat16"
        yield "dtype", f"{dtype}, and {computes} alone; set it to bfloat16"
    if kind in EXPERT_MODEL_TYPES and enable_lora:
        serves = f"vLLM 0.32 serves adapters beside the experts of a {kind} model by Triton alone"
        wrong = f"{serves}, which a CPU has not; set it to false"
        yield "enable_lora", wrong


def model_type(model_path: str) -> str:
    """Return the family of a checkpoint, as transformers names it."""
    return str(_model_config(model_path)["model_type"])


def is_trained(model_path: str) -> bool:
    """Tell whether a run could train a checkpoint: of a known family, in full precision."""
    config = _model_config(model_path)
    families = VISION_MODEL_TYPES + TEXT_MODEL_TYPES
    return config["model_type"] in families and "quantization_config" not in config


def image_token_id(model_path: str) -> int | None:
    """Return the token that stands for an image in a checkpoint's prompts; None: it sees none."""
    token_id = _model_config(model_path).get("image_token_id")
    return None if token_id is None else int(token_id)


def _model_config(model_path: str) -> dict[str, Any]:
    return json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))


def engine_arguments(settings: EngineSettings) -> dict[str, object]:
    """Return the arguments of vLLM's `EngineArgs`, and so of `LLM` and `AsyncEngineArgs`."""
    utilization = settings.gpu_memory_utilization
    if settings.kv_cache_memory_bytes is not None:
        # vLLM would still refuse a GPU on which less than this fraction is free.
        utilization = LEAST_UTILIZATION
    lora: dict[str, object] = {}
    if settings.enable_lora:
        # The configuration refuses ranks above the largest.
        rank = next(rank for rank in LORA_RANKS if rank >= settings.max_lora_rank)
        lora = {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    # A folder that is no checkpoint is refused elsewhere.
    is_checkpoint = (Path(settings.model_path) / "config.json").is_file()
    kind = model_type(settings.model_path) if is_checkpoint else ""
    tiles: dict[str, object] = {}
    if kind in TILED_MODEL_TYPES:
        # vLLM 0.32 sizes its cache of images by the image processor's own setting, which is off in
        # published checkpoints, and the processor cuts tiles all the same.
        tiles = {"mm_processor_kwargs": {"crop_to_patches": True}}
    return {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        **(_cpu_arguments(kind) if settings.device is Device.CPU else {}),
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Stated, because inside a Ray placement group vLLM would choose "ray".
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "gpu_memory_utilization": utilization,
        **({"enforce_eager": True} if settings.enforce_eager else {}),
        # vLLM keeps room for the largest prompt that these allow: none for videos.
        "limit_mm_per_prompt": {"image": settings.max_images_per_prompt, "video": 0},
        # a checkpoint's sampling defaults do not leak into the requests
        "generation_config": "vllm",
        # After bans, temperature and top-k/top-p: the distribution that the token was drawn from,
        # which is what the learner compares with its own.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": settings.transport},
        "worker_extension_cls": settings.worker_extension,
        "disable_log_stats": True,
        # In every engine: a rule may come after the start, from whoever asks for rollouts.
        "logits_processors": [GUARD_PROCESSOR],
        **lora,
        **tiles,
    }


def _cpu_arguments(kind: str) -> dict[str, bool]:
    # A seeded request whose prompt is read in two steps ends vLLM's engine on CPU ("CPU Generator
    # does not use offset").
    arguments = {"enable_chunked_prefill": False}
    if kind in HYBRID_MODEL_TYPES:
        # Else vLLM keeps states of prefixes, which it does with chunked prefill alone.
        arguments["enable_prefix_caching"] = False
    return arguments


def engine_runtime_env(settings: EngineSettings, **variables: str) -> dict[str, object]:
    """Return the Ray `runtime_env` of an engine's actor, with further environment variables."""
    return neighbour_runtime_env(settings, **engine_environment(settings), **variables)


def neighbour_runtime_env(settings: EngineSettings, **variables: str) -> dict[str, object]:
    """Return the Ray `runtime_env` of an actor on CPU that is forked where such engines are.

    Without `OMP_NUM_THREADS` in the variables torch has a thread for every core: Ray sets it when a
    fork has torch already, which is too late.
    """
    # With several devices the end of a fork would leave named memory behind: it does not take its
    # modules apart.
    if settings.device is Device.CUDA or settings.tensor_parallel_size > 1:
        return {"env_vars": variables}
    # Ray starts `py_executable` in place of python: the shim, which asks the warm server for a
    # fork.
    server = {
        warm_python.FOLDER: warm_python.run_folder(),
        warm_python.VARIABLES: json.dumps(engine_environment(settings)),
    }
    return {"env_vars": variables | server, "py_executable": shlex.join(warm_python.command())}


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Return variables that must be set before an engine's process imports torch or vllm."""
    common = {
        "VLLM_PLUGINS": "rollmatch",  # ours, and nobody else's
        "VLLM_NO_USAGE_STATS": "1",
        # The checkpoint is a folder: nothing is asked of a hub.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM would fork a server on a GPU. A forked process takes our plugin for loaded, so that
        # nothing would end it with its parent, and has the locks of the parent's threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # one level lower, layers that have no weights "failed to load" them in every sync
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(WORKER_CLOSE_S),
    }
    if settings.enforce_eager:
        # Eager or not, vLLM compiles its counting of ranks at the first request: on CPU 20 s and a
        # C++ compiler, for nothing.
        common["TORCHDYNAMO_DISABLE"] = "1"
    if settings.device is Device.CUDA:
        if settings.dtype == "float32":
            # vLLM's other attention kernels refuse float32, and Triton's would multiply in TF32.
            common["TRITON_F32_DEFAULT"] = "ieee"
        return common
    return common | {
        # the worker lives in the engine's core process: half the start-up
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines would bind to the same core
        "OMP_NUM_THREADS": "1",  # with more, log-probabilities depend on the batch
        # glibc keeps up to 256 MiB of what a weight sync frees: handed out anew, page by page, it
        # would take several times as long as filling it.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    }
