from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import pytest
import yaml

from shared.config import RunConfig, load_config
from shared.errors import ConfigError

MINIMAL = yaml.safe_load((Path(__file__).parents[2] / "data" / "minimal_config.yaml").read_text())


@pytest.fixture
def changed() -> Callable[..., dict[str, Any]]:
    """The minimal configuration, or another one, with `{"a.b[0].c": value}` changed; `...` deletes the key."""

    def change(changes: Mapping[str, Any], base: Mapping[str, Any] = MINIMAL) -> dict[str, Any]:
        config = copy.deepcopy(dict(base))
        for path, value in copy.deepcopy(dict(changes)).items():
            keys = [int(part[1:-1]) if part.startswith("[") else part for part in re.findall(r"\[\d+\]|[^.\[\]]+", path)]
            node = config
            for key in keys[:-1]:
                node = node.setdefault(key, {}) if isinstance(node, dict) else node[key]
            if isinstance(value, EllipsisType):
                del node[keys[-1]]
            elif isinstance(node, list) and keys[-1] == len(node):
                node.append(value)
            else:
                node[keys[-1]] = value
        return config

    return change


@pytest.fixture
def load(changed: Callable[..., dict[str, Any]]) -> Callable[[Mapping[str, Any]], RunConfig]:
    """Load the minimal configuration with changes."""
    return lambda changes: load_config(changed(changes))


@pytest.fixture
def problems(load: Callable[[Mapping[str, Any]], RunConfig]) -> Callable[[Mapping[str, Any]], list[str]]:
    """The lines of the error that changes to the minimal configuration give; none where they are accepted."""

    def find(changes: Mapping[str, Any]) -> list[str]:
        try:
            load(changes)
        except ConfigError as error:
            return str(error).splitlines()
        return []

    return find
