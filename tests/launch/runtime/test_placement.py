"""What a run asks of a cluster, without one (too few resources; one GPU per actor and per learner
rank; transport by device).
"""

from typing import Any

import pytest
import ray
from config_support import configuration, trajectory_config

from launch.checks.data import ImageNeeds
from launch.cluster import here, runner_settings
from launch.runtime.engine_settings import neighbour_env, settings_of_run
from launch.runtime.placement import Resources, plan_placement
from launch.runtime.rollout_client import RolloutTimeouts
from rollout_actors.backends.colocate import colocate_tensor_parallel
from rollout_actors.engine import warm_python
from shared.config.job import TimeoutsSection
from shared.config.rollout import ServerSection
from shared.errors import ConfigError, Timeout
from shared.trajectory import ExampleCounts
from shared.weight_sync.transports import Device

GPUS = [Resources(cpus=16, gpus=4)]
CPUS = [Resources(cpus=16, gpus=0)]
NO_QUEUE = {"stage2_ab__channel_b__enable_pipeline": False}
COLOCATE = {**NO_QUEUE, "rollout_matching__vllm": {"mode": "colocate"}}
HF = {**NO_QUEUE, "rollout_matching__rollout_backend": "hf"}
SERVER: dict[str, Any] = {
    "rollout_matching__vllm": {
        "mode": "server",
        "server": {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 0}]},
    }
}


SIZED: dict[str, Any] = {"rollout_matching__vllm__kv_cache_memory_bytes": 2**26}


@pytest.fixture
def config(tmp_path):
    return lambda **changes: configuration(
        tmp_path / "model", tmp_path / "data", tmp_path / "run", **changes
    )


def gpus_of(placement):
    return Resources.sum(placement.bundles).gpus


def test_on_a_cluster_with_gpus_every_actor_and_the_learner_take_one(config):
    placement = plan_placement(config(), GPUS)
    assert [bundle.gpus for bundle in placement.bundles] == [1.0] * 4
    assert placement.transport == "nccl"


def test_without_gpus_they_share_the_cores_and_weights_travel_by_gloo(config):
    half = {"learner__cpus": 0.5, "rollout_matching__vllm__actors__cpus_per_actor": 0.5}
    placement = plan_placement(config(**half), [Resources(cpus=2, gpus=0)])
    assert placement.bundles == [Resources(cpus=0.5, gpus=0)] * 4
    assert placement.transport == "rollmatch_gloo"


def test_a_tensor_parallel_engine_takes_a_gpu_per_device_and_on_cpu_a_core_per_device(config):
    tensor_parallel = config(rollout_matching__vllm__actors__tensor_parallel_size=2)
    assert gpus_of(plan_placement(tensor_parallel, [Resources(cpus=16, gpus=8)])) == 7.0
    assert plan_placement(tensor_parallel, CPUS).engines[0] == Resources(cpus=2, gpus=0)


def test_every_learner_rank_has_a_place_of_its_own(config):
    placement = plan_placement(
        config(learner__world_size=2, rollout_matching__vllm__actors__num_actors=2), GPUS
    )
    assert [bundle.gpus for bundle in placement.ranks] == [1.0, 1.0]
    assert gpus_of(placement) == 4.0


def test_too_few_resources_say_what_was_asked_and_what_there_is(config):
    with pytest.raises(ConfigError) as caught:
        plan_placement(config(), [Resources(cpus=2, gpus=2)])
    gpu, cpu = caught.value.problems
    assert "3 actors of 1 GPU and a learner of 1 ask for 4 GPU, the cluster has 2" in gpu
    assert "ask for 4 CPU, the cluster has 2" in cpu
    assert "lower num_actors" in gpu
    with pytest.raises(
        ConfigError,
        match=(
            r"learner\.world_size: 8 learner ranks of 1 ask for 8 GPU, the cluster has 4; lower"
            r" world_size, or learner\.gpus"
        ),
    ):
        plan_placement(config(**HF, learner__world_size=8), GPUS)


