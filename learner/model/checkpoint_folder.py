"""Looks at a checkpoint's folder that cost nothing and import nothing heavy."""

from __future__ import annotations

from pathlib import Path

_ANOTHER_MODEL = (
    "run `make demo-data` (it makes outputs/demo/model) or `make demo-lm` (outputs/demo/lm), or set"
    " model.path to a folder that save_pretrained wrote"
)


def checkpoint_problems(
    folder: Path, *, key: str = "model.path", remedy: str = _ANOTHER_MODEL
) -> tuple[str, ...]:
    """Return why `folder`, which `key` names, is no checkpoint; empty where it is one."""
    if (folder / "config.json").is_file():
        return ()
    if (hub_id := _hub_id(folder)) is not None:
        name = hub_id.partition("/")[2]
        download = f".venv/bin/hf download {hub_id} --local-dir models/{name}"
        problem = (
            f"{key}: there is no folder {hub_id}, and models of a hub are not fetched by a run; if"
            f" {hub_id} is one, download it (`{download}`) and set {key}=models/{name}, else"
            f" {remedy}"
        )
        return (problem,)
    return (f"{key}: {folder} holds no checkpoint (no config.json); {remedy}",)


def _hub_id(folder: Path) -> str | None:
    """Return `OWNER/NAME` where the path is written as one and hardly means a folder."""
    below = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    # Where not even a folder OWNER is there.
    is_hub_id = (
        not below.is_absolute()
        and len(below.parts) == 2
        and ".." not in below.parts
        and not folder.parent.exists()
    )
    return below.as_posix() if is_hub_id else None
