"""The resources that a run requests from a cluster: a pure function of configuration and nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollout_actors.backends.colocate import colocate_tensor_parallel
from shared.config import RunConfig
from shared.config.algorithm import EnvironmentSection
from shared.config.rollout import ActorsSection, EngineLocation, RolloutMatchingSection
from shared.errors import ConfigError
from shared.weight_sync.transports import Device, Sharing, TransportKind, choose_transport

_ACTORS = "rollout_matching.vllm.actors"
_HINTS = {"GPU": "0 on both sides runs on CPU", "CPU": "fractions are allowed"}
"""By Ray's name of a resource, a hint in messages on the values of the resource's keys."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The CPU cores and GPUs of a process, of a node, or of all nodes.

    Example: `Resources(cpus=0.5, gpus=1)`.
    """

    cpus: float
    """Number of CPU cores."""
    gpus: float

    @classmethod
    def of(cls, named: Mapping[str, float]) -> Resources:
        """Read amounts from Ray's mapping of resource names.

        Nodes without GPUs have no entry `GPU`.
        """
        return cls(named.get("CPU", 0.0), named.get("GPU", 0.0))

    @classmethod
    def sum(cls, of: Sequence[Resources]) -> Resources:
        return cls(sum(each.cpus for each in of), sum(each.gpus for each in of))

    def named(self) -> dict[str, float]:
        """Return the amounts by Ray's names of the resources: `CPU` and `GPU`."""
        return {"CPU": self.cpus, "GPU": self.gpus}

    def hold(self, other: Resources) -> bool:
        return other.cpus <= self.cpus and other.gpus <= self.gpus

    @property
    def device(self) -> Device:
        return Device.CUDA if self.gpus else Device.CPU


@dataclass(frozen=True, slots=True)
class Placement:
    """The resources of each process of a run, before the cluster chooses nodes."""

    engines: tuple[Resources, ...]
    """Resources of each rollout actor; empty if learner ranks or servers generate."""
    ranks: tuple[Resources, ...]
    """Resources of each learner rank; empty without a learner."""
    devices_per_engine: int
    """Tensor-parallel devices of each engine that the run starts."""
    device: Device
    """Kind of device of engines and learner, which must be equal: GPUs or CPUs."""
    transport: TransportKind
    shard_size: int | None = None
    """Number of successive ranks that must be on one node (`learner.shard_size`); None: no rank
    must be on a node with another."""

    @property
    def bundles(self) -> list[Resources]:
        """Ray's bundles: the resources of each process, first engines, then ranks.

        Ray places each bundle on one node.
        """
        return [*self.engines, *self.ranks]

    @property
    def groups(self) -> list[tuple[str, range]]:
        """Ray's placement groups: each one's strategy, and the indices of its `bundles`.

        Example: 3 engines and 2 ranks are `[("PACK", range(0, 5))]`, and with `shard_size` 2
        `[("STRICT_PACK", range(3, 5)), ("PACK", range(0, 3))]`.
        """
        end = len(self.bundles)
        if self.shard_size is None:
            return [("PACK", range(end))]
        first = len(self.engines)
        starts = range(first, end, self.shard_size)
        copies = [("STRICT_PACK", range(start, start + self.shard_size)) for start in starts]
        engines = [("PACK", range(first))] if first else []
        # Ray spreads groups over nodes, so first those that need more of one node.
        if self.devices_per_engine > self.shard_size:
            return [*engines, *copies]
        return [*copies, *engines]

    @property
    def key(self) -> str:
        """The configuration key that sets the number of processes, for messages."""
        return f"{_ACTORS}.num_actors" if self.engines else "learner.world_size"


