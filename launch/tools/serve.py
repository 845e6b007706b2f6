"""`rollmatch serve model=FOLDER [port=8000] ...`: serves one vLLM engine over HTTP.

Runs use it with `rollout_matching.vllm.mode: server` (docs/how_to/servers.md). It prints its URL
when it is ready. Ctrl-C and SIGTERM end the server and the engine's processes within seconds. If
the engine dies or is stuck, the server ends with a message.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import psutil
from pydantic import Field, PositiveFloat, PositiveInt

from launch.cli import ending_signals, explained, read_arguments
from launch.run_folder.console import escaped, make_console
from learner.model.checkpoint_folder import checkpoint_problems
from rollout_actors.engine.settings import (
    EngineSettings,
    engine_environment,
    family_problems,
    image_token_id,
    is_trained,
    model_type,
)
from rollout_actors.engine.vllm_import import explained_import, require_installed
from rollout_actors.server.lease import LEASE_S, Lease
from rollout_actors.server.messages import IMAGE_PIXELS
from rollout_actors.server.token_file import remove_token, token_file, write_token
from shared.config.base import ConfigPath, Section
from shared.config.rollout import DEDICATED_MEMORY_UTILIZATION, is_loopback
from shared.errors import ConfigError, RolloutError, ended
from shared.protocols import CLOSED_S
from shared.weight_sync.offer import LORA_RANKS
from shared.weight_sync.transports import Device, Sharing, choose_transport

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rollout_actors.server.engine_thread import EngineWatch
    from rollout_actors.server.service import RolloutService, ServedEngine

ALIVE_CHECK_S = 0.5
SERVER_SHUTDOWN_S = 2
"""Seconds that an ending server has to finish open answers, or to end a starting engine."""
FAMILY_SHUTDOWN_S = 3.0
"""Seconds in which an engine's processes must end after SIGTERM."""


class ServeOptions(Section):
    model: Annotated[ConfigPath, Field(examples=["outputs/demo/model"])]
    """Checkpoint folder: the run's model.path or a copy of it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0: any free port, which is printed."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Addresses that other machines can reach need token_env."""
    token_env: Annotated[str, Field(min_length=1)] | None = None
    """Environment variable with the bearer token that callers must send; null: see token."""
    token: Literal["file", "none"] = "file"
    """Used if token_env is null. file: write a new token to a file, which runs of this user on this
    machine find. none: every user of this machine may request rollouts and send weights."""
    lease_s: PositiveFloat = LEASE_S
    """Seconds without a call of the run that sends weights, after which another run may send."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; auto: GPUs if there are any."""
    tensor_parallel_size: PositiveInt = 1
    """Number of devices of the engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Number type of the weights: the run's model.dtype."""
    head_dtype: Literal["model", "float32"] = "model"
    """Number type of the logits: the run's model.head_dtype."""
    max_model_len: PositiveInt = 4096
    """Maximum tokens of prompt and response: at least the run's global_max_length."""
    max_num_seqs: PositiveInt = 32
    """Maximum sequences decoded at once: at least the run's decode_batch_size per device."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Bytes of the key-value cache; null: as much as gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = DEDICATED_MEMORY_UTILIZATION
    """Fraction of the device's memory the engine may use, if kv_cache_memory_bytes is null."""
    enforce_eager: bool = False
    """Do not compile or capture graphs: the start is faster, decoding is slower."""
    transport: Literal["auto", "nccl", "rollmatch_gloo"] = "auto"
    """Transport of weights; auto: nccl on GPUs, rollmatch_gloo on CPU."""
    enable_lora: bool = False
    """Allow weight syncs of only an adapter: the run's rollout_matching.vllm.enable_lora."""
    max_lora_rank: PositiveInt = 16
    """Maximum rank of an adapter."""
    max_images_per_prompt: PositiveInt = 1
    """Maximum images of one request."""
    max_pixels: PositiveInt | None = None
    """Reduce images with more pixels to this number: the run's data.max_pixels; null: the limit of
    the checkpoint's processor."""
    image_root: ConfigPath | None = None
    """Folder of images that requests may name by path; null: requests must contain the images."""
    max_requests: PositiveInt = 1024
    """Maximum requests of one call."""
    max_request_bytes: PositiveInt = 64 * 2**20
    """Maximum bytes of the body of one call, and of an image file."""
    max_image_pixels: PositiveInt = IMAGE_PIXELS
    """Maximum pixels of a decoded image: width times height."""
    stall_s: PositiveFloat | None = 120.0
    """Seconds without an answer from the engine, after which the server ends; null: never. Must be
    longer than any step of the engine. Time in which a weight sync waits for others does not count.
    """
    seed: int = 0
    """Seed of the engine. Each request has its own seed."""


