"""The configuration's entry points: `load_config` turns a mapping into a validated `RunConfig`."""

from shared.config.load import load_config
from shared.config.run import RunConfig

__all__ = ["RunConfig", "load_config"]