def plan_placement(
    config: RunConfig, nodes: Sequence[Resources], *, learns: bool = True
) -> Placement:
    """Return the resources that the configuration requests from a cluster of these nodes.

    Args:
        learns: whether there is a learner; False: only rollout actors are placed.

    Raises:
        ConfigError: all nodes together, or every single node, have too few resources; or only one
            of learner and engines has GPUs.
    """
    has_gpus = any(node.gpus > 0 for node in nodes)
    actors = config.rollout_matching.vllm.actors
    location = EngineLocation.ACTORS
    ranks: tuple[Resources, ...] = ()
    if learns:
        location = config.rollout_matching.backend.location
        section = config.learner
        rank = Resources(
            cpus=1.0 if section.cpus is None else section.cpus,
            gpus=float(has_gpus) if section.gpus is None else section.gpus,
        )
        ranks = (rank,) * section.world_size
    match location:
        case EngineLocation.RANKS:
            placement = _in_ranks(config.rollout_matching, ranks, nodes)
        case EngineLocation.ACTORS:
            placement = _with_actors(actors, ranks, has_gpus)
        case EngineLocation.SERVERS:
            # Servers use the same kind of device as the learner: GPUs or CPUs.
            device = ranks[0].device
            transport = choose_transport(device, device, Sharing.NOTHING)
            placement = Placement((), ranks, 1, device, transport)
    if learns:
        placement = replace(placement, shard_size=config.learner.shard_size)
    # A kind of problem is only looked for if the kind before it, a possible cause, was not found.
    everything = Resources.sum(nodes)
    problems = (
        [*_too_large(actors, placement, nodes)]
        or [*_too_many(placement, everything)]
        or [*_no_room_for_copies(placement, nodes)]
        or [*_no_room_for_environments(config.environment, placement, everything)]
    )
    if problems:
        raise ConfigError(problems)
    return placement


def _with_actors(actors: ActorsSection, ranks: tuple[Resources, ...], has_gpus: bool) -> Placement:
    devices = actors.tensor_parallel_size
    gpus = actors.gpus_per_actor
    if gpus is None:
        gpus = float(devices if has_gpus else 0)
    cpus = actors.cpus_per_actor
    if cpus is None:
        # On CPU a device of a tensor-parallel engine is a process.
        cpus = float(1 if gpus else devices)
    engine = Resources(cpus, gpus)
    if ranks and ranks[0].device is not engine.device:
        raise ConfigError(
            f"learner.gpus: {ranks[0].gpus:g} GPUs for the learner and {gpus:g} for each actor"
            f" ({_ACTORS}.gpus_per_actor), but weights travel between GPUs or between CPUs; give"
            " both sides GPUs or neither"
        )
    transport = choose_transport(engine.device, engine.device, Sharing.NOTHING)
    engines = (engine,) * actors.num_actors
    return Placement(engines, ranks, devices, engine.device, transport)


def _in_ranks(
    section: RolloutMatchingSection, ranks: tuple[Resources, ...], nodes: Sequence[Resources]
) -> Placement:
    device = ranks[0].device
    if not section.backend.uses_vllm:
        return Placement((), ranks, 1, device, TransportKind.INPROC)
    wanted = section.vllm.tensor_parallel_size
    if device is Device.CUDA:
        devices = colocate_tensor_parallel(wanted, _gpus_per_rank(nodes, len(ranks)))
        ranks = tuple(replace(rank, gpus=max(rank.gpus, float(devices))) for rank in ranks)
        sharing = Sharing.DEVICE
    else:
        devices = colocate_tensor_parallel(wanted, 1)
        sharing = Sharing.PROCESS
    transport = choose_transport(device, device, sharing)
    return Placement((), ranks, devices, device, transport)