def settings_of(options: ServeOptions) -> EngineSettings:
    """Return the settings of the engine to serve. Raises ConfigError with all problems."""
    problems: list[str] = []
    remedy = "give the run's model.path or a copy of it"
    no_model = list(checkpoint_problems(options.model, key="model", remedy=remedy))
    problems += no_model
    if options.image_root is not None and not options.image_root.is_dir():
        problems.append(
            f"image_root: {options.image_root} is not a folder; give a folder, or remove the key"
        )
    if options.token_env is None and not is_loopback(options.host):
        problems.append(
            f"host: {options.host} lets other machines request rollouts and send weights; keep"
            " 127.0.0.1, or set token_env=NAME, an environment variable with a token"
        )
    if options.token_env is not None and options.token == "none":
        problems.append(
            f"token: `none` contradicts token_env={options.token_env}; remove one of them"
        )
    if options.token_env is not None and not os.environ.get(options.token_env):
        unset = f"the environment variable {options.token_env} is not set"
        problems.append(f"token_env: {unset}; export it with a token")
    device = device_here() if options.device == "auto" else Device(options.device)
    transport = choose_transport(device, device, Sharing.NOTHING)
    if options.transport not in ("auto", transport):
        problems.append(
            f"transport: {options.transport} cannot reach an engine on {device}; write auto,"
            f" or {transport}"
        )
    if options.enable_lora and options.max_lora_rank > LORA_RANKS[-1]:
        problems.append(
            f"max_lora_rank: is {options.max_lora_rank}, but vLLM serves adapters up to rank"
            f" {LORA_RANKS[-1]}; lower it"
        )
    if not no_model:
        of_family = family_problems(
            str(options.model),
            device=device,
            dtype=options.dtype,
            enable_lora=options.enable_lora,
        )
        problems += (f"{key}: {text}" for key, text in of_family)
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
        max_pixels=options.max_pixels,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        enable_lora=options.enable_lora,
        max_lora_rank=options.max_lora_rank,
        head_dtype=options.head_dtype,
    )


def device_here() -> Device:
    # Looks at the driver's files: torch must be imported later, with the engine's environment.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    return Device.CUDA if visible and any(Path("/dev").glob("nvidia[0-9]*")) else Device.CPU


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        options = read_arguments(ServeOptions, arguments)
        require_installed("a rollout server")
        serve(options, settings_of(options))


def serve(options: ServeOptions, settings: EngineSettings) -> None:
    """Serve a vLLM engine with these settings over HTTP until a signal arrives.

    Raises:
        KeyboardInterrupt: after the signal.
        ConfigError: the port is taken, or the files lack tensors of the model.
        RolloutError: the engine did not start, has died, or is stuck.
    """
    # Bound before the engine loads, so that a taken port is reported at once.
    listening = _listen(options)
    # Removed from the environment, because the engine's processes inherit it.
    token = None if options.token_env is None else os.environ.pop(options.token_env)
    host, port = listening.getsockname()[:2]
    file = token_file(host, port) if token is None and options.token == "file" else None
    if file is not None:
        token = write_token(file)
    try:
        _serve_at(listening, token, file, options, settings)
    finally:
        if file is not None and token is not None:
            remove_token(file, token)


