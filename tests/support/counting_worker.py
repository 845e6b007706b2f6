"""A vLLM worker that counts how many sequences it samples for at a time. Imported inside the engines' processes."""

from __future__ import annotations

from typing import Any

from spoiling_worker import SpoilingWorker


class CountingWorker(SpoilingWorker):
    model_runner: Any
    _rows: list[int]

    def count_rows(self) -> None:
        """From now on: one number per step."""
        self._rows = []
        (head,) = [module for name, module in self.model_runner.model.named_modules() if name.endswith("logits_processor")]
        head.register_forward_pre_hook(lambda module, args: self._rows.append(len(args[1])))

    def take_rows(self) -> list[int]:
        """Since the last time."""
        rows, self._rows[:] = list(self._rows), []
        return rows
