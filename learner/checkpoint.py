"""An ordinary checkpoint: loads in transformers and vLLM without this project."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shared.errors import StorageError


def save_checkpoint(model: Any, processor: Any, folder: Path) -> None:
    """Weights (safetensors), configuration, tokenizer and processor files in `folder`, complete or not there at all.

    Raises StorageError with the path: no space left, no permission.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        processor.save_pretrained(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise StorageError(str(folder), str(error)) from error
