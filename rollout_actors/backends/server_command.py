"""How a `python -m launch.serve` is started so that it suits a run: what the messages of the client, and of `launch.evaluate`, say."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from urllib.parse import urlsplit

from rollout_actors.engine_settings import EngineSettings
from rollout_actors.server.messages import IMAGE_PIXELS


def serve_command(settings: EngineSettings, base_url: str, *, tool_call_parser: str | None = None) -> str:
    """The command line, for a shell. The parser is for callers of the OpenAI API; this package's own ask for tokens."""
    arguments = serve_arguments(settings, port=urlsplit(base_url).port or 8000)
    parser = [] if tool_call_parser is None else [f"tool_call_parser={tool_call_parser}"]
    return shlex.join(["python", "-m", "launch.serve", *arguments, *parser])


def serve_arguments(settings: EngineSettings, *, port: int) -> list[str]:
    """`key=value` of everything in the settings that `launch.serve` would not choose itself."""
    values = {
        "model": settings.model_path,
        "port": port,
        "device": settings.device,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "seed": settings.seed,
    }
    # A server has room for one at the least; of a text model it is nothing.
    if settings.max_images_per_prompt:
        values["max_images_per_prompt"] = settings.max_images_per_prompt
    if settings.max_image_pixels > IMAGE_PIXELS:
        values["max_image_pixels"] = settings.max_image_pixels
    if settings.kv_cache_memory_bytes is None:
        values["gpu_memory_utilization"] = settings.gpu_memory_utilization
    else:
        values["kv_cache_memory_bytes"] = settings.kv_cache_memory_bytes
    if settings.enforce_eager:
        values["enforce_eager"] = "true"
    if settings.repeat_guard is not None:
        values["repeat_terminate"] = json.dumps({"enabled": True} | asdict(settings.repeat_guard))
    if settings.enable_lora:
        values |= {"enable_lora": "true", "max_lora_rank": settings.max_lora_rank}
    return [f"{key}={value}" for key, value in values.items()]
