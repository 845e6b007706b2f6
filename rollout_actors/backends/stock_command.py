"""How a stock `vllm serve` is started so that it gives the rollouts of this run: what the client's messages and docs/stock_server.md name."""

from __future__ import annotations

import json
import shlex
from typing import Any
from urllib.parse import urlsplit

from rollout_actors.engine_settings import EngineSettings, engine_arguments, engine_environment

NOT_SAID = frozenset({"model", "distributed_executor_backend", "disable_log_stats"})
"""Engine arguments that are no flags here: the model comes first, a server that is in no placement group chooses how its devices work together, and the
counters behind /metrics are how a run sees that the engine gets on."""


def stock_command(settings: EngineSettings, base_url: str) -> str:
    """The command line, with the variables that this package needs set before it."""
    url = urlsplit(base_url)
    arguments = ["vllm", "serve", settings.model_path, "--host", url.hostname or "127.0.0.1", "--port", str(url.port or 8000), *stock_arguments(settings)]
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in stock_environment(settings).items()) + " " + shlex.join(arguments)


def stock_environment(settings: EngineSettings) -> dict[str, str]:
    """Variables of the server's process and its children; the key that callers must bring is not among them."""
    return {"VLLM_SERVER_DEV_MODE": "1"} | engine_environment(settings)


def stock_arguments(settings: EngineSettings) -> list[str]:
    """Of `vllm serve`, behind the model: the engine's arguments as flags, and the routes that have to be opened."""
    values = {name: value for name, value in engine_arguments(settings).items() if name not in NOT_SAID}
    return ["--enable-scale-out", *(part for name, value in values.items() for part in _flag(f"--{name.replace('_', '-')}", value))]


def _flag(name: str, value: Any) -> list[str]:
    match value:
        case None:
            return []
        case False:
            return [f"--no-{name.removeprefix('--')}"]
        case True:
            return [name]
        case dict():
            return [name, json.dumps(value)]
        case list():
            return [name, *value]
        case _:
            return [name, str(value)]
