"""Errors for a missing or broken vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from shared.errors import ConfigError, RolloutError

REMEDY = (
    "run `make setup`, or choose backend=hf (rollout_matching.rollout_backend: hf), which needs no"
    " vLLM but for the tool calls of an environment"
)


def require_installed(user: str) -> None:
    """Raise ConfigError where this environment has no vLLM, which `user` needs. Imports nothing."""
    # Only looked for: importing it costs the driver 6 to 10 seconds.
    if find_spec("vllm") is None:
        raise ConfigError(
            f"installation: vLLM is not installed here, and {user} cannot go without it; {REMEDY}"
        )


@contextmanager
def explained_import(actor: str) -> Iterator[None]:
    """Turn an error of importing vLLM in the body into a RolloutError of `actor`, phase "start"."""
    try:
        yield
    except Exception as error:  # compiled parts fail with more than ImportError
        reason = f"vLLM cannot be imported ({type(error).__name__}: {error}); {REMEDY}"
        raise RolloutError(reason, actor=actor, phase="start") from error
