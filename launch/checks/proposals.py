"""Finds settings with which a run would fit into memory, as overrides to paste."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

from launch.checks.memory import Estimate
from shared.config import RunConfig, load_config
from shared.errors import ConfigError

Change = Mapping[str, bool | int | str]
"""Values by configuration key, as the command line accepts them."""
MOST = 4
"""The maximum number of proposals to make."""
_RECOMPUTED: tuple[Change, ...] = tuple(
    MappingProxyType({"model.gradient_checkpointing": True, "model.recompute_every": number})
    for number in (4, 2, 1)
)
"""Recomputation of more and more layers."""
_NOT_RECOMPUTED: Change = MappingProxyType(
    {
        "model.gradient_checkpointing": False,
        "model.activation_offload": False,
        "model.recompute_every": 1,
        "model.recompute_tower": True,
    }
)
_FIXED: tuple[Change, ...] = (
    *_RECOMPUTED,
    MappingProxyType({"model.recompute_tower": True}),
    MappingProxyType({"model.activation_offload": True}),
    MappingProxyType({"model.attention": "auto"}),
    MappingProxyType({"training.optimizer": "adamw_bnb_8bit"}),
    MappingProxyType({"training.optimizer": "adamw_offload"}),
    MappingProxyType({"training.optimizer": "adamw_offload_all"}),
)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Overrides that together make a run fit into memory. None of them can be left out."""

    overrides: tuple[str, ...]
    """`key=value` texts, quoted for a shell."""
    estimate: Estimate
    """Memory of the learner rank, or of a rank and an engine if they share a GPU."""

    def describe(self) -> str:
        return f"{' '.join(self.overrides)}: {self.estimate.describe()}"