def test_a_process_that_no_node_has_room_for_is_refused_by_the_key_that_makes_it_so_large(config):
    two_nodes = [Resources(cpus=16, gpus=4)] * 2
    for changes, problem in (
        (
            {"rollout_matching__vllm__actors__tensor_parallel_size": 8},
            "rollout_matching.vllm.actors.tensor_parallel_size: an actor of 8 GPU has to fit one",
        ),
        (
            {"rollout_matching__vllm__actors": {"gpus_per_actor": 5, "tensor_parallel_size": 5}},
            "rollout_matching.vllm.actors.gpus_per_actor: an actor of 5 GPU has to fit one node",
        ),
        (
            {"rollout_matching__vllm__actors__cpus_per_actor": 17},
            "rollout_matching.vllm.actors.cpus_per_actor: an actor of 17 CPU has to fit one node",
        ),
        (
            {"learner__gpus": 5},
            (
                "learner.gpus: a learner rank of 5 GPU has to fit one node, and the largest node of"
                " the cluster has 4; lower it, or join"
            ),
        ),
        (
            {"learner__cpus": 17},
            (
                "learner.cpus: a learner rank of 17 CPU has to fit one node, and the largest node"
                " of the cluster has 16; lower it"
            ),
        ),
        (
            {**COLOCATE, "rollout_matching__vllm": {"mode": "colocate", "tensor_parallel_size": 5}},
            "rollout_matching.vllm.tensor_parallel_size: an engine of 5",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            plan_placement(config(**changes), two_nodes)
        (told,) = caught.value.problems
        assert told.startswith(problem)
    many_cores = [Resources(cpus=32, gpus=0), Resources(cpus=4, gpus=4)]
    with pytest.raises(
        ConfigError,
        match=(
            r"learner\.gpus: a learner rank of 1 GPU and 8 CPU has to fit one node, and no node of"
            r" the cluster has both"
        ),
    ):
        plan_placement(config(**HF, learner__cpus=8), many_cores)


def test_on_cpu_a_tensor_parallel_engine_is_as_many_cores_of_one_node(config):
    with pytest.raises(
        ConfigError,
        match=(
            r"actors\.tensor_parallel_size: an actor of 4 CPU has to fit one node, and the largest"
            r" node of the cluster has 2"
        ),
    ):
        plan_placement(
            config(rollout_matching__vllm__actors__tensor_parallel_size=4),
            [Resources(cpus=2, gpus=0)] * 8,
        )


def test_gpus_on_one_side_of_the_sync_only_are_refused(config):
    with pytest.raises(
        ConfigError, match=r"learner\.gpus: 0 GPUs for the learner and 1 for each actor"
    ):
        plan_placement(config(learner__gpus=0.0), GPUS)


def test_an_engine_beside_the_learner_shares_its_gpu_or_on_cpu_its_process(config):
    on_gpus = plan_placement(config(**COLOCATE), [Resources(cpus=4, gpus=1)])
    assert (on_gpus.engines, on_gpus.transport, on_gpus.devices_per_engine, gpus_of(on_gpus)) == (
        (),
        "ipc",
        1,
        1.0,
    )
    on_cpus = plan_placement(config(**COLOCATE), CPUS)
    assert (on_cpus.engines, on_cpus.transport, on_cpus.devices_per_engine) == ((), "inproc", 1)


@pytest.mark.parametrize(
    ("gpus", "ranks", "devices"),
    [(8, 1, 4), (4, 1, 4), (3, 1, 2), (2, 1, 2), (1, 1, 1), (4, 2, 2), (4, 4, 1)],
)
def test_an_engine_beside_the_learner_spans_4_gpus_or_the_largest_of_2_and_1_that_its_rank_can_have(
    config, gpus, ranks, devices
):
    """Decision 22."""
    placement = plan_placement(
        config(**COLOCATE, learner__world_size=ranks), [Resources(cpus=16, gpus=gpus)]
    )
    assert placement.devices_per_engine == devices
    assert placement.transport == "ipc", (
        "a rank shares its weights with every device of its engine, and has all of them:"
    )
    assert all(rank.gpus == devices for rank in placement.ranks)


@pytest.mark.parametrize(
    ("nodes", "ranks", "devices"),
    [
        ((2, 2), 1, 2),
        ((2, 2), 2, 2),
        ((4, 4), 2, 4),
        ((1, 1), 1, 1),
        ((4, 1), 1, 4),
        ((4, 1), 2, 2),
    ],
)
def test_an_engine_beside_the_learner_spans_the_gpus_of_one_node(config, nodes, ranks, devices):
    cluster = [Resources(cpus=16, gpus=gpus) for gpus in nodes]
    assert (
        plan_placement(config(**COLOCATE, learner__world_size=ranks), cluster).devices_per_engine
        == devices
    )


def test_a_given_number_of_devices_is_kept():
    assert colocate_tensor_parallel(2, 8) == 2
    assert colocate_tensor_parallel(None, 0) == 1


def test_transformers_generates_on_the_learners_own_devices(config):
    placement = plan_placement(config(**HF), GPUS)
    assert (placement.engines, gpus_of(placement)) == ((), 1.0)


def test_servers_take_nothing_of_the_cluster(config):
    placement = plan_placement(config(**SERVER), [Resources(cpus=1, gpus=1)])
    assert placement.engines == () and gpus_of(placement) == 1.0
    assert placement.transport == "nccl"
    assert plan_placement(config(**SERVER), CPUS).transport == "rollmatch_gloo"


def test_without_a_learner_only_actors_are_placed(config):
    placement = plan_placement(config(), GPUS, learns=False)
    assert placement.ranks == () and len(placement.engines) == 3


def test_an_engine_decodes_no_more_than_decode_batch_size_for_each_of_its_devices(config):
    settings = settings_of_run(config(**SIZED), plan_placement(config(), CPUS), ImageNeeds(2))
    assert (
        settings.max_num_seqs,
        settings.max_model_len,
        settings.max_images_per_prompt,
        settings.device,
    ) == (6, 2048, 2, Device.CPU)
    tensor_parallel = config(**SIZED, rollout_matching__vllm__actors__tensor_parallel_size=2)
    assert (
        settings_of_run(
            tensor_parallel, plan_placement(tensor_parallel, CPUS), ImageNeeds()
        ).max_num_seqs
        == 12
    )


def test_an_engine_beside_the_learner_leaves_it_more_than_half_of_the_memory(config):
    colocated = config(**COLOCATE, **SIZED)
    assert (
        settings_of_run(
            colocated, plan_placement(colocated, CPUS), ImageNeeds()
        ).gpu_memory_utilization
        == 0.45
    )
    assert (
        settings_of_run(
            config(**SIZED), plan_placement(config(), CPUS), ImageNeeds()
        ).gpu_memory_utilization
        == 0.85
    )


@pytest.mark.parametrize(
    ("changes", "nodes", "folder", "forked"),
    [
        ({}, CPUS, None, True),
        (HF, CPUS, None, False),
        (HF, CPUS, "/tmp/warm", True),
        (SERVER, CPUS, None, False),
        ({}, GPUS, "/tmp/warm", False),
    ],
)
def test_a_learner_on_cpu_is_forked_where_engines_of_its_run_are_or_a_warm_server_is_there(
    config, monkeypatch, changes, nodes, folder, forked
):
    monkeypatch.delenv(warm_python.FOLDER)
    if folder is not None:
        monkeypatch.setenv(warm_python.FOLDER, folder)
    run = config(**SIZED, **changes)
    environment = neighbour_env(run, plan_placement(run, nodes), ImageNeeds(), PLACE="here")
    assert ("py_executable" in environment) is forked
    assert environment["env_vars"].items() >= {"PLACE": "here", "HF_HUB_OFFLINE": "1"}.items()


@pytest.mark.ray
def test_what_reaches_a_server_runs_on_the_driver_s_node_and_no_other(ray_cluster):
    """There its address means what it means to preflight: 127.0.0.1 is another machine on every
    node.
    """
    where = here()
    assert (where.node_id, where.soft) == (ray.get_runtime_context().get_node_id(), False)


@pytest.mark.parametrize(("given", "seconds"), [(30.0, 120.0), (None, None), (0.0, None)])
def test_a_wait_for_servers_that_ends_names_the_keys_that_bound_it(given, seconds):
    servers = ({"base_url": "http://127.0.0.1:8000", "group_port": 0},)
    section = ServerSection.model_validate(
        {"servers": servers, "timeout_s": 240.0, "infer_timeout_s": given}
    )
    timeouts = RolloutTimeouts.for_servers(section, TimeoutsSection(start_s=300.0))
    assert timeouts.start == Timeout(
        540.0, "rollout_matching.vllm.server.timeout_s + timeouts.start_s"
    )
    assert timeouts.join == Timeout(240.0, "rollout_matching.vllm.server.timeout_s")
    assert timeouts.generate == (
        None
        if seconds is None
        else Timeout(seconds, "2 x rollout_matching.vllm.server.infer_timeout_s + 60")
    )


@pytest.mark.parametrize(
    ("actors", "devices", "shares"),
    [(1, [1, 1], [7]), (3, [1, 1], [3, 2, 2]), (7, [1], [1] * 7), (3, [4, 2], [5, 5, 4])],
)
def test_environment_actors_together_ask_an_engine_for_as_many_rollouts_as_it_decodes(
    tmp_path, actors, devices, shares
):
    changes = {"environment__num_actors": actors, "rollout_matching__decode_batch_size": 7}
    config = trajectory_config(tmp_path / "model", tmp_path / "run", **changes)
    made = [
        runner_settings(config, config.environment, devices, ExampleCounts(6, 3), index)
        for index in range(actors)
    ]
    assert [settings.max_under_way for settings in made] == shares


def test_environment_actors_keep_the_limits_of_time_of_their_section(tmp_path):
    limits = {"environment__rollout_timeout_s": 60.0, "environment__scoring_timeout_s": 5.0}
    config = trajectory_config(tmp_path / "model", tmp_path / "run", **limits)
    settings = runner_settings(config, config.environment, [1], ExampleCounts(6, 3), 0)
    assert (settings.rollout_timeout_s, settings.scoring_timeout_s) == (60.0, 5.0)
