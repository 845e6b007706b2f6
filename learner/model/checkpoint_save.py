"""Writes a checkpoint to disk, either while the run waits or in a background thread."""

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
"""A function that writes a part of a checkpoint into the folder that it gets."""


class HostCopies:
    """Copies of a checkpoint's tensors in host memory, for writing while training continues.

    A float32 weight is its own master, so a checkpoint contains it twice. It is copied once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy these tensors to host memory. Views of the same elements share a copy."""
        # Keep references to the tensors, so that no other tensor can reuse their addresses.
        self._kept: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
        for tensor in tensors:
            if _place(tensor) not in self._kept:
                self._kept[_place(tensor)] = (tensor, tensor.to("cpu", copy=True))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of this tensor; if there is none, make one and do not keep it."""
        if _place(tensor) in self._kept:
            return self._kept[_place(tensor)][1]
        return tensor.to("cpu", copy=True)


def _place(tensor: torch.Tensor) -> object:
    """Return a key that is equal for two tensors with the same elements in the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class CheckpointSave:
    """One learner rank's part of saving a checkpoint, which all ranks write into one folder.

        write                    the run waits
        begin -> complete, ...   a thread writes; call `complete` until it returns True

    The folder has a temporary name until it is complete and flushed to disk, so a killed save does
    not damage the previous checkpoint. The methods are collectives; the thread calls none of them.
    If one rank fails, all ranks raise, the folder is removed, and all can try again. The rank that
    failed raises its own error (StorageError: no space left, no permission), the others a
    CollectiveError.
    """

    def __init__(self, ranks: Ranks, folder: Path, *, write: Write, finish: Write | None) -> None:
        """Prepare a save into `folder`, the checkpoint's final name. Nothing is written yet.

        Each attempt to save calls both functions once, with the folder to write to.

        Args:
            write: writes this rank's part and flushes it to disk; runs in the background thread, if
                there is one.
            finish: called on rank 0, in the caller's thread, after all ranks have written.
        """
        self._ranks = ranks
        self.folder = folder
        self._partial = folder.with_name(f"{folder.name}.partial")
        self._write = write
        self._finish = finish
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self.started_s = self.ended_s = 0.0
        """Start and end of this rank's write, in Unix time."""

    def write(self) -> None:
        """Write the checkpoint, and return when it is complete and has its final name."""
        with self._removed_on_error():
            self._ranks.together(self._make_folder, "save")
            self._ranks.together(self._write_part, "save")
            self._ranks.together(self._give_name, "save")

    def begin(self) -> None:
        """Start to write this rank's part in a background thread. `complete` finishes the save."""
        with self._removed_on_error():
            self._ranks.together(self._make_folder, "save")

        def write_part() -> None:
            try:
                self._write_part()
            # any exception: `complete` raises it in a collective, so all ranks are informed
            except Exception as error:
                self._error = error

        # A daemon, because a process may end early: the folder then keeps its temporary name.
        self._thread = Thread(target=write_part, name="write-checkpoint", daemon=True)
        self._thread.start()

    def complete(self, *, wait: bool) -> bool:
        """Give the checkpoint its final name if all ranks have written their parts.

        Return whether all ranks have. With `wait`, block until then. After a failed attempt, write
        everything again, and block.
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
        # In this thread, because computing the sums reads all files again.
        own = [path for path in self._partial.rglob("*") if self._is_own(path)]
        flush(write_sums(self._partial, own, f"{SUMS}.{self._ranks.rank}"))
        self.ended_s = time.time()

    def _is_own(self, path: Path) -> bool:
        """Return whether this rank wrote the file: `rank_N.*`, and on rank 0 all other files."""
        rank = re.match(r"rank_(\d+)\.", path.name)
        # Sums of a faster rank, and temporary files of safetensors from a slower rank.
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
        # Open them by name: a network share may list them late.
        parts = [self._partial / f"{SUMS}.{rank}" for rank in range(self._ranks.world_size)]
        more = [path for path in self._partial.rglob("*") if path not in written]
        parts.append(write_sums(self._partial, more, f"{SUMS}.more"))
        sums = "".join(part.read_text(encoding="utf-8") for part in parts)
        for part in parts:
            part.unlink()
        (self._partial / SUMS).write_text(sums, encoding="utf-8")
        flush(self._partial / SUMS, *more)
        # The old or the new checkpoint is complete at every moment.
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
            # On a full disk, a partial checkpoint would take the space of other files.
            if self._ranks.rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, OSError | SafetensorError):
                raise cannot_write(self.folder, error) from error
            raise