def _serve_at(
    listening: socket.socket,
    token: str | None,
    file: Path | None,
    options: ServeOptions,
    settings: EngineSettings,
) -> None:
    """Serve on a bound socket; `file` holds the token. Raises like `serve`."""
    host, port = listening.getsockname()[:2]
    # Must be set before torch or vllm is imported.
    os.environ.update(engine_environment(settings))
    from launch.checks.weights import weight_warnings
    from rollout_actors.server.app import make_app
    from rollout_actors.server.engine_thread import EngineThread, EngineWatch
    from rollout_actors.server.messages import CallLimits
    from rollout_actors.server.service import RolloutService

    if is_trained(settings.model_path):
        for warning in weight_warnings(options.model, key="model", for_engines=True):
            print(escaped(f"warning   {warning}"), flush=True)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def make_engine() -> ServedEngine:
        with explained_import(url):
            from rollout_actors.engine.vllm_engine import VllmEngine
        return VllmEngine(url, settings)

    engine = EngineThread(make_engine)
    service = RolloutService(
        engine,
        name=url,
        model_type=model_type(settings.model_path),
        settings=settings,
        limits=CallLimits(
            options.max_request_bytes, options.max_requests, options.max_image_pixels
        ),
        image_root=options.image_root and options.image_root.resolve(),
        image_token_id=image_token_id(settings.model_path),
        lease=Lease(options.lease_s),
    )
    # Only a web page in a browser of this machine would use another host name.
    only_from = ("localhost", host) if token is None and is_loopback(host) else ("*",)
    print(
        f"loading   {options.model} ({settings.dtype} on {settings.device}) for {url}", flush=True
    )
    if file is not None:
        print(f"token     in {file}, where runs of this user on this machine find it", flush=True)
    elif token is None:
        why = "every user of this machine may request rollouts and send weights"
        print(f"warning   token=none: {why}", flush=True)
    try:
        app = make_app(service, token=token, only_from=only_from)
        watch = EngineWatch(service, options.stall_s)
        interrupted = asyncio.run(_run(app, service, watch, listening))
    finally:
        if not service.is_up:
            # The engine's thread waits for these processes.
            _end_family()
        engine.close(CLOSED_S if service.is_up else SERVER_SHUTDOWN_S)
        _end_family()
    if interrupted:
        raise KeyboardInterrupt


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise ConfigError(
            f"port: cannot listen on {options.host}:{options.port} ({error.strerror}); choose"
            " another port, or 0 for any free port"
        ) from error


async def _run(
    app: FastAPI, service: RolloutService, watch: EngineWatch, listening: socket.socket
) -> bool:
    """Serve until a signal arrives, and return True. Raises RolloutError like `serve`.

    Return False if the HTTP server has ended by itself.
    """
    import uvicorn

    from rollout_actors.server.app import PromptProtocol, open_many_files

    open_many_files()
    engine = service.engine
    url = service.name

    class UnsignalledServer(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            """Do not handle signals: uvicorn would raise them again during the shutdown."""
            yield

    config = uvicorn.Config(
        app,
        http=PromptProtocol,
        ws="none",
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SERVER_SHUTDOWN_S,
        server_header=False,
    )
    server = UnsignalledServer(config)
    interrupted = asyncio.Event()
    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    starting = asyncio.create_task(_start(service, url))
    try:
        while not interrupted.is_set() and not serving.done():
            if starting.done():
                starting.result()
            if engine.is_dead:
                raise RolloutError(ended("the engine's", engine.why_dead), actor=url, phase="serve")
            watch.look()
            with suppress(TimeoutError):
                await asyncio.wait_for(interrupted.wait(), ALIVE_CHECK_S)
    finally:
        server.should_exit = True
        starting.cancel()
        await asyncio.wait((serving, starting))
    return interrupted.is_set()


async def _start(service: RolloutService, url: str) -> None:
    try:
        await service.start()
    except (RolloutError, ConfigError, OSError):
        raise
    # vLLM raises exceptions of any type for problems of a model or machine.
    except Exception as error:
        raise RolloutError(
            f"the engine did not start: {type(error).__name__}: {error}", actor=url, phase="start"
        ) from error
    devices = f"{service.world_size} rollout device{'s' * (service.world_size > 1)}"
    print(f"ready     {url}, {devices}", flush=True)


def _end_family() -> None:
    """End remaining processes of the engine, including those of an engine that is starting."""
    family = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # Python's resource tracker cleans up and exits when all other processes have ended.
            if "resource_tracker" not in " ".join(process.cmdline()):
                process.terminate()
                family.append(process)
    _, alive = psutil.wait_procs(family, FAMILY_SHUTDOWN_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, FAMILY_SHUTDOWN_S)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        # The normal exit of Python waits for threads of vLLM, which may take half a minute, or
        # crashes in them. Processes that an engine's thread still starts end with this process
        # (`rollout_actors.engine.vllm_plugin`).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
