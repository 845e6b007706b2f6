"""The state of a run that a checkpoint saves in addition to the model's weights.

With this state, a resumed run repeats the original run bit for bit.

    checkpoints/step_000120/
        model.safetensors, config.json, ...    the model's checkpoint
        run_state/
            run.json                the driver's part (`RunState` of launch/run_folder)
            rank_0.safetensors      float32 masters and moments
            rank_0.json             `RankState`

Data order, seeds, channels and learning rates are functions of the step and are not saved. There
are tensors of one copy of the model: of rank 0 with ddp, of each shard with fsdp.

`RankState` is saved as JSON. A file can name only the types of `KINDS`, so reading it cannot run
foreign code. The small tensors of a state are one safetensors file, encoded in base64 in the JSON.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from learner.algorithms.advantages import TokenAdvantages
from learner.model.checkpoint import flush
from learner.segments import EncodedPrompt, Segment
from learner.targets import AdvantageTarget, LabelOverride, ParsedAndMatched, Target
from shared.config.pipeline import Channel
from shared.errors import ConfigError
from shared.grounding.matching import MatchedPair, MatchResult
from shared.grounding.objects import DroppedObject, DropReason, ParsedObject, ParsedRollout
from shared.metrics import MetricAccumulator, RankReport
from shared.records import GeometryKind, ImageRef
from shared.rollouts import FinishReason, Rollout
from shared.run_files import STATE_FOLDER, Span, cannot_write
from shared.trajectory import EnvironmentRollout, ModelCall, TrainingExample


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of torch's random generators on the CPU and on this process's device.

    The project's own code does not use them during a step, but a user's objective may.
    """

    cpu: torch.Tensor
    device: torch.Tensor | None
    """State of the GPU's generator; None without a GPU."""

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        on_gpu = device.type == "cuda"
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one learner rank that a checkpoint saves next to weights and optimizer.

    Example: after 120 updates of `stage2_rollout_aligned` with 3 segments left over:
    `RankState(120, carried=(...), random=...)`.
    """

    step: int
    """Number of finished steps."""
    random: RandomState
    carried: tuple[Segment, ...] = ()
    """Segments that wait in the carry buffer for a later step, oldest first."""
    answers_ahead: tuple[Any, ...] = ()
    """Rollouts of the next step's first positions, made with older weights (`max_staleness`)."""
    num_skipped: int = 0
    """Number of consecutive skipped optimizer updates, up to the last one."""
    offers_adapter: bool = False
    """Whether the next weight sync sends only the adapter."""
    report: RankReport | None = None
    """The rank's metrics of the last step. The run may have ended before they were written."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Values that must be the same in a resumed run, such as digests of data and frozen weights, by
    configuration key."""

    def writer(
        self, rank: int, tensors: Mapping[str, torch.Tensor] | None
    ) -> Callable[[Path], None]:
        """Return a function that writes this rank's state into a checkpoint's folder.

        `tensors` are the optimizer's tensors; None if rank 0 writes the same tensors. The returned
        function may raise StorageError.
        """
        text = _as_text(self)

        def write(folder: Path) -> None:
            path = _path(folder, rank, "json")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if tensors is not None:
                    save_file(dict(tensors), _path(folder, rank, "safetensors"))
                path.write_bytes(text)
                flush(path, _path(folder, rank, "safetensors"))
            except (OSError, SafetensorError) as error:
                raise cannot_write(path, error) from error

        return write

    @classmethod
    def load(cls, folder: Path, rank: int) -> RankState:
        """Read a rank's state from a checkpoint's folder.

        Raises ConfigError if the file is missing or damaged.
        """
        with _readable(folder):
            return _from_text(_path(folder, rank, "json").read_bytes())


