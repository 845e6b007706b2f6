"""The image files that a data file names: each is decoded once, and its facts kept for later runs.

An image is known again by its path, size and times of change. Only sound images are kept: a
broken one is found and reported by whoever loads its row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import PIL

from learner.data import kept
from learner.data.kept import Fingerprint
from shared.prompts import on_white, open_picture, orientation_of
from shared.records import ImageFacts, PictureSize, image_facts

ReportProgress = Callable[[int, int], None]
"""A function of the number of images checked so far, and of all."""


def image_size(data: bytes) -> PictureSize:
    """Decode an image and measure it as it is displayed. ValueError with the reason."""
    # Decoded to its end: a header tells nothing about a truncated file.
    try:
        with open_picture(data) as image:
            if image.format == "PNG":  # its EXIF block may follow the pixels
                image.load()
            orientation = orientation_of(image)  # before a TIFF is loaded, which turns it
            return PictureSize(*on_white(image).size, orientation)
    except Exception as error:
        # All of them: on damaged files Pillow's decoders raise whatever their parsing runs into
        # (OSError, SyntaxError, struct.error, EOFError, ...).
        raise ValueError(str(error) or type(error).__name__) from error


def header_size(path: Path) -> PictureSize:
    """Measure an image file by its header alone. ValueError with the reason."""
    try:
        with open_picture(path) as image:
            size = PictureSize(*image.size, orientation_of(image))
            # Of a TIFF, Pillow tells the size as it is displayed; of others as it is stored.
            if image.format != "TIFF":
                size = PictureSize(*size.stored, size.orientation)
            return size
    except Exception as error:  # as in `image_size`
        raise ValueError(str(error) or type(error).__name__) from error


def fingerprints(data_file: Path, names: set[str]) -> dict[str, Fingerprint | None]:
    """Return size and times of images: paths as the rows of `data_file` have; None: no file."""
    return {name: kept.fingerprint(data_file.parent / name) for name in sorted(names)}


def known_images(
    data_file: Path,
    prints: Mapping[str, Fingerprint | None],
    report: ReportProgress | None = None,
) -> dict[str, ImageFacts]:
    """Return the facts of the sound images among those of these fingerprints.

    Only images that are new or have changed are decoded. `report` is called for every image after
    `kept.QUICK_S`.
    """
    root = data_file.parent
    there = {name: found for name, found in prints.items() if found is not None}
    file = kept.kept_file(data_file, "images")
    key = kept.digest_of(PIL.__version__)
    before = kept.read(file, key)
    known = {
        name: ImageFacts(*facts)
        for name, (found, *facts) in ({} if before is None else before.rest).items()
        if there.get(name) == found
    }
    left = [name for name in there if name not in known]
    started_s = time.monotonic()
    for done, name in enumerate(left, len(known) + 1):
        if (facts := image_facts(root / name, image_size)) is not None:
            known[name] = facts
        if report is not None and time.monotonic() - started_s >= kept.QUICK_S:
            report(done, len(there))
    if left and time.monotonic() - started_s >= kept.QUICK_S:
        rows = {name: (there[name], one.sha256, *one.size) for name, one in known.items()}
        kept.keep(file, key, {}, rows, lost="decodes all images")
    return known
