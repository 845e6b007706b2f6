"""What a run asks of a cluster: a pure function of the configuration and the cluster's nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollout_actors.backends.colocate import colocate_tensor_parallel
from shared.config import RunConfig
from shared.config.derive import EngineLocation, engines_in
from shared.errors import ConfigError
from shared.weight_sync.transports import Device, Sharing, TransportKind, choose_transport

_ACTORS = "rollout_matching.vllm.actors"


@dataclass(frozen=True, slots=True)
class Resources:
    """Of a process, of a node, or of all nodes."""

    cpus: float
    """Cores."""
    gpus: float

    @classmethod
    def of(cls, named: Mapping[str, float]) -> Resources:
        """From Ray's names for them. A node without GPUs does not mention any."""
        return cls(named.get("CPU", 0.0), named.get("GPU", 0.0))

    @classmethod
    def sum(cls, of: Sequence[Resources]) -> Resources:
        return cls(sum(each.cpus for each in of), sum(each.gpus for each in of))

    def named(self) -> dict[str, float]:
        """As Ray names them."""
        return {"CPU": self.cpus, "GPU": self.gpus}

    def hold(self, other: Resources) -> bool:
        return other.cpus <= self.cpus and other.gpus <= self.gpus


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each process of a run goes, as far as that can be said before the cluster chooses
    nodes.
    """

    engines: tuple[Resources, ...]
    """Of each rollout actor; none where the ranks generate, or servers do."""
    ranks: tuple[Resources, ...]
    """Of each learner rank; none where nothing learns."""
    devices_per_engine: int
    """Tensor-parallel devices of each engine that the run starts."""
    engine_device: Device
    learner_device: Device
    transport: TransportKind

    @property
    def bundles(self) -> list[Resources]:
        """What has to be on one node together: the engines first, then the learner ranks."""
        return [*self.engines, *self.ranks]

    @property
    def key(self) -> str:
        """The key that says how many processes there are."""
        return f"{_ACTORS}.num_actors" if self.engines else "learner.world_size"


def plan_placement(
    config: RunConfig, nodes: Sequence[Resources], *, learns: bool = True
) -> Placement:
    """What the configuration asks for on a cluster of these nodes; without `learns`, for its actors
    alone.

    Raises ConfigError when there is too little, on all nodes or on the largest, or when a transport
    cannot join the two sides.
    """
    has_gpus = any(node.gpus > 0 for node in nodes)
    if not learns:
        return _fitting(config, _with_actors(config, (), has_gpus), nodes)
    ranks = (_rank(config, has_gpus),) * config.learner.world_size
    match engines_in(config):
        case EngineLocation.RANKS:
            placement = _in_ranks(config, ranks, nodes)
        case EngineLocation.ACTORS:
            placement = _with_actors(config, ranks, has_gpus)
        case EngineLocation.SERVERS:
            device = _device(ranks[0])
            # Servers live where the learner does: on GPUs or on CPUs.
            placement = Placement(
                (),
                ranks,
                1,
                device,
                device,
                choose_transport(
                    config.rollout_matching.vllm.sync.transport, device, device, Sharing.NOTHING
                ),
            )
    return _fitting(config, placement, nodes)


def _rank(config: RunConfig, has_gpus: bool) -> Resources:
    gpus = config.learner.gpus if config.learner.gpus is not None else float(has_gpus)
    return Resources(cpus=1.0 if config.learner.cpus is None else config.learner.cpus, gpus=gpus)


def _with_actors(config: RunConfig, ranks: tuple[Resources, ...], has_gpus: bool) -> Placement:
    actors = config.rollout_matching.vllm.actors
    gpus = (
        actors.gpus_per_actor
        if actors.gpus_per_actor is not None
        else float(actors.tensor_parallel_size if has_gpus else 0)
    )
    # On CPU a device of a tensor-parallel engine is a process.
    cpus = (
        actors.cpus_per_actor
        if actors.cpus_per_actor is not None
        else float(1 if gpus else actors.tensor_parallel_size)
    )
    engine = Resources(cpus, gpus)
    engine_device = _device(engine)
    learner_device = _device(ranks[0]) if ranks else engine_device
    if learner_device is not engine_device:
        raise ConfigError(
            f"learner.gpus: {ranks[0].gpus:g} GPUs for the learner and {gpus:g} for each actor"
            f" ({_ACTORS}.gpus_per_actor); weights travel between GPUs or between CPUs, give both"
            " sides GPUs or neither"
        )
    transport = choose_transport(
        config.rollout_matching.vllm.sync.transport, learner_device, engine_device, Sharing.NOTHING
    )
    return Placement(
        (engine,) * actors.num_actors,
        ranks,
        actors.tensor_parallel_size,
        engine_device,
        learner_device,
        transport,
    )


def _in_ranks(
    config: RunConfig, ranks: tuple[Resources, ...], nodes: Sequence[Resources]
) -> Placement:
    device = _device(ranks[0])
    if config.rollout_matching.rollout_backend == "hf":
        return Placement((), ranks, 1, device, device, TransportKind.INPROC)
    visible = _gpus_per_rank(nodes, len(ranks)) if device is Device.CUDA else 1
    devices = colocate_tensor_parallel(config.rollout_matching.vllm.tensor_parallel_size, visible)
    if device is Device.CUDA:
        ranks = tuple(replace(rank, gpus=max(rank.gpus, float(devices))) for rank in ranks)
    sharing = Sharing.DEVICE if device is Device.CUDA else Sharing.PROCESS
    return Placement(
        (),
        ranks,
        devices,
        device,
        device,
        choose_transport(config.rollout_matching.vllm.sync.transport, device, device, sharing),
    )


def _gpus_per_rank(nodes: Sequence[Resources], num_ranks: int) -> int:
    """The most GPUs of one node that each rank can have, all ranks alike; 1 where there are not
    even enough for that.
    """
    most = int(max(node.gpus for node in nodes))
    return next(
        (
            size
            for size in range(most, 1, -1)
            if sum(int(node.gpus) // size for node in nodes) >= num_ranks
        ),
        1,
    )


def _device(resources: Resources) -> Device:
    return Device.CUDA if resources.gpus else Device.CPU


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of resource, in words."""

    noun: str
    of: Callable[[Resources], float]
    actor_key: str
    learner_key: str
    hint: str


