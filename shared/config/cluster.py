"""`cluster`: the Ray cluster the run lives in."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.config.base import ConfigPath, Section


class ClusterSection(Section):
    address: Annotated[str, Field(min_length=1)] = "local"
    """Address of a running cluster, or `local`: the run starts one of its own and ends it."""

    temp_dir: ConfigPath | None = None
    """Ray's folder for sockets and logs, where the run starts its own; short, since a socket's path has at most 107 bytes. null: Ray's choice."""

    dashboard: bool = True
    """Start Ray's dashboard with a cluster of the run's own."""
