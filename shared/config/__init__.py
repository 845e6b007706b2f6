"""The configuration's public face: `load_config` turns a mapping into a `RunConfig`, or says
everything that is wrong with it.
"""

from shared.config.load import load_config
from shared.config.run import RunConfig

__all__ = ["RunConfig", "load_config"]
