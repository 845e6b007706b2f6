"""The settings of a vLLM engine, without importing vllm, because the driver makes them."""

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
    TILED_MODEL_TYPES,
    VISION_MODEL_TYPES,
    reads_only_text,
)
from shared.protocols import WORKER_CLOSE_S
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.offer import LORA_RANKS
from shared.weight_sync.transports import Device, TransportKind

GUARD_PROCESSOR = "rollout_actors.repeat_guard.vllm:VllmRepeatGuard"
"""Import path of the logits processor for vLLM that ends repeating answers (repeat guard)."""

LEAST_UTILIZATION = 0.01
"""The `gpu_memory_utilization` if `kv_cache_memory_bytes` sets the size of the key-value cache.
vLLM does not start if this fraction of the memory is not free."""
BATCHED_TOKENS = 8192
"""Most tokens in a forward pass of an engine on GPUs. vLLM 0.32's own number depends on GPU and
entry point; for rollout actors it is 2,048, with which long prompts take several passes."""
CPU_BLOCK_SIZE = 32
"""Tokens in a block of the key-value cache on CPU, where vLLM supports multiples of 32."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of every vLLM engine of a run, fixed at its start."""

    model_path: str
    """A checkpoint folder of transformers, with tokenizer and processor files."""
    dtype: str
    """Name of a `torch` dtype. The engine converts the learner's weights to it."""
    max_model_len: int
    """Largest number of tokens of prompt (with its images) and response together."""
    max_num_seqs: int
    """Largest number of sequences decoded at a time: decode_batch_size times number of devices."""
    seed: int
    """Seed of the engine. Every request has its own seed."""
    transport: TransportKind
    """How new weights reach the engine: nccl between GPUs, rollmatch_gloo between CPUs; ipc (GPU)
    or inproc (CPU) if the engine is in the learner's process."""
    device: Device
    gpu_memory_utilization: float
    """Fraction of the GPU's (or machine's) memory for vLLM, if `kv_cache_memory_bytes` is None."""
    tensor_parallel_size: int = 1
    max_images_per_prompt: int = 1
    max_image_pixels: int = 0
    """Pixels of the largest image in the requests; 0: unknown. Only servers enforce a limit."""
    max_pixels: int | None = None
    """Images with more pixels are reduced to this number; None: the limit of the checkpoint."""
    kv_cache_memory_bytes: int | None = None
    """Size of the key-value cache; None: determined by `gpu_memory_utilization`. On CPU set it, or
    the engine may refuse to start while other processes use memory."""
    enforce_eager: bool = True
    is_deterministic: bool = False
    """Whether answers on a GPU must not depend on the batch. On CPU they never do."""
    worker_extension: str = "rollout_actors.weight_sync.worker.VerifyingWorker"
    """Class mixed into vLLM's worker, as `module.Class`: the default or a subclass of it."""
    repeat_guard: RepeatGuardSettings | None = None
    """When a repeating answer is ended; None: never."""
    enable_lora: bool = False
    """Whether a weight sync may send only a LoRA adapter."""
    max_lora_rank: int = 16
    """Largest rank of such a LoRA adapter."""
    head_dtype: str = "model"
    """Number type of the logits: float32, or that of the model (`model`)."""

    @property
    def sequences_per_device(self) -> int:
        """Largest number of sequences decoded at a time per device: decode_batch_size."""
        return self.max_num_seqs // self.tensor_parallel_size


def family_problems(
    model_path: str, *, device: Device, dtype: str, enable_lora: bool
) -> Iterator[tuple[str, str]]:
    """Yield the settings that vLLM does not support for a checkpoint's model family.

    Each item is a pair: "dtype" or "enable_lora", and a text with the problem and the remedy.
    """
    kind = model_type(model_path)
    if device is not Device.CPU:
        return
    if kind in HYBRID_MODEL_TYPES and dtype != "bfloat16":
        computes = f"vLLM 0.32 computes the linear attention of a {kind} model on CPU only in"
        yield "dtype", f"{dtype}, but {computes} bfloat16; set it to bfloat16"
    if kind in EXPERT_MODEL_TYPES and enable_lora:
        serves = f"vLLM 0.32 serves adapters on a {kind} model with experts only through Triton"
        wrong = f"{serves}, which does not run on CPU; set it to false"
        yield "enable_lora", wrong


