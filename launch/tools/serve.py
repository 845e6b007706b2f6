"""`rollmatch serve model=FOLDER [port=8000] ...`: one vLLM engine behind HTTP.

It serves `rollout_matching.vllm.mode: server` (spec: server mode). It prints its URL when it is
ready. Ctrl-C and SIGTERM end it and the engine's processes within seconds; when its engine has died
or is stuck, it ends with a message.
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

    from rollout_actors.server.engine_watch import EngineWatch
    from rollout_actors.server.service import RolloutService, ServedEngine

ALIVE_CHECK_S = 0.5
SERVER_SHUTDOWN_S = 2
"""Time for answers under way, and for an engine that is being made, when the server has to end."""
FAMILY_SHUTDOWN_S = 3.0
"""Time for an engine's processes to end when they are told to."""


class ServeOptions(Section):
    model: Annotated[ConfigPath, Field(examples=["outputs/demo/model"])]
    """Checkpoint folder: the run's model.path, or a copy of it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the routes; 0: any free one, which is printed."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Others than this machine's own need token_env."""
    token_env: Annotated[str, Field(min_length=1)] | None = None
    """Environment variable with the bearer token that callers must send; null: see token."""
    token: Literal["file", "none"] = "file"
    """Where token_env is null: file: a new token, in a file that this user's runs on this machine
    find; none: every user of this machine may ask for rollouts and send weights."""
    lease_s: PositiveFloat = LEASE_S
    """Seconds without a call of the run that sends weights after which another run may."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes; auto: on GPUs where there are some."""
    tensor_parallel_size: PositiveInt = 1
    """Devices of the engine."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the weights: the run's model.dtype."""
    max_model_len: PositiveInt = 4096
    """Longest prompt + response in tokens: at least the run's global_max_length."""
    max_num_seqs: PositiveInt = 32
    """Sequences decoded at a time: at least the run's decode_batch_size for each device."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Bytes of the key-value cache; null: what gpu_memory_utilization leaves."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = DEDICATED_MEMORY_UTILIZATION
    """Fraction of the device's memory the engine may use, if kv_cache_memory_bytes is null."""
    enforce_eager: bool = False
    """No compilation and no graph capture: a quicker start, a slower decode."""
    transport: Literal["auto", "nccl", "rollmatch_gloo"] = "auto"
    """How weights arrive; auto: nccl on GPUs, rollmatch_gloo on CPU."""
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
    max_request_bytes: PositiveInt = 64 * 2**20
    """Largest body of one call, and largest image file."""
    max_image_pixels: PositiveInt = IMAGE_PIXELS
    """Largest image, decoded: width times height."""
    stall_s: PositiveFloat | None = 120.0
    """Seconds without a token or any other answer from the engine after which the server ends, but
    for those in which a sync waits for others; null: never. Longer than any step of the engine."""
    seed: int = 0
    """Of the engine; every request brings its own."""


def settings_of(options: ServeOptions) -> EngineSettings:
    """Return the settings of the engine. Raises ConfigError with every problem."""
    problems: list[str] = []
    remedy = "give the run's model.path, or a copy of it"
    no_model = list(checkpoint_problems(options.model, key="model", remedy=remedy))
    problems += no_model
    if options.image_root is not None and not options.image_root.is_dir():
        problems.append(
            f"image_root: {options.image_root} is not a folder; give one, or leave it out"
        )
    if options.token_env is None and not is_loopback(options.host):
        problems.append(
            f"host: {options.host} lets other machines ask for rollouts and send weights; keep"
            " 127.0.0.1, or set token_env=NAME, an environment variable with their token"
        )
    if options.token_env is not None and options.token == "none":
        problems.append(f"token: is none, and token_env names {options.token_env}; remove one")
    if options.token_env is not None and not os.environ.get(options.token_env):
        unset = f"the environment variable {options.token_env} is not set"
        problems.append(f"token_env: {unset}; export a token in it")
    device = device_here() if options.device == "auto" else Device(options.device)
    transport = choose_transport(device, device, Sharing.NOTHING)
    if options.transport not in ("auto", transport):
        problems.append(
            f"transport: {options.transport} does not lead to an engine on {device}; write auto,"
            f" or {transport}"
        )
    if options.enable_lora and options.max_lora_rank > LORA_RANKS[-1]:
        problems.append(
            f"max_lora_rank: is {options.max_lora_rank}, vLLM serves adapters of rank"
            f" {LORA_RANKS[-1]} at most; lower it"
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
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        enable_lora=options.enable_lora,
        max_lora_rank=options.max_lora_rank,
    )


