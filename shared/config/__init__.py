"""The entry points of the configuration: `load_config` validates a mapping and returns a
`RunConfig`."""

from shared.config.load import load_config
from shared.config.run import RunConfig

__all__ = ["RunConfig", "load_config"]
