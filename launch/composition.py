"""How a command of the run's configuration reads it: files of conf/, composed by Hydra, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shared.errors import ConfigError

CONF = Path(__file__).resolve().parent.parent / "conf"


def as_mapping(composed: DictConfig) -> dict[str, Any]:
    """The end of OmegaConf's life: the schema reads plain values. ConfigError for an interpolation that leads nowhere."""
    try:
        mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        remedy = "write the value itself, or ${...} with the whole path of a key that is there"
        raise ConfigError(f"{error.full_key}: its interpolation cannot be resolved ({reason}); {remedy}") from error
    assert isinstance(mapping, dict)
    return {str(key): value for key, value in mapping.items()}


def as_schema_overrides(arguments: list[str]) -> list[str]:
    """`a.b=c` becomes `++a.b=c`: any key of the schema may be set from the command line, written in a file or not, and a wrong key gets the schema's answer.

    Options, config groups (`model=...`), Hydra's own keys and overrides with a prefix stay as they are. ConfigError for a key inside a list, which Hydra
    cannot read.
    """
    if problems := [_inside_a_list(key) for key, equals, _ in (argument.partition("=") for argument in arguments) if equals and "[" in key]:
        raise ConfigError(problems)

    def converted(argument: str) -> str:
        key = argument.split("=", 1)[0]
        plain = "=" in argument and key[:1].isalpha() and not (CONF / key).is_dir() and not key.startswith("hydra")
        return f"++{argument}" if plain else argument

    return [converted(argument) for argument in arguments]


def _inside_a_list(key: str) -> str:
    above = key.lstrip("+~").partition("[")[0]
    whole = f"give the whole list ('{above}=[...]'), or write it in a file of conf/experiment"
    return f"{key.lstrip('+~')}: a key inside a list cannot be set on the command line; {whole}"