def device_here() -> Device:
    """Return CUDA where there is a visible GPU."""
    # By the driver's files: torch has to be imported under the engine's environment.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    return Device.CUDA if visible and any(Path("/dev").glob("nvidia[0-9]*")) else Device.CPU


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        options = read_arguments(ServeOptions, sys.argv[1:] if arguments is None else arguments)
        require_installed("a rollout server")
        serve(options, settings_of(options))


def serve(options: ServeOptions, settings: EngineSettings) -> None:
    """Serve an engine with these settings until a signal.

    Raises:
        KeyboardInterrupt: after the signal.
        ConfigError: the port is taken, or the files lack tensors of the model.
        RolloutError: the engine did not start, has died, or is stuck.
    """
    # Bound before the engine loads: a port that is taken is known at once.
    listening = _listen(options)
    # Taken out of the environment, which the engine's processes inherit.
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
    """Serve on a bound socket. `file`: the one that holds the token. Raises as `serve` does."""
    host, port = listening.getsockname()[:2]
    # Before anything imports torch or vllm.
    os.environ.update(engine_environment(settings))
    from launch.checks.weights import weight_warnings
    from rollout_actors.server.app import make_app
    from rollout_actors.server.engine_thread import EngineThread
    from rollout_actors.server.engine_watch import EngineWatch
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
    # By another name only a page in a browser of this machine would call it.
    only_from = ("localhost", host) if token is None and is_loopback(host) else ("*",)
    print(
        f"loading   {options.model} ({settings.dtype} on {settings.device}) for {url}", flush=True
    )
    if file is not None:
        print(f"token     in {file}, where runs of this user on this machine find it", flush=True)
    elif token is None:
        why = "every user of this machine may ask for rollouts and send weights"
        print(f"warning   token=none: {why}", flush=True)
    try:
        app = make_app(service, token=token, only_from=only_from)
        watch = EngineWatch(service, options.stall_s)
        interrupted = asyncio.run(_run(app, service, watch, listening))
    finally:
        if not service.is_up:
            # Its thread waits for these.
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
            " another port, 0 for any free one"
        ) from error


async def _run(
    app: FastAPI, service: RolloutService, watch: EngineWatch, listening: socket.socket
) -> bool:
    """Serve until a signal, and then return True. Raises RolloutError as `serve`."""
    import uvicorn

    from rollout_actors.server.connections import PromptProtocol, open_many_files

    open_many_files()
    engine = service.engine
    url = service.name

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            """Leave signals alone: uvicorn would raise them again in the midst of the ending."""
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
    server = Server(config)
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
    # vLLM reports anything that it does not like about a model or a machine as any exception.
    except Exception as error:
        raise RolloutError(
            f"the engine did not start: {type(error).__name__}: {error}", actor=url, phase="start"
        ) from error
    devices = f"{service.world_size} rollout device{'s' * (service.world_size > 1)}"
    print(f"ready     {url}, {devices}", flush=True)


def _end_family() -> None:
    """End the engine's processes that are left: one that is starting has others of vLLM's too."""
    family = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # Python's own helper tidies up and ends by itself when all the others have ended.
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
        # Python's own end would wait for threads of vLLM, some of which notice nothing for half a
        # minute, or crash in them. What an engine's thread starts until then ends with this process
        # (`rollout_actors.engine.vllm_plugin`).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
