"""A learner rank's part of checkpoints: save the state after an update, and load it again.

    save                                          the run waits
    save(background=True) -> finish_save, ...     written from a copy during the next steps

The driver calls every method on all ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from learner.host_memory import NodeMemory, available_memory, in_gib, node_number
from learner.model.checkpoint_save import CheckpointSave, HostCopies, Write
from learner.model.optimizer.adamw import Optimizer, local_part
from learner.run_state import RankState, load_tensors, missing_parts
from learner.weight_sync.publisher import WeightPublisher
from shared.errors import ConfigError, StorageError
from shared.run_files import RUN_FILE, STATE_FOLDER, Span, write_run_file
from shared.weight_sync.checksum import BucketChecksum

KEPT_FREE = 2 << 30
"""Bytes of host memory that must stay free when a checkpoint is copied."""


class Saving:
    """One learner rank's part of checkpoints: saves and loads weights, optimizer and `RankState`.

    The checkpoint is one folder into which all ranks write.
    """

    def __init__(self, name: str, publisher: WeightPublisher, optimizer: Optimizer) -> None:
        """`name` is the rank's name in the run's timeline of spans."""
        self._name = name
        self._publisher = publisher
        self._ranks = publisher.ranks
        self._parallel = publisher.parallel
        self._optimizer = optimizer
        self._save: CheckpointSave | None = None
        """The background save that `finish_save` must finish. It holds copies of the tensors."""

    def save(
        self, folder: Path, run: str, state: RankState | None, *, background: bool
    ) -> str | None:
        """Save a checkpoint of the current weights. See `Learner.save` for results and errors.

        Args:
            folder: the checkpoint's folder, shared by all ranks.
            run: the driver's part of the checkpoint, as JSON.
            state: the rank's state. None saves only the weights, and no run can resume them.
            background: write a copy in a thread; the caller then calls `finish_save`.
        """
        self._save = None  # drop the copies of a save that failed
        # On a GPU the update is only queued: a copy before its end would contain old weights.
        self._publisher.device.wait()
        ranks = self._ranks
        tensors: dict[str, torch.Tensor] | None = None
        # All copies of the model have the same optimizer state, so only the first copy's is saved.
        if state is not None and ranks.rank < ranks.shards.world_size:
            tensors = self._optimizer.tensors()
        reason = self._no_room_for_copy(tensors or {}) if background else None
        copies: HostCopies | None = None
        if background and reason is None:
            copies = HostCopies((tensors or {}).values())
        write_state: Write | None = None
        if state is not None:
            if copies is not None and tensors is not None:
                tensors = {name: copies(tensor) for name, tensor in tensors.items()}
            write_state = state.writer(ranks.rank, tensors)

        def finish(partial: Path) -> None:
            if missing := missing_parts(partial, ranks.world_size):
                why = "rank 0 does not see this file, which another rank wrote on its own node"
                remedy = "put telemetry.run_dir on a disk that all nodes share"
                raise StorageError(missing[0], why, remedy=remedy)
            write_run_file(partial / STATE_FOLDER / RUN_FILE, run)

        save = self._publisher.checkpoint(
            folder,
            copies=copies,
            write_more=write_state,
            finish=None if state is None else finish,
        )
        if copies is None:
            save.write()
        else:
            save.begin()
            self._save = save
        return reason

    def finish_save(self, *, wait: bool) -> list[Span] | None:
        """Give the checkpoint that is saved in the background its final name, if it is complete.

        With `wait`, block until it is complete. A call after a StorageError writes the checkpoint
        again from the same copy in memory, and blocks.

        Returns:
            The time span of this rank's write; an empty list if no save was begun; None if the
            checkpoint is not complete yet.

        Raises StorageError if the checkpoint cannot be written. Only the copy in memory remains.
        """
        save = self._save
        if save is None:
            return []
        if not save.complete(wait=wait):
            return None
        self._save = None
        track = f"{self._name}, checkpoints"
        return [Span(track, f"write {save.folder.name}", save.started_s, save.ended_s)]

    def load(
        self, checkpoint: Path, fingerprints: Mapping[str, str], allow: Collection[str]
    ) -> RankState:
        """Return the rank's state from a checkpoint, and load its tensors into the optimizer.

        Args:
            checkpoint: the checkpoint's folder.
            fingerprints: values of this run that must equal the saved values, such as digests of
                data and frozen weights, by configuration key.
            allow: configuration keys whose values may differ (`resume.allow`).

        Raises ConfigError if the checkpoint is damaged, or belongs to other data or weights.
        """
        state = RankState.load(checkpoint, self._ranks.rank)
        shards = self._ranks.shards
        tensors, are_as_saved = load_tensors(checkpoint, shards.rank, shards.world_size)
        changed = sorted(
            key for key, value in state.fingerprints.items() if fingerprints.get(key) != value
        )
        if refused := [key for key in changed if key not in allow]:
            raise ConfigError(
                [
                    f"{key}: its contents have changed since {checkpoint} was saved (digest"
                    f" {state.fingerprints[key][:12]} then,"
                    f" {fingerprints.get(key, 'nothing')[:12]} now); restore the old contents, or"
                    f" accept the change with 'resume.allow=[{key}]'"
                    for key in refused
                ]
            )
        self._optimizer.load_tensors(tensors)
        saved = None if state.report is None else state.report.digests.get("weights")
        if are_as_saved and saved is not None and saved != (found := self.digest_of_weights()):
            raise ConfigError(
                f"resume.run: {checkpoint} does not contain the weights of its step: their checksum"
                f" is {found}, but was {saved}; restore it from another copy, or resume another"
                " checkpoint (checkpoints.json lists them)"
            )
        self._optimizer.num_skipped = state.num_skipped
        return state

    def digest_of_weights(self) -> str:
        """Return the checksum of this rank's trained weights, for the run's ledger of digests."""
        return f"{checksum(self._optimizer.masters) % 2**64:016x}"

    def _no_room_for_copy(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Return why a copy of weights and `tensors` does not fit in host memory, or None."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._ranks.rank == 0:
            for name, dtype, shape in self._parallel.weights.specs():
                # A float32 weight that is its own master is one of `tensors`.
                is_master = (
                    f"{name}/master" in tensors
                    and dtype is torch.float32
                    and not self._optimizer.is_offloaded
                    and not self._parallel.holds_parts
                )
                if not is_master:
                    size += shape.numel() * dtype.itemsize
        with self._ranks.of_phase("save"):
            node = NodeMemory.scarcest(
                self._ranks.all_of(size),
                self._ranks.all_of(available_memory()),
                self._ranks.all_of(node_number()),
            )
        if node.needed + KEPT_FREE <= node.available:
            return None
        return (
            f"the copy needs {in_gib(node.needed)} of a node's host memory, and"
            f" {in_gib(KEPT_FREE)} must stay free, but only {in_gib(node.available)} are available"
        )


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return one checksum over all tensors, in order.

    Of a sharded tensor, it contains only the part of this rank.
    """
    result = BucketChecksum()
    for tensor in tensors:
        result.add(local_part(tensor).detach())
    return result.value()
