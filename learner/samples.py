"""The run's data files as samples.

One way to load them, so that the check before the start and the learner keep and skip the same
rows. Imports no torch: the check runs before anything heavy is loaded.
"""

from __future__ import annotations

from learner.image_files import ReportProgress, image_size, known_images
from learner.targets import target_settings
from shared.config import RunConfig
from shared.config.model import DataSource
from shared.dataset import Dataset, image_names, load_dataset
from shared.prompts import Prompts


def load_samples(
    config: RunConfig, source: DataSource, report: ReportProgress | None = None
) -> Dataset:
    """Load a file of `data.train` or `data.val`. Raises RecordError as `load_dataset` does.

    `report` is called with the images that are being checked, where that takes long.
    """
    data = config.data
    path = source.path
    return load_dataset(
        path,
        on_bad_row=data.on_bad_row,
        sort_objects=data.sort_objects,
        check_images=data.check_images,
        geometry=target_settings(config).geometry,
        image_size=image_size,
        known_images=known_images(path, image_names(path), report) if data.check_images else {},
        require=Prompts.from_config(config).texts,
        source=source.name,
    )
