"""Folders that are made once, from stated settings, and never half."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from shared.errors import ConfigError

SETTINGS_FILE = "made_from.json"
"""The settings that a folder was made from, inside it."""


def make_once(out: Path, settings: Mapping[str, str | int], make: Callable[[Path], None]) -> bool:
    """Fill the folder `out` by `make(folder)`, unless it exists, made from the same settings.

    `make` works in a folder beside `out` which is renamed at the end, so `out` is complete whenever
    it exists. Returns whether it was made now.

    Raises:
        ConfigError: `out` holds something else: other settings, or none at all.
    """
    if out.exists():
        _require_made_from(out, settings)
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-unfinished-", dir=out.parent))
    try:
        make(folder)
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        folder.chmod(0o755)  # mkdtemp's folders are private
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # exists only where `make` was interrupted
    return True


def _require_made_from(out: Path, settings: Mapping[str, str | int]) -> None:
    try:
        found = json.loads((out / SETTINGS_FILE).read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{out}: exists, but was not made by this command; choose another folder or remove it"
        ) from None
    if found != settings:
        different = sorted({key for key, _ in found.items() ^ settings.items()})
        raise ConfigError(
            f"{out}: was made from another {', '.join(different)}; remove it to make it again, or"
            " choose another folder"
        )