def load_tensors(folder: Path, shard: int, num_shards: int) -> tuple[dict[str, torch.Tensor], bool]:
    """Read the optimizer tensors of one of `num_shards` equal parts of a model, in rank order.

    The checkpoint may have another number of shards. The tensors are then cut anew, as FSDP2 cuts
    parameters: along the first dimension, with parts that may be empty.

    Returns the tensors by name, and whether the checkpoint has this number of shards.

    Raises ConfigError if a file is missing or damaged.
    """
    with _readable(folder), ExitStack() as files:
        num_saved = len([*(folder / STATE_FOLDER).glob("rank_*.safetensors")])
        if num_saved == num_shards:
            return load_file(_path(folder, shard, "safetensors")), True
        saved = [
            files.enter_context(safe_open(_path(folder, rank, "safetensors"), "pt"))
            for rank in range(max(1, num_saved))
        ]
        tensors = {}
        for name in saved[0].keys():  # noqa: SIM118 (not a mapping)
            # One whole tensor at a time, because the host has room for the shards only.
            parts = [file.get_tensor(name) for file in saved]
            if not parts[0].ndim:  # AdamW's number of steps
                tensors[name] = parts[0]
                continue
            whole = torch.cat(parts)
            size = -(-len(whole) // num_shards)
            tensors[name] = whole[shard * size : (shard + 1) * size].clone()
        return tensors, False


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn errors of damaged or missing files into a ConfigError."""
    try:
        yield
    except Exception as error:  # damaged JSON can raise any type of exception here
        raise ConfigError(
            f"resume.run: {folder / STATE_FOLDER} cannot be read ({error}); put it on a disk that"
            " all nodes share, and resume it with the version that wrote it; if it is damaged,"
            " resume an earlier checkpoint (checkpoints.json lists them)"
        ) from error


def missing_parts(folder: Path, world_size: int) -> list[str]:
    """Return the paths of the learner ranks' state files that a checkpoint's folder lacks."""
    paths = [_path(folder, rank, "json") for rank in range(world_size)]
    return [str(path) for path in paths if not path.is_file()]


def _path(folder: Path, rank: int, suffix: str) -> Path:
    return folder / STATE_FOLDER / f"rank_{rank}.{suffix}"


KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(RankState, RandomState, Segment, EncodedPrompt, Target, LabelOverride, AdvantageTarget),
        *(TokenAdvantages, ParsedAndMatched, ParsedRollout, ParsedObject, DroppedObject),
        *(DropReason, GeometryKind, MatchResult, MatchedPair, Rollout, FinishReason),
        *(EnvironmentRollout, TrainingExample, ModelCall, ImageRef, RankReport),
        *(MetricAccumulator, Span, Channel),
    )
}
"""The Python types that a saved `RankState` may contain, by their names in the file."""
_PLAIN = {bool, int, float, str}


def _as_text(state: RankState) -> bytes:
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    value = _encoded(state, tensors)
    blob = safetensors.torch.save(dict(tensors.values()))
    return json.dumps({"state": value, "tensors": base64.b64encode(blob).decode()}).encode()


def _from_text(text: bytes) -> RankState:
    """Decode the text of a state. Damaged text can raise any exception."""
    read = json.loads(text)
    tensors = safetensors.torch.load(base64.b64decode(read["tensors"], validate=True))
    state = _decoded(read["state"], tensors)
    if not isinstance(state, RankState):
        raise ValueError("the file does not contain the state of a rank")
    return state


def row_as_bytes(row: list[Segment]) -> bytes:
    """Return the segments of a packed row as bytes, to send them to another rank.

    Like a saved state, they can name only the types of `KINDS`.
    """
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    value = json.dumps(_encoded(row, tensors)).encode()
    blob = safetensors.torch.save(dict(tensors.values()))
    return len(value).to_bytes(8) + value + blob


def row_from_bytes(content: bytes) -> list[Segment]:
    size = 8 + int.from_bytes(content[:8])
    tensors = safetensors.torch.load(content[size:])
    row: list[Segment] = _decoded(json.loads(content[8:size]), tensors)
    return row


def _encoded(value: Any, tensors: dict[int, tuple[str, torch.Tensor]]) -> Any:
    """Return a value as JSON. A tuple becomes a list, other non-JSON types `{kind: content}`.

    Each tensor, array and bytes value is added once to `tensors`, which maps the `id` of the Python
    object to its name in the file and its content.

    Example:
        >>> _encoded((1, [2.5], MatchedPair(0, 1, 0.8)), {})
        [1, {'list': [2.5]}, {'MatchedPair': {'prediction': 0, 'ground_truth': 1, 'iou': 0.8}}]
    """
    kind = type(value)
    if value is None or kind in _PLAIN:
        return value
    if KINDS.get(kind.__name__) is kind:
        return {kind.__name__: {n: _encoded(getattr(value, n), tensors) for n in _names(kind)}}
    if isinstance(value, torch.Tensor | np.ndarray | bytes):
        if isinstance(value, torch.Tensor):
            # A copy of the present values, without the rest of a shared storage.
            form, content = "tensor", value.detach().clone(memory_format=torch.contiguous_format)
        else:
            is_bytes = isinstance(value, bytes)
            form = "bytes" if is_bytes else "array"
            content = torch.tensor(np.frombuffer(value, np.uint8) if is_bytes else value)
        name, _ = tensors.setdefault(id(value), (str(len(tensors)), content))
        return {form: name}
    if isinstance(value, list | tuple):
        # Fast path: token ids and log-probabilities are most of a state.
        is_plain = set(map(type, value)) <= _PLAIN
        items = list(value) if is_plain else [_encoded(item, tensors) for item in value]
        return {"list": items} if isinstance(value, list) else items
    if isinstance(value, Mapping):
        return {"dict": [[_encoded(part, tensors) for part in pair] for pair in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, np.generic):
        return value.item()
    assert kind.__module__.partition(".")[0] not in ("learner", "shared"), f"KINDS lacks {kind}"
    # Only the id of a row can have a user's own type. It is saved as its text.
    return str(value)


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        is_plain = set(map(type, value)) <= _PLAIN
        return tuple(value if is_plain else (_decoded(item, tensors) for item in value))
    if not isinstance(value, dict):
        return value
    ((form, content),) = value.items()
    match form:
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy()
        case "bytes":
            return tensors[content].numpy().tobytes()
        case "list":
            return list(_decoded(content, tensors))
        case "dict":
            return dict(_decoded(content, tensors))
        case "path":
            return Path(content)
    if form not in KINDS:
        raise ValueError(f"the unknown type {form!r} cannot be part of a state")
    return KINDS[form](**{name: _decoded(part, tensors) for name, part in content.items()})


def _names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of the constructor arguments of a type of `KINDS`."""
    if issubclass(kind, Enum):
        return ("value",)
    if issubclass(kind, tuple):
        return tuple(kind.__annotations__)
    return tuple(one.name for one in fields(kind))