def _gpus_per_rank(nodes: Sequence[Resources], num_ranks: int) -> int:
    """Return the largest number of GPUs that every rank can have on one node, at least 1."""
    for size in range(int(max(node.gpus for node in nodes)), 1, -1):
        if sum(int(node.gpus) // size for node in nodes) >= num_ranks:
            return size
    return 1


def _too_large(
    actors: ActorsSection, placement: Placement, nodes: Sequence[Resources]
) -> Iterator[str]:
    """Yield a problem for each kind of process that is larger than any node."""
    for who, bundles in (("an actor", placement.engines), ("a learner rank", placement.ranks)):
        if not bundles or any(node.hold(bundles[0]) for node in nodes):
            continue
        size = bundles[0].named()
        largest = {kind: max(node.named()[kind] for node in nodes) for kind in _HINTS}
        found = {
            kind: (f"{size[kind]:g} {kind}", f"the largest node of the cluster has {most:g}")
            for kind, most in largest.items()
            if size[kind] > most
        }
        if not found:  # neither resource by itself is too much
            both = f"{size['GPU']:g} GPU and {size['CPU']:g} CPU"
            found = {"GPU": (both, "no node of the cluster has both")}
        for kind, (asked, available) in found.items():
            key = f"learner.{kind.lower()}s"
            if bundles is placement.engines:
                key = _actor_size_key(actors, kind)
            yield (
                f"{key}: {who} of {asked} has to fit one node, and {available}; lower it, or join a"
                " cluster of larger nodes with cluster.address"
            )


def _no_room_for_copies(placement: Placement, nodes: Sequence[Resources]) -> Iterator[str]:
    """Yield a problem if the nodes cannot hold all groups of ranks that must be on one node."""
    size = placement.shard_size
    if size is None:
        return
    copy = Resources.sum(placement.ranks[:size])
    num_copies = len(placement.ranks) // size
    room = 0
    for node in nodes:
        has = node.named()
        # Floats: 1 // 0.2 is 4.
        numbers = [(has[kind] + 1e-6) // amount for kind, amount in copy.named().items() if amount]
        room += int(min(numbers, default=num_copies))
    if room < num_copies:
        yield (
            f"learner.shard_size: {size} ranks, which need {copy.gpus:g} GPU and {copy.cpus:g} CPU,"
            f" have to fit one node, and the nodes of the cluster have room for {room} of the"
            f" {num_copies} copies of the model; lower it, or set it to null to let a copy span"
            " nodes, or join a larger cluster with cluster.address"
        )


def _actor_size_key(actors: ActorsSection, kind: str) -> str:
    """Return the key to correct if an actor needs too much of a resource (`kind`: CPU or GPU).

    It is `gpus_per_actor` or `cpus_per_actor`, or the number of tensor-parallel devices if that
    determines the resource.
    """
    resources = actors.gpus_per_actor if kind == "GPU" else actors.cpus_per_actor
    if resources is not None or actors.tensor_parallel_size == 1:
        return f"{_ACTORS}.{kind.lower()}s_per_actor"
    return f"{_ACTORS}.tensor_parallel_size"


def _too_many(placement: Placement, available: Resources) -> Iterator[str]:
    """Yield a problem if all processes together need more than all nodes have."""
    needed = Resources.sum(placement.bundles).named()
    shares_gpus = ""
    if placement.engines and available.gpus >= sum(rank.gpus for rank in placement.ranks) > 0:
        shares_gpus = "set backend=colocate (engines share the learner's GPUs), "
    for kind, hint in _HINTS.items():
        if needed[kind] <= available.named()[kind]:
            continue
        parts = []
        keys = []
        if placement.engines:
            size = placement.engines[0].named()[kind]
            parts.append(f"{len(placement.engines)} actors of {size:g} {kind}")
            keys.append(f"{_ACTORS}.{kind.lower()}s_per_actor")
        if placement.ranks:
            size = placement.ranks[0].named()[kind]
            num = len(placement.ranks)
            who = "a learner" if num == 1 else f"{num} learner ranks"
            parts.append(f"{who} of {size:g}")
            keys.append(f"learner.{kind.lower()}s")
        share = shares_gpus if kind == "GPU" else ""
        yield (
            f"{placement.key}: {' and '.join(parts)} need {needed[kind]:g} {kind}, but the cluster"
            f" has {available.named()[kind]:g}; {share}lower {placement.key.rpartition('.')[2]}, or"
            f" {' and '.join(keys)} ({hint}), or join a larger cluster with cluster.address"
        )


def _no_room_for_environments(
    section: EnvironmentSection | None, placement: Placement, available: Resources
) -> Iterator[str]:
    rest = Resources.sum(placement.bundles).cpus
    if section is not None and section.num_actors * section.cpus_per_actor > available.cpus - rest:
        yield (
            f"environment.cpus_per_actor: {section.num_actors} environment actors of"
            f" {section.cpus_per_actor:g} CPU have no room next to the rest of the run, which takes"
            f" {rest:g} of the cluster's {available.cpus:g}; lower it (0 reserves nothing), or"
            " join a larger cluster with cluster.address"
        )
