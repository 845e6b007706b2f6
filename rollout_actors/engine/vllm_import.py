"""Errors for a vLLM that is missing or cannot be imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from shared.errors import ConfigError, RolloutError

REMEDY = (
    "run `make setup`, or choose backend=hf (rollout_matching.rollout_backend: hf), which needs"
    " vLLM only for the tool calls of an environment"
)


def require_installed(user: str) -> None:
    """Raise ConfigError if vLLM is not installed here. Does not import it.

    `user` says in the message what needs vLLM.
    """
    # The import would cost the driver 6 to 10 seconds.
    if find_spec("vllm") is None:
        raise ConfigError(
            f"installation: vLLM is not installed here, and {user} needs it; {REMEDY}"
        )


@contextmanager
def explained_import(actor: str) -> Iterator[None]:
    """Raise RolloutError with a remedy if an import of vLLM in the `with` block fails."""
    try:
        yield
    except Exception as error:  # compiled parts raise more than ImportError
        reason = f"vLLM cannot be imported ({type(error).__name__}: {error}); {REMEDY}"
        raise RolloutError(reason, actor=actor, phase="start") from error
