"""Functions of users: reward functions and tools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without what `update_wrapper` notes on a partial, by which its signature would be that of what it wraps, with what it binds."""
    return partial(bare(function.func), *function.args, **function.keywords) if isinstance(function, partial) else function


def name_of(function: Callable[..., Any]) -> str:
    """Its own, or of a partial without one that of what it wraps, or else that of its class."""
    given: str | None = getattr(function, "__name__", None)
    if given is None:
        return name_of(function.func) if isinstance(function, partial) else type(function).__name__
    return given
