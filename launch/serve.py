"""`python -m launch.serve model=FOLDER [port=8000] ...`: one vLLM engine behind HTTP, for `rollout_matching.vllm.mode: server` (spec: server mode),
and for whoever speaks the OpenAI API.

Prints a line with its URL when rollouts can be asked for. Ctrl-C and SIGTERM end it within seconds, and the engine's processes with it; it ends by
itself, with a message, when its engine has died. Several on one machine need a port each, and on CPU `kv_cache_memory_bytes`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console

from launch.arguments import read_arguments
from launch.command import explained
from launch.serve_options import ServeOptions, model_names, settings_of
from rollout_actors.engine_settings import EngineSettings, engine_environment, image_token_id, model_type
from rollout_actors.vllm_import import explained_import, require_installed
from shared.config.server import is_loopback
from shared.errors import ConfigError, RolloutError, ended
from shared.protocols import CLOSED_S

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rollout_actors.server.openai_routes import OpenAIServing
    from rollout_actors.server.openai_thread import OpenAIThread
    from rollout_actors.server.service import RolloutService, ServedEngine

ALIVE_CHECK_S = 0.5
"""How often the server looks whether its engine is alive."""
GRACE_S = 2
"""For answers under way when the server is told to end, and for an engine that is being made."""
END_S = 3.0
"""For an engine's processes to end when they are told to."""


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(Console(stderr=True, soft_wrap=True)):
        options = read_arguments(ServeOptions, sys.argv[1:] if arguments is None else arguments)
        require_installed("a rollout server")
        serve(options, settings_of(options))


def serve(options: ServeOptions, settings: EngineSettings) -> None:
    """An engine with these settings behind HTTP until a signal, which is raised as KeyboardInterrupt. Raises ConfigError, and RolloutError of the engine."""
    # Bound before the engine loads: a port that is taken is known at once. Taken out of the environment, which the engine's processes inherit.
    listening, token = _listen(options), None if options.token_env is None else os.environ.pop(options.token_env)
    # Before anything imports torch or vllm. (The routes under /infer/ look at images before vLLM does, and those under /v1/ leave it to vLLM.)
    os.environ.update(engine_environment(settings) | {"VLLM_MAX_IMAGE_PIXELS": str(options.max_image_pixels)})
    _serve(options, settings, token, listening)


def _listen(options: ServeOptions) -> socket.socket:
    try:
        return socket.create_server((options.host, options.port), family=socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"port: cannot listen on {options.host}:{options.port} ({error.strerror}); choose another port, 0 for any free one") from error


def _serve(options: ServeOptions, settings: EngineSettings, token: str | None, listening: socket.socket) -> None:
    from rollout_actors.server.app import make_app
    from rollout_actors.server.engine_thread import EngineThread
    from rollout_actors.server.messages import CallLimits
    from rollout_actors.server.openai_thread import OpenAIThread
    from rollout_actors.server.service import RolloutService

    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def make_engine() -> ServedEngine:
        with explained_import(url):
            from rollout_actors.server.vllm_openai import check_tool_parser
            from rollout_actors.vllm_engine import VllmEngine

        check_tool_parser(options.tool_call_parser)
        return VllmEngine(url, settings)

    def make_openai(engine: ServedEngine) -> OpenAIServing:
        from rollout_actors.server.vllm_openai import VllmOpenAI
        from rollout_actors.vllm_engine import VllmEngine

        assert isinstance(engine, VllmEngine)
        return VllmOpenAI.over(engine, model_names(options), tool_call_parser=options.tool_call_parser)

    engine = EngineThread(make_engine)
    openai = OpenAIThread(engine, make_openai)
    limits = CallLimits(options.max_request_bytes, options.max_requests, options.max_image_pixels)
    root = options.image_root and options.image_root.resolve()
    service = RolloutService(
        engine,
        name=url,
        model_type=model_type(settings.model_path),
        settings=settings,
        limits=limits,
        image_root=root,
        image_token_id=image_token_id(settings.model_path),
    )
    # By another name only a page in a browser of this machine would call it.
    only_from = ("localhost", host) if token is None and is_loopback(host) else ("*",)
    print(f"loading   {options.model} ({settings.dtype} on {settings.device}) for {url}", flush=True)
    try:
        app = make_app(service, openai=openai, token=token, only_from=only_from)
        interrupted = asyncio.run(_run(app, service, _start(service, openai, url), listening, url))
    finally:
        if not service.is_up:
            # Its thread waits for these.
            _end_family()
        engine.close(CLOSED_S if service.is_up else GRACE_S)
        _end_family()
    if interrupted:
        raise KeyboardInterrupt


async def _run(app: FastAPI, service: RolloutService, start: Coroutine[Any, Any, None], listening: socket.socket, url: str) -> bool:
    """Serves until a signal: then True. Raises RolloutError when the engine does not start or has died."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            """uvicorn would raise them again when it has ended, in the midst of the ending of everything else."""
            yield

    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE_S, server_header=False)
    server = Server(config)
    interrupted = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    starting = asyncio.create_task(start)
    try:
        while not interrupted.is_set() and not serving.done():
            if starting.done():
                starting.result()
            if service.is_dead:
                raise RolloutError(ended("the engine's", service.why_dead), actor=url, phase="serve")
            with suppress(TimeoutError):
                await asyncio.wait_for(interrupted.wait(), ALIVE_CHECK_S)
    finally:
        server.should_exit = True
        starting.cancel()
        await asyncio.wait((serving, starting))
    return interrupted.is_set()


async def _start(service: RolloutService, openai: OpenAIThread, url: str) -> None:
    try:
        await service.start(openai.start)
    except (RolloutError, ConfigError, OSError):
        raise
    except Exception as error:  # vLLM reports whatever it does not like about a model or a machine as some exception or other
        raise RolloutError(f"the engine did not start: {type(error).__name__}: {error}", actor=url, phase="start") from error
    print(f"ready     {url}, {service.world_size} rollout device{'s' * (service.world_size > 1)}", flush=True)


def _end_family() -> None:
    """What is left of the engine: it may have been told to end while it was starting, when vLLM has other processes too."""
    family = [process for process in psutil.Process().children(recursive=True) if not _ends_by_itself(process)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, END_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, END_S)


def _ends_by_itself(process: psutil.Process) -> bool:
    """Python's own helper, which tidies up when all the others have ended."""
    with suppress(psutil.NoSuchProcess):
        return "resource_tracker" in " ".join(process.cmdline())
    return True


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        # Python's own end would wait for threads that vLLM has started, some of which hear of nothing for half a minute (while they import, or warm up what
        # reads images), or crash in them. What an engine's thread starts until then ends with this process (`rollout_actors.vllm_plugin`).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
