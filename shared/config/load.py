"""The reader of a configuration: a validated `RunConfig`, or every problem of the mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shared.config.base import plain
from shared.config.checks.general import cross_check
from shared.config.explain import explain, sections_in, shown
from shared.config.retired import take_retired
from shared.config.run import RunConfig
from shared.errors import ConfigError


def load_config(mapping: Mapping[str, Any]) -> RunConfig:
    """Validate the configuration of a run (decision 39). The files it names stay closed.

    Raises:
        ConfigError: all unknown and retired keys, wrong types and wrong values at once; where
            there is none of them, all contradictions between values at once.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"configuration: must be a mapping of sections, got {shown(mapping)}; start from an"
            " experiment of conf/experiment"
        )
    config = plain(mapping)
    problems = take_retired(config)
    # An absent section is an empty one, so that the report names the keys it must have.
    for name, field in RunConfig.model_fields.items():
        if field.is_required() and sections_in(field.annotation):
            config.setdefault(name, {})
    try:
        run = RunConfig.model_validate(config)
    except ValidationError as error:
        problems += (explain(RunConfig, one) for one in error.errors(include_url=False))
        raise ConfigError([str(problem) for problem in problems]) from None
    problems = problems or cross_check(run)
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    return run
