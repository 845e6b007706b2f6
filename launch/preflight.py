"""What can be known before any process is started: are the data sound?"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, UnidentifiedImageError

from shared.config import RunConfig
from shared.dataset import Dataset, load_dataset
from shared.errors import ConfigError, RecordError
from shared.records import Sample


def check_data(config: RunConfig) -> None:
    """Read every row of the run's data files and, where `data.check_images`, every image.

    Raises:
        ConfigError: the checkpoint or a data file is missing.
        RecordError: a bad row or image, with file and line (`data.on_bad_row: error`).
    """
    model = Path(config.model.path)
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"model.path: {model} holds no checkpoint (no config.json); run `make demo-data`, or set model.path to a folder that save_pretrained wrote"
        )
    data = config.data
    for key, path in (("data.train", data.train), ("data.val", data.val)):
        if path is None:
            continue
        if not path.is_file():
            raise ConfigError(f"{key}: there is no file {path}; run `make demo-data`, or set {key} to a JSONL file")
        dataset = load_dataset(path, on_bad_row=data.on_bad_row, sort_objects=data.sort_objects, check_images=data.check_images)
        if data.check_images:
            _check_images(dataset)


def _check_images(dataset: Dataset) -> None:
    for sample in dataset:
        for image in sample.images:
            assert image.path is not None
            _check_image(image.path, sample)


def _check_image(path: Path, sample: Sample) -> None:
    try:
        with Image.open(path) as image:
            size = image.size
            image.verify()
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise RecordError(
            f"sample {sample.sample_id}: {path} is not a readable image ({error})", field="images", remedy="replace the file or remove the row"
        ) from error
    if size != (sample.width, sample.height):
        raise RecordError(
            f"sample {sample.sample_id}: {path} is {size[0]} x {size[1]} pixels, the row says {sample.width} x {sample.height}",
            field="width, height",
            remedy="correct the row; boxes are relative to this size",
        )
