"""The configuration's entry points: `load_config` turns a mapping into a validated `RunConfig`.

Their modules are imported at the first use: a command that only prints its help needs few sections.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared.config.load import load_config
    from shared.config.run import RunConfig

__all__ = ["RunConfig", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "RunConfig":
        from shared.config.run import RunConfig

        return RunConfig
    if name == "load_config":
        from shared.config.load import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
