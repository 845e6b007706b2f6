"""A guest that does to the process what in-process vLLM does, and a host that finds everything as
it was.
"""

from __future__ import annotations

import gc
import os
import random
import sys

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from rollout_actors.backends.process_isolation import EngineContext, EngineWorld

c10d = dist.distributed_c10d


def open_default_group(folder, name):
    dist.init_process_group("gloo", init_method=f"file://{folder / name}", rank=0, world_size=1)


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def facts_of_the_process():
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "excepthook": sys.excepthook,
        "environment": dict(os.environ),
        "frozen": gc.get_freeze_count(),
        "group": c10d._world.default_pg,
        "groups": dict(c10d._world.pg_names),
        "compiles": torch._dynamo.config.disable,
    }


def misbehave(folder):
    seed_all(99)
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["HOME"] = "/nowhere"
    torch.set_num_threads = lambda number: None
    gc.freeze()
    if not dist.is_initialized():
        open_default_group(folder, "guest")


@pytest.fixture(autouse=True)
def threads():
    number = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(number)


@pytest.fixture
def host_group(tmp_path):
    hook = sys.excepthook
    open_default_group(tmp_path, "host")
    yield dist.group.WORLD
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.mark.slow
@pytest.mark.parametrize("ends_with", [lambda: None, lambda: 1 / 0], ids=["return", "exception"])
def test_the_process_is_as_it_was_behind_every_call_and_the_guest_finds_its_own_again(
    tmp_path, ends_with
):
    seed_all(1)
    before = facts_of_the_process()
    context = EngineContext({"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    try:
        with context.entered():
            assert torch.get_num_threads() == 1
            assert os.environ["OMP_NUM_THREADS"] == "1"
            assert torch._dynamo.config.disable
            misbehave(tmp_path)
            group = dist.group.WORLD
            ends_with()
    except ZeroDivisionError:
        pass
    assert facts_of_the_process() == before
    assert not dist.is_initialized()
    with context.entered():
        assert os.environ["LEFT_BEHIND"] == "1"
        assert dist.group.WORLD is group
        dist.all_reduce(torch.ones(1))
        context.forget_default_group()


@pytest.mark.slow
def test_a_host_with_a_group_of_its_own_keeps_it_and_the_names_of_its_groups(host_group, tmp_path):
    before = facts_of_the_process()
    context = EngineContext({})
    with context.entered():
        assert not dist.is_initialized()
        misbehave(tmp_path)
        assert dist.group.WORLD is not host_group
        inner = dist.new_group([0])
        dist.all_reduce(torch.ones(1), group=inner)
    assert facts_of_the_process() == before
    name = c10d._world.pg_names[dist.new_group([0])]
    assert int(name) == int(before["groups"][host_group]) + 1, "as if there were no guest"
    with context.entered():
        dist.destroy_process_group(inner)
        context.forget_default_group()
        assert not dist.is_initialized()
    assert dist.group.WORLD is host_group
    # Functional collectives (and so DTensors) find a group by its name, in a registry that
    # `destroy_process_group()` empties.
    assert functional.all_reduce(torch.ones(1), "sum", host_group).tolist() == [1.0]


def test_whatever_torchs_world_keeps_in_variables_of_its_module_the_engine_has_for_itself():
    variables = {name for name, value in vars(c10d).items() if not callable(value)}
    in_module = {
        name
        for name, part in vars(c10d._World).items()
        if isinstance(part, property) and part.fget and variables & set(part.fget.__code__.co_names)
    }
    assert {"pg_map", "group_count"} <= in_module <= set(vars(EngineWorld))
