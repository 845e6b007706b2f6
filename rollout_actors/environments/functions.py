"""Functions of users: reward functions and tools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without what `update_wrapper` notes on a partial, by which its signature would be that of what it wraps, with what it binds."""
    return partial(bare(function.func), *function.args, **function.keywords) if isinstance(function, partial) else function
