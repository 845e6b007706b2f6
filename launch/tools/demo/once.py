"""Makes the demo's folders once, atomically, and records the settings that each was made from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from learner.model.checkpoint_folder import open_as_folder
from shared.config import RunConfig
from shared.config.model import ModelSection
from shared.errors import ConfigError

DEMO_FOLDERS: Mapping[Path, tuple[str, ...]] = MappingProxyType(
    {
        Path("outputs/demo") / name: tuple(arguments.split())
        for name, arguments in {
            "model": "model",
            "data": "data",
            "data_polygons": "data --geometry mixed",
            "few_digits": "crowded --fewest 1 --most 4 --train 6000 --val 256 --test 0",
            "crowded": "crowded",
            "crowded_model": "crowded-model",
            "crowded_untrained": "crowded-model --tower-steps 0",
            "crowded_start": "start",
            "stage1_polygons": "trained +experiment=stage1_polygons",
            "lm": "language-model",
            "lm_tools": "language-model --tools",
            "smollm": "smollm",
        }.items()
    }
)
"""Demo folders that shipped experiments use, with the arguments of `rollmatch demo` for each."""
UNTRAINED: Mapping[Path, Path] = MappingProxyType(
    {
        Path("outputs/demo") / trained: Path("outputs/demo") / untrained
        for trained, untrained in {
            "crowded_model": "crowded_untrained",
            "stage1_polygons": "model",
        }.items()
    }
)
"""For each demo model that takes minutes to train, an untrained model of equal shape."""
CARRIED_START = Path(__file__).parent / "start"
"""The initial checkpoint of the demo (its README.md says how it was made)."""
SETTINGS_FILE = "made_from.json"
"""Name of the file, in each folder, with the settings that the folder was made from."""


def make_once(out: Path, settings: Mapping[str, str | int], make: Callable[[Path], None]) -> bool:
    """Create the folder `out` by `make(folder)`, unless it was made with the same settings before.

    `make` works in a temporary folder, which is renamed at the end. So `out` is complete if it
    exists. Returns whether the folder is new.

    Raises ConfigError if `out` exists with other settings, or without recorded settings.
    """
    if out.exists():
        _require_made_from(out, settings)
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}-unfinished-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)  # may be left by a killed process with the same id
    folder.mkdir()
    try:
        make(folder)
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        open_as_folder(*(path for path in folder.rglob("*") if path.is_file()))
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # exists only if `make` failed
    return True


def copy_carried_start(out: Path) -> bool:
    """Create the folder `out` with the initial checkpoint that this package has.

    Return whether it is new. Raises ConfigError if `out` is another folder.
    """

    files = sorted(file for file in CARRIED_START.iterdir() if file.suffix != ".md")

    def copy(folder: Path) -> None:
        for file in files:
            shutil.copyfile(file, folder / file.name)

    digest = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return make_once(out, {"checkpoint": digest}, copy)


def make_trained_start(out: Path, overrides: Sequence[str]) -> bool:
    """Run `launch.train` with these overrides in the folder `out`; return whether the run is new.

    Raises ConfigError if the run failed, and has printed the reason.
    """

    def train(folder: Path) -> None:
        _run(
            "launch.train", *overrides, f"telemetry.run_dir={folder}", f"telemetry.name={out.name}"
        )

    return make_once(out, {"overrides": " ".join(overrides)}, train)


def make_missing_demo_files(config: RunConfig, show: Callable[[str], None]) -> None:
    """Make the model and the data of a shipped experiment if their folders do not exist.

    Only folders of `DEMO_FOLDERS` are made, if the configuration has them as written in `conf/`.
    The user's own paths are never made.

    `show`: called with a line before a folder is made.

    Raises ConfigError if the command that makes a folder failed. It has printed the reason.
    """
    files = [source.path for split in ("train", "val") for source in config.data.sources(split)]
    if config.environment is not None:
        files += [Path(text) for text in config.environment.args.values() if isinstance(text, str)]
    folders = {_model_folder(config.model), *(file.parent for file in files)}
    for folder in sorted(folders & DEMO_FOLDERS.keys()):
        if not folder.exists():
            show(f"demo      {folder} does not exist and is made now: {_command(folder)}")
            _run("launch.tools.demo", *DEMO_FOLDERS[folder], "--out", str(folder))
        elif DEMO_FOLDERS[folder] == ("start",):
            copy_carried_start(folder)  # refuses a copy of another version


def untrained_model(model: ModelSection, show: Callable[[str], None]) -> ModelSection:
    """Return the section `model`, with an untrained demo model if the named one does not exist yet.

    `UNTRAINED` names the untrained model, which has the same shape and tokenizer.

    `show`: called with a line about the replacement.
    """
    folder = _model_folder(model)
    if folder.exists() or folder not in UNTRAINED:
        return model
    show(
        f"demo      {folder} does not exist: the run trains it first, which takes minutes, with"
        f" `{_command(folder)}`. The check uses {UNTRAINED[folder]}, an untrained model of the same"
        " shape"
    )
    return model.model_copy(update={"path": str(UNTRAINED[folder])})


def _model_folder(model: ModelSection) -> Path:
    """Return the folder of the model; for a trained model, the folder of its run."""
    path = Path(model.path)
    return path.parent if path.name == "checkpoint" else path


def _command(folder: Path) -> str:
    return f"rollmatch demo {' '.join(DEMO_FOLDERS[folder])} --out {folder}"


def _run(*words: str) -> None:
    """Run a module in a child process, so that this process does not import torch.

    Raises ConfigError if it fails.
    """
    status = subprocess.run([sys.executable, "-m", *words], check=False).returncode
    if status != 0:
        raise ConfigError(
            f"`python -m {' '.join(words)}` ended with status {status}; correct the problem"
            " that it printed, and run the command again"
        )


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
