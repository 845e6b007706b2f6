"""Looks at a checkpoint's folder that cost nothing and import nothing heavy."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
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


def end_token_ids(folder: Path, num_tokens: int, special_ids: Collection[int]) -> set[int]:
    """Return the ids that end an answer by `generation_config.json` and `config.json`.

    Each may name one id or several (`"eos_token_id": [2, 0]`). An engine that ignored one would
    sample on, and the learner would learn what follows. Engines of others read `config.json` only
    if the other file names none; then it decides here too. Otherwise it only adds control tokens:
    it may still hold the default of its class, an id that is a word of this tokenizer.

    Args:
        num_tokens: size of the vocabulary; every id is below it.
        special_ids: ids of the tokenizer's control tokens.

    Raises:
        ConfigError: a value is no id of the vocabulary.
    """
    named = _eos_ids(folder / "generation_config.json")
    file = folder / ("generation_config.json" if named else "config.json")
    others = _eos_ids(folder / "config.json")
    for value in named or others:
        if not isinstance(value, int) or not 0 <= value < num_tokens:
            raise ConfigError(
                f"model.path: {file} has eos_token_id {value!r}, which is no id of its tokenizer of"
                f" {num_tokens} tokens; correct the file"
            )
    return {*(named or others), *(value for value in others if value in special_ids)}


def _eos_ids(file: Path) -> list[Any]:
    """Return the values of `eos_token_id`, also of a `text_config`; none without the file."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found: list[Any] = []
    for section in (content, content.get("text_config") or {}):
        named = section.get("eos_token_id")
        found += named if isinstance(named, list) else [] if named is None else [named]
    return found


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
