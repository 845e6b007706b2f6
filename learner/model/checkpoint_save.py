"""A checkpoint on its way to the disk, while the run waits for it or beside the run."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import torch
from safetensors import SafetensorError

from learner.model.checkpoint import flush
from learner.model.ranks import Ranks
from shared.run_files import SUMS, cannot_write, write_sums

Write = Callable[[Path], None]
"""Writes a part of a checkpoint into a folder."""


class HostCopies:
    """Copies of tensors in host memory, where what happens to the tensors does not reach them.

    A weight in float32 is its own master: a checkpoint has it twice, and it is copied once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy these; views of the same elements share a copy."""
        # With the tensors: the address of one that is gone may be another's.
        self._kept: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in tensors:
            if _place(tensor) not in self._kept:
                self._kept[_place(tensor)] = (tensor, tensor.to("cpu", copy=True))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy that there is of this tensor's elements, or a new one, which is not kept
        for others.
        """
        if _place(tensor) in self._kept:
            return self._kept[_place(tensor)][1]
        return tensor.to("cpu", copy=True)


def _place(tensor: torch.Tensor) -> object:
    """Return what two tensors have in common that are the same elements in the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class CheckpointSave:
    """One rank's part in a checkpoint, which all ranks write into one folder.

        write                    the run waits
        begin -> complete, ...   a thread writes; asked until it is there

    The folder has a name of its own until everything is in it and on the disk: a save that is
    killed leaves the checkpoint before it whole. These methods are collectives, the thread takes
    part in none. Where one rank fails all raise, nothing is left, and all can try again: the rank
    that failed raises its own error (StorageError: no space left, no permission), the others a
    CollectiveError.
    """

    def __init__(self, ranks: Ranks, folder: Path, *, write: Write, finish: Write | None) -> None:
        """Keep what to write; each is called once in an attempt, with the folder to write into.

        Args:
            write: this rank's, by the thread beside the run, if there is one. What it writes is on
                the disk when it returns.
            finish: rank 0's, by the caller's thread, when all ranks have written.
        """
        self._ranks = ranks
        self.folder = folder
        self._partial = folder.with_name(f"{folder.name}.partial")
        self._write = write
        self._finish = finish
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self.started_s = self.ended_s = 0.0
        """When this rank wrote its part, Unix time."""

    def write(self) -> None:
        """Write the checkpoint, and return when it has its name."""
        with self._removed_on_error():
            self._ranks.together(self._make_folder, "save")
            self._ranks.together(self._write_part, "save")
            self._ranks.together(self._give_name, "save")

    def begin(self) -> None:
        """Begin to write in a thread."""
        with self._removed_on_error():
            self._ranks.together(self._make_folder, "save")

        def write_part() -> None:
            try:
                self._write_part()
            # of any kind: `complete` raises it, where the other ranks hear of it
            except Exception as error:
                self._error = error

        # As a daemon, because a process that ends early leaves the folder without its name.
        self._thread = Thread(target=write_part, name="write-checkpoint", daemon=True)
        self._thread.start()

    def complete(self, *, wait: bool) -> bool:
        """Give the checkpoint its name if every rank has written its part, and tell whether it has.

        `wait`: until they have. After an attempt that failed, write all of it again meanwhile.
        """
        thread = self._thread
        if thread is None:
            self.write()
            return True
        if wait:
            thread.join()
        with self._ranks.of_phase("save"):
            if self._ranks.max(int(thread.is_alive())):
                return False
        self._thread = None
        with self._removed_on_error():
            self._ranks.together(self._raise_error, "save")
            self._ranks.together(self._give_name, "save")
        return True

    def _make_folder(self) -> None:
        if self._ranks.rank != 0:
            return
        if self._partial.exists():
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)

    def _write_part(self) -> None:
        self.started_s = time.time()
        self._write(self._partial)
        # In this thread, because it reads all that was written again.
        own = [path for path in self._partial.rglob("*") if self._is_own(path)]
        flush(write_sums(self._partial, own, f"{SUMS}.{self._ranks.rank}"))
        self.ended_s = time.time()

    def _is_own(self, path: Path) -> bool:
        """Tell whether this rank wrote the file: `rank_N.*`, and rank 0 all others."""
        rank = re.match(r"rank_(\d+)\.", path.name)
        # The sums of a rank that was faster, and what safetensors writes for one that is slower.
        is_others = path.name.startswith((f"{SUMS}.", ".tmp"))
        return not is_others and self._ranks.rank == int(rank[1] if rank else 0) and path.is_file()

    def _raise_error(self) -> None:
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _give_name(self) -> None:
        if self._ranks.rank != 0:
            return
        written = set(self._partial.rglob("*"))
        if self._finish is not None:
            self._finish(self._partial)
        # By name: a share may list them late.
        parts = [self._partial / f"{SUMS}.{rank}" for rank in range(self._ranks.world_size)]
        more = [path for path in self._partial.rglob("*") if path not in written]
        parts.append(write_sums(self._partial, more, f"{SUMS}.more"))
        sums = "".join(part.read_text(encoding="utf-8") for part in parts)
        for part in parts:
            part.unlink()
        (self._partial / SUMS).write_text(sums, encoding="utf-8")
        flush(self._partial / SUMS, *more)
        # One of them is whole at every moment.
        old = self.folder.with_name(f"{self.folder.name}.old")
        if self.folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.folder.replace(old)
        self._partial.replace(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        try:
            with self._ranks.of_phase("save"):
                yield
        except BaseException as error:
            # On a full disk a half checkpoint is in the way of everything else.
            if self._ranks.rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, OSError | SafetensorError):
                raise cannot_write(self.folder, error) from error
            raise
