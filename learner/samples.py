"""The run's data files as samples: one way to load them, so that the check before the start and the learner keep and skip the same rows.

Imports no torch: the check runs before anything heavy is loaded.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from learner.rules import target_rules
from shared.config import RunConfig
from shared.dataset import Dataset, load_dataset
from shared.pictures import on_white


def load_samples(config: RunConfig, path: Path) -> Dataset:
    """The rows of `data.train` or `data.val` as the configuration wants them. Raises RecordError as `load_dataset` does."""
    data = config.data
    return load_dataset(
        path,
        on_bad_row=data.on_bad_row,
        sort_objects=data.sort_objects,
        check_images=data.check_images,
        geometry=target_rules(config).geometry,
        image_size=image_size,
    )


def image_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels of an encoded image, decoded to its end: a header tells nothing about a truncated file. ValueError with the reason."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return on_white(image).size
    except Exception as error:
        # All of them: on damaged files Pillow's decoders raise whatever their parsing runs into (OSError, SyntaxError, struct.error, EOFError, ...).
        raise ValueError(str(error) or type(error).__name__) from error
