"""How a command of the run's configuration reads it: files of conf/, composed by Hydra, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).resolve().parent.parent / "conf"


def as_mapping(composed: DictConfig) -> dict[str, Any]:
    """The end of OmegaConf's life: the schema reads plain values."""
    mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    assert isinstance(mapping, dict)
    return {str(key): value for key, value in mapping.items()}


def as_schema_overrides(arguments: list[str]) -> list[str]:
    """`a.b=c` becomes `++a.b=c`: any key of the schema may be set from the command line, written in a file or not, and a wrong key gets the schema's answer.

    Options, config groups (`model=...`), Hydra's own keys and overrides with a prefix stay as they are.
    """

    def converted(argument: str) -> str:
        key = argument.split("=", 1)[0]
        plain = "=" in argument and key[:1].isalpha() and not (CONF / key).is_dir() and not key.startswith("hydra")
        return f"++{argument}" if plain else argument

    return [converted(argument) for argument in arguments]