_KINDS = (
    _Kind(
        "GPU",
        lambda resources: resources.gpus,
        f"{_ACTORS}.gpus_per_actor",
        "learner.gpus",
        "0 on both sides runs on CPU",
    ),
    _Kind(
        "CPU",
        lambda resources: resources.cpus,
        f"{_ACTORS}.cpus_per_actor",
        "learner.cpus",
        "fractions are allowed",
    ),
)


def _fitting(config: RunConfig, placement: Placement, nodes: Sequence[Resources]) -> Placement:
    """The placement, if every process has room on some node and all of them have on all nodes.
    Whether they have at the same time is for the cluster to say.
    """
    there = Resources.sum(nodes)
    if (
        problems := [*_too_large(config, placement, nodes)]
        or [*_too_many(placement, there)]
        or [*_environments(config, placement, there)]
    ):
        raise ConfigError(problems)
    return placement


def _environments(config: RunConfig, placement: Placement, there: Resources) -> Iterator[str]:
    """They are placed beside the rest."""
    section, rest = config.environment, Resources.sum(placement.bundles).cpus
    if section is not None and section.num_actors * section.cpus_per_actor > there.cpus - rest:
        yield (
            f"environment.cpus_per_actor: {section.num_actors} environment actors of"
            f" {section.cpus_per_actor:g} CPU have no room beside the rest of the run, which takes"
            f" {rest:g} of the cluster's {there.cpus:g}; lower it, 0 reserves nothing, or join a"
            " larger cluster with cluster.address"
        )


def _too_large(
    config: RunConfig, placement: Placement, nodes: Sequence[Resources]
) -> Iterator[str]:
    """A process that is larger than any node."""
    for who, bundles in (("an actor", placement.engines), ("a learner rank", placement.ranks)):
        if not bundles or any(node.hold(bundles[0]) for node in nodes):
            continue
        over = [kind for kind in _KINDS if kind.of(bundles[0]) > max(map(kind.of, nodes))]
        for kind in over or _KINDS[:1]:  # none alone is too much: no node has enough of both
            key = _size_key(config, kind) if bundles is placement.engines else kind.learner_key
            asked = (
                f"{bundles[0].gpus:g} GPU and {bundles[0].cpus:g} CPU"
                if not over
                else f"{kind.of(bundles[0]):g} {kind.noun}"
            )
            there = (
                "no node of the cluster has both"
                if not over
                else f"the largest node of the cluster has {max(map(kind.of, nodes)):g}"
            )
            yield (
                f"{key}: {who} of {asked} has to fit one node, and {there}; lower it, or join a"
                " cluster of larger nodes with cluster.address"
            )


def _size_key(config: RunConfig, kind: _Kind) -> str:
    """What makes an actor as large as it is: the resources as given, else its engine's devices."""
    actors = config.rollout_matching.vllm.actors
    given = actors.gpus_per_actor if kind.noun == "GPU" else actors.cpus_per_actor
    return (
        kind.actor_key
        if given is not None or actors.tensor_parallel_size == 1
        else f"{_ACTORS}.tensor_parallel_size"
    )


def _too_many(placement: Placement, there: Resources) -> Iterator[str]:
    """All processes together, against all nodes."""
    asked = Resources.sum(placement.bundles)
    for kind in _KINDS:
        if kind.of(asked) <= kind.of(there):
            continue
        parts, keys = [], []
        if placement.engines:
            parts.append(
                f"{len(placement.engines)} actors of {kind.of(placement.engines[0]):g} {kind.noun}"
            )
            keys.append(kind.actor_key)
        if placement.ranks:
            size = f"{kind.of(placement.ranks[0]):g}"
            parts.append(
                f"a learner of {size}"
                if len(placement.ranks) == 1
                else f"{len(placement.ranks)} learner ranks of {size}"
            )
            keys.append(kind.learner_key)
        yield (
            f"{placement.key}: {' and '.join(parts)} ask for {kind.of(asked):g} {kind.noun}, the"
            f" cluster has {kind.of(there):g}; lower {placement.key.rpartition('.')[2]}, or"
            f" {' and '.join(keys)} ({kind.hint}), or join a larger cluster with cluster.address"
        )
