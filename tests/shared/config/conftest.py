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
from shared.config.pipeline import EXAMPLE_POLICY_GRADIENT
from shared.errors import ConfigError

MINIMAL = yaml.safe_load((Path(__file__).parents[2] / "data" / "minimal_config.yaml").read_text())
TRAJECTORIES = {
    "custom.trainer_variant": "trajectory_pg",
    "data": ...,
    "environment": {"id": "guess_number"},
    "stage2_ab.schedule": ...,
    "stage2_ab.channel_b.rollouts_per_step": ...,
    "rollout_matching.decoding": {"temperature": 1.0},
    "rollout_matching.pipeline.objective": [EXAMPLE_POLICY_GRADIENT],
}
"""What makes the minimal configuration one of an environment: 32 rollouts a step, of 4 examples."""


@pytest.fixture
def changed() -> Callable[..., dict[str, Any]]:
    """The minimal configuration, or another one, with `{"a.b[0].c": value}` changed; `...` deletes
    the key.
    """

    def change(changes: Mapping[str, Any], base: Mapping[str, Any] = MINIMAL) -> dict[str, Any]:
        config = copy.deepcopy(dict(base))
        for path, value in copy.deepcopy(dict(changes)).items():
            keys = [
                int(part[1:-1]) if part.startswith("[") else part
                for part in re.findall(r"\[\d+\]|[^.\[\]]+", path)
            ]
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
def load_trajectories(
    changed: Callable[..., dict[str, Any]],
) -> Callable[[Mapping[str, Any]], RunConfig]:
    """Load the minimal configuration of an environment with changes."""
    return lambda changes: load_config(changed(changes, changed(TRAJECTORIES)))


@pytest.fixture
def problems(
    load: Callable[[Mapping[str, Any]], RunConfig],
) -> Callable[[Mapping[str, Any]], list[str]]:
    """The lines of the error that changes to the minimal configuration give; none where they are
    accepted.
    """

    return lambda changes: problems_of(load, changes)


@pytest.fixture
def trajectory_problems(
    load_trajectories: Callable[[Mapping[str, Any]], RunConfig],
) -> Callable[[Mapping[str, Any]], list[str]]:
    """The same of the minimal configuration of an environment."""
    return lambda changes: problems_of(load_trajectories, changes)


def problems_of(
    load: Callable[[Mapping[str, Any]], RunConfig], changes: Mapping[str, Any]
) -> list[str]:
    try:
        load(changes)
    except ConfigError as error:
        return str(error).splitlines()
    return []
