"""A vLLM worker that counts how many sequences it samples for at a time. Imported inside the
engines' processes.
"""

from __future__ import annotations

import os
from pathlib import Path

from counting_rows import ROWS_FILE
from spoiling_worker import SpoilingWorker
from torch import nn

from rollout_actors.weight_sync.worker import ChecksumLoader


class CountingWorker(SpoilingWorker):
    _rows: list[int] | None = None

    def count_rows(self) -> None:
        """Begin to count: one number per step."""
        self._rows = []
        modules = self.model_runner.model.named_modules()
        (head,) = [module for name, module in modules if name.endswith("logits_processor")]
        head.register_forward_pre_hook(lambda module, args: self._note_rows(len(args[1])))

    def take_rows(self) -> list[int]:
        """Return the numbers since the last time."""
        assert self._rows is not None, "nothing was counted"
        rows = self._rows
        self._rows = []
        return rows

    def make_loader(self, model: nn.Module, bucket_bytes: int) -> ChecksumLoader:
        if ROWS_FILE in os.environ and self._rows is None:
            self.count_rows()
        return super().make_loader(model, bucket_bytes)

    def _note_rows(self, rows: int) -> None:
        assert self._rows is not None
        self._rows.append(rows)
        if ROWS_FILE in os.environ:
            with Path(os.environ[ROWS_FILE]).open("a") as file:
                file.write(f"{rows}\n")