def model_type(model_path: str) -> str:
    """Return the model type of a checkpoint, as transformers names it."""
    return str(_model_config(model_path)["model_type"])


def is_text_model(model_path: str) -> bool:
    return reads_only_text(_model_config(model_path))


def is_trained(model_path: str) -> bool:
    """Return whether a run may train a checkpoint.

    The weights must not be quantized. The model must read only text, or be of a known family.
    """
    config = _model_config(model_path)
    is_known = config["model_type"] in VISION_MODEL_TYPES or reads_only_text(config)
    return is_known and "quantization_config" not in config


def image_token_id(model_path: str) -> int | None:
    """Return the id of a checkpoint's image placeholder; None: the model takes no images."""
    token_id = _model_config(model_path).get("image_token_id")
    return None if token_id is None else int(token_id)


def _model_config(model_path: str) -> dict[str, Any]:
    return json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))


def engine_arguments(settings: EngineSettings) -> dict[str, object]:
    """Return the arguments of vLLM's `LLM` or `AsyncEngineArgs` for an engine of these settings."""
    utilization = settings.gpu_memory_utilization
    if settings.kv_cache_memory_bytes is not None:
        # vLLM would still refuse a GPU that has less than this fraction free.
        utilization = LEAST_UTILIZATION
    lora: dict[str, object] = {}
    if settings.enable_lora:
        # The configuration check refuses larger ranks.
        rank = next(rank for rank in LORA_RANKS if rank >= settings.max_lora_rank)
        lora = {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    # Other code refuses a folder that is not a checkpoint.
    is_checkpoint = (Path(settings.model_path) / "config.json").is_file()
    kind = model_type(settings.model_path) if is_checkpoint else ""
    of_images: dict[str, object] = {}
    if settings.max_pixels is not None:
        of_images = {"mm_processor_kwargs": _pixel_limits(settings.model_path, settings.max_pixels)}
    elif kind in TILED_MODEL_TYPES:
        # vLLM 0.32 sizes its image cache by this setting of the image processor. Published
        # checkpoints set it to false, and the processor cuts tiles anyway.
        of_images = {"mm_processor_kwargs": {"crop_to_patches": True}}
    batched = batched_tokens(settings.max_num_seqs, settings.max_model_len)
    on_gpu = {"max_num_batched_tokens": batched}
    return {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        **(_cpu_arguments(kind) if settings.device is Device.CPU else on_gpu),
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Explicit, because inside a Ray placement group vLLM would choose "ray".
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "gpu_memory_utilization": utilization,
        **({"enforce_eager": True} if settings.enforce_eager else {}),
        # vLLM reserves memory for the largest prompt within these limits. No videos.
        "limit_mm_per_prompt": {"image": settings.max_images_per_prompt, "video": 0},
        # ignore the checkpoint's sampling defaults
        "generation_config": "vllm",
        # Log-probabilities after bans, temperature and top-k/top-p: of the distribution that the
        # token was drawn from. The learner compares them with its own.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": settings.transport},
        "worker_extension_cls": settings.worker_extension,
        "disable_log_stats": True,
        # In every engine, because a client may set a rule after the start.
        "logits_processors": [GUARD_PROCESSOR],
        **({} if settings.head_dtype == "model" else {"hf_overrides": {"head_dtype": "float32"}}),
        **lora,
        **of_images,
    }


def _pixel_limits(model_path: str, most: int) -> dict[str, object]:
    """Return the settings with which vLLM's image processor makes at most `most` pixels.

    Raises ConfigError if these are too few, or if the model reads no images.
    """
    from transformers import AutoProcessor

    from shared.tokens.pictures import pictures_of, pixel_limits

    processor = AutoProcessor.from_pretrained(model_path)
    pictures = pictures_of(processor) if hasattr(processor, "image_processor") else None
    limits = pixel_limits(pictures, most, model_path, "max_pixels")
    assert pictures is not None, "refused by pixel_limits"
    return pictures.limits(*limits)


def batched_tokens(max_num_seqs: int, max_model_len: int) -> int:
    """Return the most tokens in a forward pass of an engine on GPUs.

    vLLM refuses fewer than `max_num_seqs`, and reserves memory for all of them.
    """
    return max(max_num_seqs, min(BATCHED_TOKENS, max_num_seqs * max_model_len))


def _cpu_arguments(kind: str) -> dict[str, object]:
    # On CPU a seeded request ends vLLM's engine if its prompt is processed in two steps ("CPU
    # Generator does not use offset").
    arguments: dict[str, object] = {"enable_chunked_prefill": False}
    if kind in HYBRID_MODEL_TYPES:
        # Otherwise vLLM caches prefix states, which requires chunked prefill.
        return arguments | {"enable_prefix_caching": False}
    # Only whole blocks are shared. vLLM's default of 128 tokens on CPU would compute the short
    # prompt of a group once for each of its rollouts.
    return arguments | {"block_size": CPU_BLOCK_SIZE}


def engine_runtime_env(settings: EngineSettings, **variables: str) -> dict[str, object]:
    """Return the Ray `runtime_env` of a rollout actor; `variables` are added to its environment."""
    return neighbour_runtime_env(settings, **engine_environment(settings), **variables)


def is_forked(settings: EngineSettings) -> bool:
    """Return whether the run's engines are forked from a warm server: those on one CPU device."""
    # An engine of several devices is not forked: a fork exits without freeing its modules, which
    # would leave named memory behind.
    return settings.device is Device.CPU and settings.tensor_parallel_size == 1


def neighbour_runtime_env(settings: EngineSettings, **variables: str) -> dict[str, object]:
    """Return the Ray `runtime_env` of an actor that starts next to the run's engines.

    Next to engines on one CPU device, the actor is forked from their warm server, which has already
    imported torch and vllm. Otherwise it starts as an ordinary process. Set `OMP_NUM_THREADS` in
    the variables, or torch uses a thread per core: Ray's own value comes too late for a fork.
    """
    if not is_forked(settings):
        return {"env_vars": variables}
    # Ray starts `py_executable` in place of python. Here it is a shim that asks the warm server
    # for a fork.
    server = {
        warm_python.FOLDER: warm_python.run_folder(),
        warm_python.VARIABLES: json.dumps(engine_environment(settings)),
    }
    return {"env_vars": variables | server, "py_executable": shlex.join(warm_python.command())}


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Return the environment variables to set before an engine's process imports torch or vllm."""
    common = {
        "VLLM_PLUGINS": "rollmatch",  # only this plugin
        "VLLM_NO_USAGE_STATS": "1",
        # The checkpoint is a folder, so no request goes to a hub.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM would fork a server on a GPU. A forked process assumes that our plugin is loaded,
        # would not end with its parent, and inherits the locks of the parent's threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # at a lower level every sync logs that layers without weights "failed to load" them
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(WORKER_CLOSE_S),
        # vLLM's own groups stay within the machine. The name that `ray start` got for other groups
        # may be of an interface that this node does not have.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if settings.enforce_eager:
        # Otherwise vLLM compiles its rank counting at the first request even in eager mode. On CPU
        # this takes 20 s and needs a C++ compiler, without a benefit.
        common["TORCHDYNAMO_DISABLE"] = "1"
    if settings.device is Device.CUDA:
        if settings.dtype == "float32":
            # vLLM's other attention kernels refuse float32, and Triton's would use TF32 by default.
            common["TRITON_F32_DEFAULT"] = "ieee"
        if settings.is_deterministic:
            common["VLLM_BATCH_INVARIANT"] = "1"
        return common
    return common | {
        # the worker runs in the engine's core process: half the start-up time
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise several engines bind to the same core
        "OMP_NUM_THREADS": "1",  # with more, log-probabilities depend on the batch
        # glibc keeps up to 256 MiB that a weight sync frees. Without this it would map new pages
        # one by one, which takes several times as long as filling them.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    }
