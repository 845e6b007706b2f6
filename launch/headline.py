"""The one figure of a held-out report that a run is about: it closes the run, and checkpoints are kept by it."""

from __future__ import annotations

from typing import NamedTuple


class Headline(NamedTuple):
    name: str
    """`F1@0.5`, `mean reward`"""
    value: float
    """The higher the better."""
