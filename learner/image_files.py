"""The image files that a data file names: each is decoded once, and its facts kept for later runs.

An image is known again by its path, size and times of change. Only sound images are kept: a
broken one is found and reported by whoever loads its row.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import PIL
from PIL import Image

from shared.prompts import on_white
from shared.records import ImageFacts, image_facts

_LOGGER = logging.getLogger(__name__)

QUICK_S = 1.0
"""A check that takes less is not reported and not kept: a file would cost as much."""
_FORMAT = ["2", PIL.__version__]
"""Version of the kept facts. Change it together with what `image_size` refuses."""

ReportProgress = Callable[[int, int], None]
"""A function of the number of images checked so far, and of all."""
Fingerprint = tuple[int, int, int]
"""Size in bytes, and when contents and inode last changed (which no copy can set), in ns."""


def image_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) in pixels of an encoded image. ValueError with the reason."""
    # Decoded to its end: a header tells nothing about a truncated file.
    try:
        with Image.open(io.BytesIO(data)) as image:
            return on_white(image).size
    except Exception as error:
        # All of them: on damaged files Pillow's decoders raise whatever their parsing runs into
        # (OSError, SyntaxError, struct.error, EOFError, ...).
        raise ValueError(str(error) or type(error).__name__) from error


def known_images(
    data_file: Path, names: set[str], report: ReportProgress | None = None
) -> dict[str, ImageFacts]:
    """Return the facts of the sound images among `names`: paths as the rows of `data_file` have.

    Only images that are new or have changed are decoded. `report` is called for every image after
    `QUICK_S`.
    """
    root = data_file.parent
    prints = {
        name: found for name in sorted(names) if (found := _fingerprint(root / name)) is not None
    }
    kept_in = _kept_in(data_file)
    kept = _read(kept_in)
    known = {
        name: kept[name][1]
        for name, found in prints.items()
        if name in kept and kept[name][0] == found
    }
    left = [name for name in prints if name not in known]
    started_s = time.monotonic()
    for done, name in enumerate(left, len(known) + 1):
        if (facts := image_facts(root / name, image_size)) is not None:
            known[name] = facts
        if report is not None and time.monotonic() - started_s >= QUICK_S:
            report(done, len(prints))
    if left and time.monotonic() - started_s >= QUICK_S:
        _write(kept_in, {name: (prints[name], facts) for name, facts in known.items()})
    return known


def _fingerprint(path: Path) -> Fingerprint | None:
    """Read size and times of a file; None where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a path with a null character
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _kept_in(data_file: Path) -> Path:
    """Return the file that keeps the facts: one per data file, so that none outgrows its data."""
    home = Path("~").expanduser() if "HOME" in os.environ else Path(tempfile.gettempdir())
    folder = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    digest = hashlib.sha256(str(data_file.absolute()).encode()).hexdigest()
    return Path(folder) / "rollmatch/images" / f"{digest[:16]}.json"


def _read(path: Path) -> dict[str, tuple[Fingerprint, ImageFacts]]:
    """Read what is kept; empty where nothing can be read."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT:
            return {}
        return {
            name: ((size, mtime_ns, ctime_ns), ImageFacts(*facts))
            for name, (size, mtime_ns, ctime_ns, *facts) in content["images"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write(path: Path, images: Mapping[str, tuple[Fingerprint, ImageFacts]]) -> None:
    """Replace what is kept, at once: several processes may read and write it."""
    rows = {
        name: (*found, facts.sha256, facts.width, facts.height)
        for name, (found, facts) in images.items()
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".part", delete=False
        ) as file:
            try:
                json.dump({"format": _FORMAT, "images": rows}, file)
                file.close()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        _LOGGER.warning(
            "the next start decodes all images again: cannot write %s: %s", path, error.strerror
        )
