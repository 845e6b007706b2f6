"""An ordinary checkpoint: loads in transformers and vLLM without this project."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def save_checkpoint(model: Any, processor: Any, folder: Path) -> None:
    """Weights (safetensors), configuration, tokenizer and processor files in `folder`, complete or not there at all.

    Raises OSError with the path: no space left, no permission.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    processor.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
