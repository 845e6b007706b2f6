"""A run on a cluster that is there already, whose nodes are too small for all of it (placement
groups, several nodes), and what is seen of it there.
"""

import json
import re
import signal
import subprocess

import pytest
from command_support import ROOT
from ray.cluster_utils import Cluster

from launch.processes.ray_connection import patient_start
from rollout_actors.warm import warm_python

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def nodes(orphans_are_adopted):
    """Two nodes of one CPU each beside a head without any: four processes of half a CPU need
    both."""
    with patient_start():
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
    for _ in range(2):
        with patient_start():
            cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes(timeout=120)
    yield cluster
    cluster.shutdown()


def test_a_run_spreads_over_the_nodes_of_a_running_cluster_and_leaves_it_running(
    nodes, start_command, warm_checkpoint, demo_data, tmp_path
):
    steps = [
        "training.max_steps=500",
        "stage2_ab.schedule.warmup_steps=0",
        "data.val=null",
        "rollout_matching.decode_batch_size=4",
    ]
    ranks = [
        "learner.world_size=2",
        "learner.cpus=0.5",
        "rollout_matching.vllm.actors.num_actors=2",
        "telemetry.name=spread",
    ]
    command = start_command(
        tmp_path, warm_checkpoint, demo_data, *steps, *ranks, f"cluster.address={nodes.address}"
    )
    command.wait_for("step    2/500")
    used, names, metrics = json.loads(printed_by(f"asked = set({ASKED})\n{SEEN}", nodes))
    assert used == [1.0, 1.0], "two processes of half a CPU on each of the two nodes"
    assert set(names) == {"rollout-actor-0", "rollout-actor-1", "learner-0", "learner-1"}
    assert metrics == ASKED
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(timeout=240) == 130, command.output
    (checkpoint,) = command.run_dir.glob("checkpoint_interrupted_*")
    assert f"saved     {checkpoint}" in command.output
    # The run gave everything back.
    assert printed_by(RETURNED, nodes) == "[True, True, True] 2.0"


def test_what_does_not_fit_the_nodes_is_refused_with_what_there_is(
    nodes, start_command, warm_checkpoint, demo_data, tmp_path
):
    overrides = ["training.max_steps=2", "learner.cpus=2", f"cluster.address={nodes.address}"]
    command = start_command(tmp_path, warm_checkpoint, demo_data, *overrides)
    assert command.process.wait(timeout=240) == 2, command.output
    assert re.search(r"learner\.cpus: .* 2 CPU .*node.* 1; lower ", command.output)


def test_what_reaches_servers_stays_on_the_driver_s_node(nodes):
    """On another node 127.0.0.1 would be another server, or none."""
    code = """
from launch.processes.cluster import here
where = ray.remote(num_cpus=0)(lambda: ray.get_runtime_context().get_node_id())
places = ray.get([where.options(scheduling_strategy=here()).remote() for _ in range(6)])
print(set(places) == {ray.get_runtime_context().get_node_id()})
"""
    assert printed_by(code, nodes) == "True"


def test_the_ranks_of_a_copy_of_the_model_are_on_one_node(nodes):
    """An engine of a quarter of a CPU, and two ranks of a half, which as processes of their own
    would share a node with the engine.
    """
    code = """
from contextlib import ExitStack
from launch.processes.cluster import reserve
from launch.processes.placement import Placement, Resources
from shared.errors import ConfigError
def nodes_of(rank, start_s):
    bundles = (Resources(0.25, 0.0),), (rank,) * 2
    with ExitStack() as ends:
        places = reserve(Placement(*bundles, 1, None, None, shard_size=2), start_s, ends)
        groups = ray.util.placement_group_table().values()
        print(sorted(one["name"] for one in groups if one["state"] == "CREATED"))
        where = ray.remote(num_cpus=0.1)(lambda: ray.get_runtime_context().get_node_id())
        return ray.get([where.options(scheduling_strategy=places[n]).remote() for n in range(3)])
engine, first, second = nodes_of(Resources(0.5, 0.0), 120.0)
print(first == second, engine != first)
try:
    nodes_of(Resources(0.75, 0.0), 2.0)
except ConfigError as error:
    print(error)
"""
    names, together, told = printed_by(code, nodes).splitlines()
    assert names == "['learner-0 to learner-1', 'rollout-actor-0']"
    assert together == "True True"
    assert told.startswith("learner.shard_size: the cluster has the resources, but in 2 s")
    assert "0 GPU and 0.75 CPU, 0 GPU and 0.75 CPU, all on one node; " in told


def test_copies_do_not_take_the_node_of_a_larger_engine(nodes):
    """An engine that needs a whole node, and two copies that fit the other one."""
    code = """
from contextlib import ExitStack
from launch.processes.cluster import reserve
from launch.processes.placement import Placement, Resources
engine, rank = Resources(1.0, 0.0), Resources(0.25, 0.0)
with ExitStack() as ends:
    placement = Placement((engine,), (rank,) * 4, 4, None, None, shard_size=2)
    print(len(reserve(placement, 120.0, ends)))
"""
    assert printed_by(code, nodes).split() == ["5"]


ASKED = [
    f"ray_rollmatch_{name}" for name in ("loss", "phase_seconds", "tokens_per_s", "weight_version")
]
# Ray's public API for actors asks the dashboard, which these clusters do not have.
SEEN = """
import json, re, time
from contextlib import suppress
from urllib.request import urlopen
from ray._private import state
free = state.available_resources_per_node()
used = [cpus - free[node["NodeID"]].get("CPU", 0.0) for node in ray.nodes() if (cpus := node["Resources"].get("CPU", 0.0))]
names = [actor["Name"] for actor in state.actors().values() if actor["State"] == "ALIVE"]
ends = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in ray.nodes()]
deadline, metrics = time.monotonic() + 240, set()
while not metrics >= asked and time.monotonic() < deadline:  # every node publishes from time to time
    time.sleep(1.0)
    with suppress(OSError):  # an agent is still starting
        metrics = {name for end in ends for name in re.findall(r'^(ray_rollmatch_\\w+)\\{.*run="spread"', urlopen(end, timeout=240).read().decode(), re.M)}
print(json.dumps([used, names, sorted(metrics & asked)]))
"""


RETURNED = """
import time
deadline = time.monotonic() + 120
while ray.available_resources().get("CPU") != 2 and time.monotonic() < deadline:
    time.sleep(0.2)
print([node["Alive"] for node in ray.nodes()], ray.available_resources()["CPU"])
"""


def printed_by(code, nodes):
    """In a process of its own on that cluster: the tests' may be connected to the session's, and
    can be to one alone.
    """
    connect = (
        f"import ray\nray.init(address={nodes.address!r}, log_to_driver=False,"
        " logging_level='error')\n"
    )
    done = subprocess.run(
        [*warm_python.command(), "-c", connect + code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
