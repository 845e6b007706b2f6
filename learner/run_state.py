"""What a run is beside its weights, in a folder of a checkpoint: a run goes on from it to the bit.

    checkpoints/step_000120/
        model.safetensors, config.json, ...    the ordinary checkpoint
        run_state/
            run.json                the driver's part (launch/runtime/resume.py)
            rank_0.safetensors      float32 masters and moments
            rank_0.pkl              `RankState`

Data order, seeds, channels and learning rates are functions of the step: they are not saved. Ranks
that hold the whole model (ddp) share the tensors of rank 0.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from learner.model.checkpoint import flush
from learner.segments import Segment
from shared.errors import ConfigError
from shared.metrics import RankReport
from shared.run_files import STATE_FOLDER, cannot_write


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
        pickled = pickle.dumps(self)

        def write(folder: Path) -> None:
            path = _path(folder, rank, "pkl")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if tensors is not None:
                    save_file(dict(tensors), _path(folder, rank, "safetensors"))
                path.write_bytes(pickled)
                flush(path, _path(folder, rank, "safetensors"))
            except (OSError, SafetensorError) as error:
                raise cannot_write(path, error) from error

        return write

    @classmethod
    def load(
        cls, folder: Path, rank: int, *, has_own_tensors: bool
    ) -> tuple[RankState, dict[str, torch.Tensor]]:
        """Read what `writer` wrote. Raises ConfigError where the folder lacks it."""
        path = _path(folder, rank, "pkl")
        try:
            state = pickle.loads(path.read_bytes())
            tensors = load_file(_path(folder, rank if has_own_tensors else 0, "safetensors"))
        except Exception as error:  # what a damaged pickle raises is of any kind
            raise ConfigError(
                f"resume.run: {path.parent} cannot be read ({error}); every learner rank reads it:"
                " it has to be whole, written by this version, and on a disk that all nodes share;"
                " where it is damaged, resume an earlier checkpoint (checkpoints.json lists them)"
            ) from error
        assert isinstance(state, cls)
        return state, tensors


def damage(folder: Path, world_size: int, *, has_own_tensors: bool) -> str | None:
    """Say which of the ranks' files in a checkpoint is damaged; None: all can be loaded.

    Of tensors their list and the length of their file are read: enough for one that was cut off.

    Raises:
        ConfigError: the disk refuses a file, which says nothing about its content.
    """
    for rank in range(world_size):
        path = _path(folder, rank, "pkl")
        try:
            pickle.loads(path.read_bytes())
            if rank == 0 or has_own_tensors:
                path = _path(folder, rank, "safetensors")
                with safe_open(path, framework="pt"):
                    pass
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            raise ConfigError(
                f"resume.run: {path} cannot be read ({error}); permit reading it, or wait until its"
                " disk is back"
            ) from error
        except Exception as error:  # what a damaged pickle raises is of any kind
            return f"{path.name} is damaged: {error}"
    return None


def missing_parts(folder: Path, world_size: int) -> list[str]:
    """Name the ranks' parts that are not in the folder of a checkpoint."""
    paths = [_path(folder, rank, "pkl") for rank in range(world_size)]
    return [str(path) for path in paths if not path.is_file()]


def _path(folder: Path, rank: int, suffix: str) -> Path:
    return folder / STATE_FOLDER / f"rank_{rank}.{suffix}"
