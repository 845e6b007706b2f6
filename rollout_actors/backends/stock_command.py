"""How a stock `vllm serve` is started so that it gives the rollouts of this run: what the client's messages and docs/stock_server.md name."""

from __future__ import annotations

import json
import shlex
from urllib.parse import urlsplit

from rollout_actors.engine_settings import EngineSettings, engine_environment, guard_arguments


def stock_command(settings: EngineSettings, base_url: str) -> str:
    """The command line, with the variables that this package needs set before it."""
    url = urlsplit(base_url)
    arguments = ["vllm", "serve", settings.model_path, "--host", url.hostname or "127.0.0.1", "--port", str(url.port or 8000), *stock_arguments(settings)]
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in stock_environment(settings).items()) + " " + shlex.join(arguments)


def stock_environment(settings: EngineSettings) -> dict[str, str]:
    """Variables of the server's process and its children; the key that callers must bring is not among them."""
    return {"VLLM_SERVER_DEV_MODE": "1"} | engine_environment(settings)


def stock_arguments(settings: EngineSettings) -> list[str]:
    """Of `vllm serve`, behind the model: `rollout_actors.vllm_requests.engine_arguments` as flags, and the routes that have to be opened."""
    values = {
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        "max-num-seqs": settings.max_num_seqs,
        "seed": settings.seed,
        "tensor-parallel-size": settings.tensor_parallel_size,
        "gpu-memory-utilization": settings.gpu_memory_utilization,
        "limit-mm-per-prompt": json.dumps({"image": settings.max_images_per_prompt, "video": 0}),
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": settings.transport}),
        "worker-extension-cls": settings.worker_extension,
    }
    if settings.kv_cache_memory_bytes is not None:
        values["kv-cache-memory-bytes"] = settings.kv_cache_memory_bytes
    guard = guard_arguments(settings.repeat_guard)
    if guard:
        values["logits-processors"] = " ".join(guard["logits_processors"])
        values["additional-config"] = json.dumps(guard["additional_config"])
    # No --disable-log-stats: the counters behind /metrics are how a run sees that the engine gets on.
    switches = ["--enable-scale-out", *(["--enforce-eager"] if settings.enforce_eager else [])]
    return [*switches, *(part for name, value in values.items() for part in (f"--{name}", str(value)))]