def proposals(
    config: RunConfig, fitting: Callable[[RunConfig], Estimate | None], *, idle_gpus: int = 0
) -> list[Proposal]:
    """Return at most `MOST` sets of changes with which the run fits into memory, cheapest first.

    The first set shards the learner over more GPUs, as few of them as suffice, with changes for
    smaller activations if it needs them: GPUs that the run leaves idle, or, with
    `learner.shard_size`, GPUs of the other copies. Other possible changes are, by rising
    cost: those in `_FIXED`, shorter rows, an adapter. Each change counts as more expensive than all
    cheaper ones together. More ranks with any change are tried only if nothing else fits.

    `fitting`: returns the estimate of a run that fits, None for a run that does not.
    """
    search = _Search(config.model_dump(mode="json"), fitting)
    weaker = _RECOMPUTED[: _num_at_most(config)]
    # Half a row may be too short for an answer, and an adapter needs a trained part.
    uncertain: list[Change] = [{"global_max_length": config.global_max_length // 2}]
    if config.model.adapter is None:
        uncertain.append({"model.adapter.kind": "lora"})
    possible = [one for one in (*_FIXED, *uncertain) if one not in weaker and search.is_new(one)]
    possible = [one for one in possible if one in _FIXED or search.changed([one]) is not None]
    num_ranks = config.learner.world_size
    # Several ranks of whole models may become as many shards.
    least = num_ranks if num_ranks > 1 and not config.learner.is_sharded else num_ranks + 1
    idle: list[Change] = [_shards(number) for number in range(least, num_ranks + idle_gpus + 1)]
    if (shards := config.learner.shard_size) is not None:
        sizes = range(shards + 1, num_ranks + 1)
        idle = [{"learner.shard_size": size} for size in sizes if num_ranks % size == 0]
    # All layers or none are recomputed, or the first set would need more ranks for fewer layers.
    weaker = (*_RECOMPUTED[:-1], *(one for one in _FIXED if "training.optimizer" in one))
    smaller_rows = [one for one in possible if one in _FIXED and one not in weaker]
    found = search.minimal(idle + smaller_rows, [(change,) for change in idle])[:1]
    found += search.minimal(possible, [()])
    if not found:
        ranks: list[Change] = [_shards(number) for number in (2, 4, 8) if number >= least]
        found = search.minimal(possible + ranks, [(change,) for change in ranks])
    return found[:MOST]


def less_recomputation(
    config: RunConfig, fitting: Callable[[RunConfig], Estimate | None]
) -> Proposal | None:
    """Return the change with which a run that fits recomputes fewest layers, and still fits.

    None if no layer is recomputed, or none can be spared. `fitting` is as for `proposals`.
    """
    search = _Search(config.model_dump(mode="json"), fitting)
    tower: Change = {"model.recompute_tower": False}
    fewer = [_NOT_RECOMPUTED, *_RECOMPUTED[: _num_at_most(config)], tower]
    if not config.model.gradient_checkpointing or (now := search.fits([])) is None:
        return None
    for change in fewer:
        estimate = search.fits([change]) if search.is_new(change) else None
        # If no more memory is needed, nothing is spared: no tower, or none that is trained.
        if estimate is not None and estimate.total > now.total:
            return Proposal(tuple(search.overrides([change])), estimate)
    return None


def _num_at_most(config: RunConfig) -> int:
    """Count the entries of `_RECOMPUTED` with which no more layers are recomputed than now."""
    if not config.model.gradient_checkpointing:
        return 0
    every = [change["model.recompute_every"] for change in _RECOMPUTED]
    return sum(int(number) >= config.model.recompute_every for number in every)


@dataclass(frozen=True, slots=True)
class _Search:
    """A search for changes of one configuration with which the run fits into memory."""

    values: Mapping[str, Any]
    """The configuration, as JSON."""
    fitting: Callable[[RunConfig], Estimate | None]

    def is_new(self, change: Change) -> bool:
        return any(self._value(path) != value for path, value in change.items())

    def _value(self, path: str) -> object:
        found: object = self.values
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def overrides(self, chosen: list[Change]) -> Iterator[str]:
        """Yield the changes as `key=value`, without values that the configuration already has."""
        for change in chosen:
            for key, value in change.items():
                if self._value(key) != value:
                    text = str(value).lower() if isinstance(value, bool) else str(value)
                    yield shlex.quote(f"{key}={text}")

    def minimal(self, possible: list[Change], required: list[tuple[Change, ...]]) -> list[Proposal]:
        """Return all minimal sets of changes with which the run fits, the cheapest first.

        A set has changes of `possible`, among them one entry of `required`. It is minimal if it
        contains no smaller set with which the run fits.
        """
        free = [change for change in possible if not any(change in taken for taken in required)]
        # First with all compatible changes together: if that does not fit, no subset fits.
        optimizers = [change for change in free if "training.optimizer" in change]
        # Of several changes of the same keys, the last saves most.
        others = [*{tuple(one): one for one in free if one not in optimizers}.values()]
        all_of_it = [
            [*others, *optimizer, *taken]
            for optimizer in ((), *((one,) for one in optimizers))
            for taken in required
        ]
        if not any(self.fits(everything) for everything in all_of_it):
            return []
        ladder = [number for number, one in enumerate(possible) if one in _RECOMPUTED]
        found: dict[tuple[int, ...], Proposal] = {}
        for size in range(len(free) + 1):
            for chosen, taken in product(combinations(free, size), required):
                numbers = tuple(possible.index(change) for change in (*chosen, *taken))
                # A set that contains a smaller set that fits is not minimal. Recomputation of more
                # layers contains that of fewer.
                rungs = [one for one in ladder if one in numbers]
                contained = {*numbers, *(one for one in ladder if one <= max(rungs, default=-1))}
                if not numbers or any(set(other) <= contained for other in found):
                    continue
                together = [possible[number] for number in numbers]
                if (estimate := self.fits(together)) is not None:
                    found[numbers] = Proposal(tuple(self.overrides(together)), estimate)

        def cost(numbers: tuple[int, ...]) -> int:
            return sum(1 << number for number in numbers)

        return [found[numbers] for numbers in sorted(found, key=cost)]

    def fits(self, chosen: list[Change]) -> Estimate | None:
        changed = self.changed(chosen)
        return None if changed is None else self.fitting(changed)

    def changed(self, chosen: list[Change]) -> RunConfig | None:
        """Return the configuration with these changes; None if they are invalid together."""
        keys = [key for change in chosen for key in change]
        if len(set(keys)) < len(keys):
            return None
        values = deepcopy(dict(self.values))
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


def _shards(num_ranks: int) -> Change:
    return {"learner.parallel": "fsdp", "learner.world_size": num_ranks}
