"""What the learner's gloo groups are opened with, its ranks' and its ends of a sync's; `rollout_actors.gloo_group` opens the engines' ends alike."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo


def gloo_options(host: str, timeout: timedelta) -> Any:
    """Of a group whose collectives end after `timeout`, and whose other ranks reach this one at `host`."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # Without it gloo asks the host's name for an address, which may be one that nobody else reaches.
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return options
