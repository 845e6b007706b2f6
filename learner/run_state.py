"""What a run is beside its weights, in a folder of a checkpoint: a run goes on from it to the bit.

    checkpoints/step_000120/
        model.safetensors, config.json, ...    the ordinary checkpoint
        run_state/
            run.json                the driver's part (`RunState` of launch/run_folder)
            rank_0.safetensors      float32 masters and moments
            rank_0.json             `RankState`

Data order, seeds, channels and learning rates are functions of the step: they are not saved. Ranks
that hold the whole model (ddp) share the tensors of rank 0.

`RankState` is JSON: a file can name the types of `KINDS` and no others, so reading it runs no code
of the file's choice. Its small tensors are one safetensors file, in base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
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
    """The states of torch's random generators, of this process and of its device.

    Nothing here draws from them in a step; an objective of a user's own may.
    """

    cpu: torch.Tensor
    device: torch.Tensor | None
    """None without a GPU."""

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
    """One rank's part of the state after `step` updates, without its tensors.

    Example: after 120 updates of `stage2_rollout_aligned` with 3 segments left over:
    `RankState(120, carried=(...), random=...)`.
    """

    step: int
    random: RandomState
    carried: tuple[Segment, ...] = ()
    """Segments that wait for a row, oldest first."""
    answers_ahead: tuple[Any, ...] = ()
    """Answers of the next step's first positions, of the weights before (`max_staleness`)."""
    num_skipped: int = 0
    """Updates in a row that were skipped, up to the last."""
    offers_adapter: bool = False
    """Whether the next offer is of an adapter alone."""
    report: RankReport | None = None
    """The rank's part of the last step's report: a run may end before it is written down."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Digests of what the run was given, by its key in the configuration."""

    def writer(
        self, rank: int, tensors: Mapping[str, torch.Tensor] | None
    ) -> Callable[[Path], None]:
        """Return what writes this rank's files into a folder as they are now, and raises
        StorageError; `tensors` None: those of rank 0 are the same.
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
    def load(
        cls, folder: Path, rank: int, *, has_own_tensors: bool
    ) -> tuple[RankState, dict[str, torch.Tensor]]:
        """Read what `writer` wrote. Raises ConfigError where the folder lacks it."""
        path = _path(folder, rank, "json")
        try:
            state = _from_text(path.read_bytes())
            tensors = load_file(_path(folder, rank if has_own_tensors else 0, "safetensors"))
        except Exception as error:  # what damaged JSON raises as it is built is of any kind
            raise ConfigError(
                f"resume.run: {path.parent} cannot be read ({error}); every learner rank reads it:"
                " it has to be whole, written by this version, and on a disk that all nodes share;"
                " if it is damaged, resume an earlier checkpoint (checkpoints.json lists them)"
            ) from error
        return state, tensors


def missing_parts(folder: Path, world_size: int) -> list[str]:
    """Name the ranks' parts that are not in the folder of a checkpoint."""
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
"""The types that a state is made of, by the names that they have in its file."""
_PLAIN = {bool, int, float, str}


def _as_text(state: RankState) -> bytes:
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    value = _encoded(state, tensors)
    blob = safetensors.torch.save(dict(tensors.values()))
    return json.dumps({"state": value, "tensors": base64.b64encode(blob).decode()}).encode()


def _from_text(text: bytes) -> RankState:
    """Raises whatever building a state of wrong parts raises."""
    read = json.loads(text)
    tensors = safetensors.torch.load(base64.b64decode(read["tensors"], validate=True))
    state = _decoded(read["state"], tensors)
    if not isinstance(state, RankState):
        raise ValueError("is not the state of a rank")
    return state


def _encoded(value: Any, tensors: dict[int, tuple[str, torch.Tensor]]) -> Any:
    """Return a value as JSON: a tuple as a list, and `{kind: content}` for what JSON lacks.

    `tensors` gets name and content of each tensor, array and bytes, once, by the value's id.

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
            # As it is now, and without the rest of a storage that others share.
            form, content = "tensor", value.detach().clone(memory_format=torch.contiguous_format)
        else:
            is_bytes = isinstance(value, bytes)
            form = "bytes" if is_bytes else "array"
            content = torch.tensor(np.frombuffer(value, np.uint8) if is_bytes else value)
        name, _ = tensors.setdefault(id(value), (str(len(tensors)), content))
        return {form: name}
    if isinstance(value, list | tuple):
        # Token ids and log-probabilities are most of a state, and stay as they are.
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
    # Of a user's own type only the id of a row can be, which is read as its text.
    return str(value)


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what `_encoded` was given."""
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
        raise ValueError(f"names {form!r}, which is no part of a state")
    return KINDS[form](**{name: _decoded(part, tensors) for name, part in content.items()})


def _names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names that a type of `KINDS` is made with."""
    if issubclass(kind, Enum):
        return ("value",)
    if issubclass(kind, tuple):
        return tuple(kind.__annotations__)
    return tuple(one.name for one in fields(kind))
