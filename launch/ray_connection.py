"""Ray's cluster at the configured address: the connection, and what it has, asked without starting anything on it."""

from __future__ import annotations

import os
from typing import Any

from launch.placement import Resources
from shared.config import RunConfig
from shared.errors import ConfigError

_CHECK_CLUSTER = "check `ray status` there, cluster.temp_dir and, where the cluster asks for a token, RAY_AUTH_MODE=token, or use local"


def cluster_nodes(config: RunConfig) -> list[Resources]:
    """CPUs and GPUs of each node that Ray has, or would find. ConfigError where there is no cluster at the address."""
    if config.cluster.address == "local":
        import torch

        return [Resources(cpus=float(len(os.sched_getaffinity(0))), gpus=float(torch.cuda.device_count()))]
    import ray

    connect(config)
    try:
        return nodes_there()
    finally:
        ray.shutdown()


def connect(config: RunConfig, **of_an_own_cluster: Any) -> None:
    """`ray.init` at the configured address. ConfigError where that gives no cluster."""
    import ray
    from ray.exceptions import AuthenticationError, RayError

    address = config.cluster.address
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", **of_an_own_cluster)
    except (ConnectionError, ValueError, RuntimeError, OSError, RayError) as error:
        is_refused = isinstance(error, AuthenticationError) or "authenticat" in str(error).lower()
        remedy = "set RAY_AUTH_MODE=token here and give this machine the cluster's token (~/.ray/auth_token)" if is_refused else _CHECK_CLUSTER
        raise ConfigError(f"cluster.address: {address} gives no Ray cluster ({error}); {remedy}") from error
    except Exception as error:
        # Of no class of its own, and its 30 s cannot be changed.
        if "timed out during startup" not in str(error):
            raise
        told = "Ray's own processes were not up within the 30 s that Ray gives them"
        raise ConfigError(f"cluster.address: {told}; end what keeps this machine busy (`uptime`, `ps aux --sort=-%cpu`), and start the run again") from error


def nodes_there() -> list[Resources]:
    """Of the cluster that this process is connected to."""
    import ray

    return [Resources.of(node["Resources"]) for node in ray.nodes() if node["Alive"]]
