"""The names of environments: those of the examples, and those of installed packages.

This module is outside of the package `environments`, whose import takes half a second.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

ENTRY_POINTS = "rollmatch.environments"
"""Entry point group in which installed packages register their environments:
`name = "package.module"`, or `"package.module:load_environment"`.
"""
_EXAMPLES = "rollout_actors.environments.examples"


def environment_names() -> list[str]:
    """Return the names of the example environments and of the installed ones."""
    return sorted({*installed_environments(), *example_environments()})


def installed_environments() -> Mapping[str, EntryPoint]:
    """Return the entry point of each installed environment, by its name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def example_environments() -> Mapping[str, str]:
    """Return the module of each example environment, by its name."""
    folder = Path(__file__).parent / "environments" / "examples"
    modules = pkgutil.iter_modules([str(folder)])
    return {module.name: f"{_EXAMPLES}.{module.name}" for module in modules}
