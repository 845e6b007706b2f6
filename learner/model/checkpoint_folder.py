"""Looks at a checkpoint's folder that cost nothing and import nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path

from shared.model_families import IN_OTHER_FORMS

_ANOTHER_MODEL = (
    "run `make demo-data` (it makes outputs/demo/model), `make demo-lm` (outputs/demo/lm) or `make"
    " demo-start` (outputs/demo/crowded_model and start), or set model.path to a folder that"
    " save_pretrained wrote"
)


def checkpoint_problems(
    folder: Path, *, key: str = "model.path", remedy: str = _ANOTHER_MODEL
) -> tuple[str, ...]:
    """Return why `folder`, which `key` names, is no checkpoint; empty where it is one."""
    if (folder / "config.json").is_file():
        text = (folder / "config.json").read_text(encoding="utf-8")
        # Told before transformers asks a terminal whether it may run that code.
        return tuple(
            f"{key}: {folder} is a {kind} model, which {form}"
            for kind, form in IN_OTHER_FORMS.items()
            if re.search(rf'"model_type": *"{kind}"', text)
        )
    if (named := hub_id(folder)) is not None:
        repo, _, revision = named.partition("@")
        name = repo.partition("/")[2]
        at_revision = f" --revision {revision}" if revision else ""
        download = f".venv/bin/hf download {repo}{at_revision} --local-dir models/{name}"
        problem = (
            f"{key}: there is no folder {named}, and this command fetches no models of a hub; if"
            f" {named} is one, download it (`{download}`) and set {key}=models/{name}, else"
            f" {remedy}"
        )
        return (problem,)
    return (f"{key}: {folder} holds no checkpoint (no config.json); {remedy}",)


def hub_id(folder: Path) -> str | None:
    """Return `OWNER/NAME`, or `OWNER/NAME@REVISION`, where the path is written so and hardly means
    a folder.
    """
    below = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    # Where not even a folder OWNER is there.
    is_hub_id = (
        not below.is_absolute()
        and len(below.parts) == 2
        and ".." not in below.parts
        and not folder.parent.exists()
    )
    return below.as_posix() if is_hub_id else None
