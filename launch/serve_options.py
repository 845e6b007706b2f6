"""The command line of `launch.serve`, and the engine that it asks for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError

from learner.checkpoint_folder import checkpoint_problems
from rollout_actors.engine_settings import EngineSettings
from rollout_actors.server.messages import IMAGE_PIXELS
from shared.config.base import ConfigPath, Section, plain
from shared.config.explain import explain
from shared.config.repeat_terminate import RepeatTerminateSection
from shared.config.rollout_matching import DEDICATED_MEMORY_UTILIZATION
from shared.config.server import is_loopback
from shared.errors import ConfigError
from shared.lora import LORA_RANKS
from shared.repeat_guard import RepeatGuardSettings
from shared.transports import Device, Sharing, Transport, choose_transport


class ServeOptions(Section):
    model: Annotated[ConfigPath, Field(examples=["outputs/demo/model"])]
    """Checkpoint folder: the run's model.path, or a copy of it."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the routes; 0: any free one, which is printed."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Others than this machine's own need token_env."""

    token_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable that holds the bearer token callers must send; null: none."""

    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    """What callers of /v1/ name the model, several with commas between; null: the path, as it is given in model."""

    tool_call_parser: Annotated[str, Field(min_length=1)] | None = None
    """vLLM's name of what reads tool calls from the model's text (hermes, ...); null: callers of /v1/chat/completions may bring no tools."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes; auto: on GPUs where there are some."""

    tensor_parallel_size: PositiveInt = 1
    """Devices of the engine."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the weights: the run's model.dtype."""

    max_model_len: PositiveInt = 4096
    """Longest prompt + response in tokens: at least the run's global_max_length."""

    max_num_seqs: PositiveInt = 32
    """Sequences decoded at a time: at least the run's decode_batch_size times tensor_parallel_size."""

    kv_cache_memory_bytes: PositiveInt | None = None
    """Bytes of the key-value cache; null: what gpu_memory_utilization leaves."""

    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = DEDICATED_MEMORY_UTILIZATION
    """Fraction of the device's memory the engine may use; ignored where kv_cache_memory_bytes is given."""

    enforce_eager: bool = False
    """No compilation and no graph capture: a quicker start, a slower decode."""

    transport: Literal["auto", "nccl", "rollmatch_gloo"] = "auto"
    """How weights arrive; auto: nccl on GPUs, rollmatch_gloo on CPU."""

    repeat_terminate: str | None = None
    """Repeat guard of callers of /v1/ until a run asks for rollouts, which brings its own:
    rollout_matching.repeat_terminate as JSON, or the path of a JSON or YAML file of it; null: none.
    Runs need no such argument."""

    enable_lora: bool = False
    """Let a sync bring an adapter alone: the run's rollout_matching.vllm.enable_lora."""

    max_lora_rank: PositiveInt = 16
    """The largest rank of such an adapter."""

    max_images_per_prompt: PositiveInt = 1
    """Most images of one request."""

    image_root: ConfigPath | None = None
    """Folder of images that requests may name by path; null: images come as data alone."""

    max_requests: PositiveInt = 1024
    """Most requests of one call."""

    max_request_bytes: PositiveInt = 256 * 2**20
    """Largest body of one call, and largest image file."""

    max_image_pixels: PositiveInt = IMAGE_PIXELS
    """Largest image, decoded: width times height."""

    seed: int = 0
    """Of the engine; every request brings its own."""


def model_names(options: ServeOptions) -> tuple[str, ...]:
    """By which callers of the OpenAI API may ask for the model; answers say the first."""
    names = () if options.served_model_name is None else (name.strip() for name in options.served_model_name.split(","))
    return tuple(filter(None, names)) or (str(options.model),)


def settings_of(options: ServeOptions) -> EngineSettings:
    """Raises ConfigError with every problem."""
    problems: list[str] = []
    guard = None
    try:
        guard = _guard(options.repeat_terminate)
    except ConfigError as error:
        problems += error.problems
    problems += checkpoint_problems(options.model, key="model", remedy="give the run's model.path, or a copy of it")
    if options.image_root is not None and not options.image_root.is_dir():
        problems.append(f"image_root: {options.image_root} is not a folder; give one, or leave it out")
    if options.token_env is None and not is_loopback(options.host):
        problems.append(
            f"host: {options.host} lets other machines ask for rollouts and send weights; keep 127.0.0.1, or set token_env=NAME, the environment variable with "
            "the token they must send"
        )
    if options.token_env is not None and not os.environ.get(options.token_env):
        problems.append(f"token_env: the environment variable {options.token_env} is not set; export a token in it")
    device = device_here() if options.device == "auto" else Device(options.device)
    transport = Transport.GLOO
    try:
        transport = choose_transport(options.transport, device, device, Sharing.NOTHING, key="transport")
    except ConfigError as error:
        problems += error.problems
    if options.enable_lora and options.max_lora_rank > LORA_RANKS[-1]:
        problems.append(f"max_lora_rank: is {options.max_lora_rank}, vLLM serves adapters of rank {LORA_RANKS[-1]} at most; lower it")
    if problems:
        raise ConfigError(problems)
    return EngineSettings(
        model_path=str(options.model.resolve()),
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        seed=options.seed,
        transport=transport,
        device=device,
        tensor_parallel_size=options.tensor_parallel_size,
        max_images_per_prompt=options.max_images_per_prompt,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        repeat_guard=guard,
        enable_lora=options.enable_lora,
        max_lora_rank=options.max_lora_rank,
    )


def _guard(text: str | None) -> RepeatGuardSettings | None:
    """The whole subtree, under the schema of the run's own."""
    if text is None:
        return None
    try:
        section = yaml.safe_load(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
        if not isinstance(section, dict):
            raise ConfigError(
                f'repeat_terminate: {text!r} holds no mapping; give the run\'s rollout_matching.repeat_terminate, for example {{"enabled": true}}'
            )
        return RepeatTerminateSection.model_validate(plain(section)).settings()
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"repeat_terminate: cannot read {text!r} ({' '.join(str(error).split())}); give JSON in braces, or the path of a file of it"
        ) from error
    except ValidationError as error:
        problems = (explain(RepeatTerminateSection, one) for one in error.errors(include_url=False))
        raise ConfigError([f"repeat_terminate.{problem}" for problem in problems]) from error


def device_here() -> Device:
    """GPUs where there are some. Asks the driver's files and not torch, which has to be imported under the engine's environment."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    return Device.CUDA if visible and any(Path("/dev").glob("nvidia[0-9]*")) else Device.CPU
