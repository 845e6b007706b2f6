"""Looks at a checkpoint's folder that cost nothing and import nothing heavy."""

from __future__ import annotations

from pathlib import Path

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""With a vision tower."""
TEXT_MODEL_TYPES = ("qwen2", "qwen3")
"""Trained on trajectories alone: there are no images to ask them about."""

_ANOTHER_MODEL = (
    "run `make demo-data` (it makes outputs/demo/model) or `make demo-lm` (outputs/demo/lm), or set"
    " model.path to a folder that save_pretrained wrote"
)


def checkpoint_problems(
    folder: Path, *, key: str = "model.path", remedy: str = _ANOTHER_MODEL
) -> tuple[str, ...]:
    """Why `folder`, which `key` names, is no checkpoint, as a ConfigError says it; empty where it
    is one.
    """
    if (folder / "config.json").is_file():
        return ()
    if (hub_id := _hub_id(folder)) is not None:
        name = hub_id.partition("/")[2]
        download = f".venv/bin/hf download {hub_id} --local-dir models/{name}"
        there_is = (
            f"{key}: there is no folder {hub_id}, and models of a hub are not fetched by a run"
        )
        return (
            (
                f"{there_is}; if {hub_id} is one, download it (`{download}`) and set"
                f" {key}=models/{name}, else {remedy}"
            ),
        )
    return (f"{key}: {folder} holds no checkpoint (no config.json); {remedy}",)


def _hub_id(folder: Path) -> str | None:
    """Return `OWNER/NAME` where the path is written as one and not even a folder OWNER is there:
    then it hardly means a folder.
    """
    below = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    is_hub_id = (
        not below.is_absolute()
        and len(below.parts) == 2
        and ".." not in below.parts
        and not folder.parent.exists()
    )
    return below.as_posix() if is_hub_id else None
