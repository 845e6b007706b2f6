"""Settings of memory with which a run would fit, as overrides to paste."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

from launch.checks.memory import Estimate
from shared.config import RunConfig, load_config
from shared.errors import ConfigError

Change = Mapping[str, Any]
"""Values by key, as the command line takes them."""
MOST = 4
"""Proposals that are shown."""
_FIXED: tuple[Change, ...] = (
    MappingProxyType({"model.gradient_checkpointing": True}),
    MappingProxyType({"model.activation_offload": True}),
    MappingProxyType({"model.attention": "auto"}),
    MappingProxyType({"training.optimizer": "adamw_bnb_8bit"}),
    MappingProxyType({"training.optimizer": "adamw_offload"}),
)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Keys that together make a run fit; without any one of them it would not."""

    overrides: tuple[str, ...]
    """As a shell takes them."""
    estimate: Estimate
    """Of the learner rank, or of it and an engine where they share a GPU."""

    def describe(self) -> str:
        return f"{' '.join(self.overrides)}: {self.estimate.describe()}"


def proposals(config: RunConfig, fitting: Callable[[RunConfig], Estimate | None]) -> list[Proposal]:
    """Return the sets of changes that fit, at most `MOST`, the cheapest first.

    Any number of cheaper changes is cheaper than one that costs more. More ranks are tried where
    nothing else fits.

    Args:
        fitting: the estimate of a run that fits, None of one that does not.
    """
    alone = _of_one_rank(config)
    found = _minimal(config, fitting, alone, [()])
    if not found:
        ranks = _of_more_ranks(config)
        found = _minimal(config, fitting, alone + ranks, [(change,) for change in ranks])
    return found[:MOST]


def _of_one_rank(config: RunConfig) -> list[Change]:
    halved = {"global_max_length": config.global_max_length // 2}
    adapter = {"model.adapter.kind": "lora"}
    values = config.model_dump(mode="json")
    return [
        change
        for change in (*_FIXED, halved, adapter)
        if any(_value(values, key) != value for key, value in change.items())
        and not (config.model.adapter and change is adapter)
        # Half a row may be too little for an answer, and an adapter needs a part that is trained.
        and not (change in (halved, adapter) and _changed(config, [change]) is None)
    ]


def _of_more_ranks(config: RunConfig) -> list[Change]:
    return [
        {"learner.parallel": "fsdp", "learner.world_size": ranks}
        for ranks in (2, 4, 8)
        if ranks > config.learner.world_size
    ]


def _minimal(
    config: RunConfig,
    fitting: Callable[[RunConfig], Estimate | None],
    possible: list[Change],
    beside: list[tuple[Change, ...]],
) -> list[Proposal]:
    """Return every set of which no part fits, with one of `beside`, the cheapest first."""
    free = [change for change in possible if not any(change in taken for taken in beside)]
    # With all that goes together first: what does not fit then fits with nothing, and soon.
    optimizers = [change for change in free if "training.optimizer" in change]
    others = [change for change in free if change not in optimizers]
    all_of_it = [
        [*others, *optimizer, *taken]
        for optimizer in ((), *((one,) for one in optimizers))
        for taken in beside
    ]
    if not any(_fits(config, fitting, everything) for everything in all_of_it):
        return []
    found: dict[tuple[int, ...], Proposal] = {}
    for size in range(len(free) + 1):
        for chosen, taken in product(combinations(free, size), beside):
            numbers = tuple(possible.index(change) for change in (*chosen, *taken))
            # With more than is needed it would fit as well.
            if not numbers or any(set(other) <= set(numbers) for other in found):
                continue
            together = [possible[number] for number in numbers]
            if (estimate := _fits(config, fitting, together)) is not None:
                found[numbers] = Proposal(tuple(_overrides(together)), estimate)

    def cost(numbers: tuple[int, ...]) -> int:
        return sum(1 << number for number in numbers)

    return [found[numbers] for numbers in sorted(found, key=cost)]


def _fits(
    config: RunConfig, fitting: Callable[[RunConfig], Estimate | None], chosen: list[Change]
) -> Estimate | None:
    changed = _changed(config, chosen)
    return None if changed is None else fitting(changed)


def _changed(config: RunConfig, chosen: list[Change]) -> RunConfig | None:
    """Return the configuration with these changes; None where they contradict each other."""
    keys = [key for change in chosen for key in change]
    if len(set(keys)) < len(keys):
        return None
    values = config.model_dump(mode="json")
    for change in chosen:
        for path, value in change.items():
            *parents, key = path.split(".")
            section = values
            for parent in parents:
                if section[parent] is None:
                    section[parent] = {}
                section = section[parent]
            section[key] = value
    try:
        return load_config(values)
    except ConfigError:
        return None


def _overrides(chosen: list[Change]) -> Iterator[str]:
    for change in chosen:
        for key, value in change.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            yield shlex.quote(f"{key}={text}")


def _value(values: Mapping[str, Any], path: str) -> Any:
    found: Any = values
    for key in path.split("."):
        found = None if found is None else found.get(key)
    return found
