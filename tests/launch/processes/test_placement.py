"""What a run asks of a cluster, without one (too few resources; one GPU per actor and per learner
rank; transport by device).
"""

import re
from typing import Any

import pytest
from config_support import configuration, trajectory_config

from launch.checks.data import ImageNeeds
from launch.processes.cluster import runner_settings
from launch.processes.engine_settings import neighbour_env, settings_of_run
from launch.processes.fleet import RolloutTimeouts
from launch.processes.placement import Resources, plan_placement
from launch.processes.rollout_client import RankRolloutClient
from launch.processes.rounds import RoundSize
from rollout_actors.backends.colocate import colocate_tensor_parallel
from rollout_actors.engine.settings import engine_environment
from rollout_actors.warm import warm_python
from shared.config.algorithm import TeacherSection
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
ADDRESS = {"base_url": "http://127.0.0.1:1", "group_port": 0}
SERVER: dict[str, Any] = {
    "rollout_matching__vllm": {"mode": "server", "server": {"servers": [ADDRESS]}}
}
SIZED: dict[str, Any] = {"rollout_matching__vllm__kv_cache_memory_bytes": 2**26}
ACTORS = "rollout_matching__vllm__actors"


@pytest.fixture
def config(tmp_path):
    folders = (tmp_path / "model", tmp_path / "data", tmp_path / "run")
    return lambda **changes: configuration(*folders, **changes)


def gpus_of(placement):
    return Resources.sum(placement.bundles).gpus


def test_on_a_cluster_with_gpus_every_actor_and_the_learner_take_one(config):
    placement = plan_placement(config(), GPUS)
    assert [bundle.gpus for bundle in placement.bundles] == [1.0] * 4
    assert placement.transport == "nccl"


def test_without_gpus_they_share_the_cores_and_weights_travel_by_gloo(config):
    half = {"learner__cpus": 0.5, f"{ACTORS}__cpus_per_actor": 0.5}
    placement = plan_placement(config(**half), [Resources(cpus=2, gpus=0)])
    assert placement.bundles == [Resources(cpus=0.5, gpus=0)] * 4
    assert placement.transport == "rollmatch_gloo"


def test_a_tensor_parallel_engine_takes_a_gpu_per_device_and_on_cpu_a_core_per_device(config):
    tensor_parallel = config(**{f"{ACTORS}__tensor_parallel_size": 2})
    assert gpus_of(plan_placement(tensor_parallel, [Resources(cpus=16, gpus=8)])) == 7.0
    assert plan_placement(tensor_parallel, CPUS).engines[0] == Resources(cpus=2, gpus=0)


def test_every_learner_rank_has_a_place_of_its_own(config):
    run = config(learner__world_size=2, **{f"{ACTORS}__num_actors": 2})
    placement = plan_placement(run, GPUS)
    assert [bundle.gpus for bundle in placement.ranks] == [1.0, 1.0]
    assert gpus_of(placement) == 4.0


COPIES = {"learner__world_size": 4, "learner__parallel": "fsdp", "learner__shard_size": 2}


def test_each_copy_of_the_model_has_a_placement_group_that_stays_on_a_node(config):
    placement = plan_placement(config(**COPIES), GPUS * 2)
    copies = [("STRICT_PACK", range(3, 5)), ("STRICT_PACK", range(5, 7))]
    assert placement.groups == [*copies, ("PACK", range(3))]
    assert plan_placement(config(**COPIES, **COLOCATE), GPUS).groups == [
        ("STRICT_PACK", range(2)),
        ("STRICT_PACK", range(2, 4)),
    ]
    anywhere = plan_placement(config(**COPIES | {"learner__shard_size": None}), GPUS * 2)
    assert anywhere.groups == [("PACK", range(7))]


def test_copies_for_which_nodes_have_no_room_are_refused(config):
    nodes = [Resources(cpus=16, gpus=3)] * 3
    assert len(plan_placement(config(**COPIES), nodes).groups) == 3
    wide = COPIES | {"learner__world_size": 6, "learner__shard_size": 3}
    three = "the nodes of the cluster have room for 1 of the 2 copies"
    with pytest.raises(ConfigError, match=rf"learner\.shard_size: 3 ranks.*{three}"):
        plan_placement(config(**wide), [*nodes[:1], *[Resources(cpus=16, gpus=2)] * 3])
    tenths = COPIES | {"learner__world_size": 10, "learner__cpus": 0.1, **COLOCATE}
    assert len(plan_placement(config(**tenths), [Resources(cpus=1, gpus=0)]).groups) == 5


TWO_NODES = GPUS * 2
SPLIT = [Resources(cpus=32, gpus=0), Resources(cpus=4, gpus=4)]
SMALL = [Resources(cpus=2, gpus=0)] * 8
TP5 = {"rollout_matching__vllm": {"mode": "colocate", "tensor_parallel_size": 5}}
FIT = "has to fit one node, and the largest node of the cluster has"


@pytest.mark.parametrize(
    ("changes", "nodes", "key", "problem"),
    [
        (
            {f"{ACTORS}__tensor_parallel_size": 8},
            TWO_NODES,
            "tensor_parallel_size",
            f"8 GPU {FIT} 4",
        ),
        (
            {ACTORS: {"gpus_per_actor": 5, "tensor_parallel_size": 5}},
            TWO_NODES,
            "rollout_matching.vllm.actors.gpus_per_actor",
            f"an actor of 5 GPU {FIT} 4",
        ),
        (
            {f"{ACTORS}__cpus_per_actor": 17},
            TWO_NODES,
            "cpus_per_actor",
            f"an actor of 17 CPU {FIT}",
        ),
        ({"learner__gpus": 5}, TWO_NODES, "learner.gpus", f"5 GPU {FIT} 4; lower it, or join"),
        ({"learner__cpus": 17}, TWO_NODES, "learner.cpus", f"rank of 17 CPU {FIT} 16; lower it"),
        (NO_QUEUE | TP5, TWO_NODES, "rollout_matching.vllm.tensor_parallel_size", "is 5, "),
        (
            {**HF, "learner__cpus": 8},
            SPLIT,
            "learner.gpus",
            "1 GPU and 8 CPU has to fit one node, and no node of the cluster has both",
        ),
        ({f"{ACTORS}__tensor_parallel_size": 4}, SMALL, "tensor_parallel_size", f"4 CPU {FIT} 2"),
        (
            {"learner__gpus": 0.0},
            GPUS,
            "learner.gpus",
            "0 GPUs for the learner and 1 for each actor",
        ),
        (
            {**HF, "learner__world_size": 8},
            GPUS,
            "learner.world_size",
            "8 learner ranks of 1 need 8 GPU, but the cluster has 4; lower world_size, or learner.gpus",
        ),
    ],
)
def test_a_process_that_no_node_has_room_for_is_refused_by_the_key_that_makes_it_so_large(
    config, changes, nodes, key, problem
):
    with pytest.raises(ConfigError) as caught:
        plan_placement(config(**changes), nodes)
    (found,) = caught.value.problems
    assert found.partition(": ")[0].endswith(key)
    assert problem in found


def test_too_few_resources_say_what_was_asked_and_what_the_cluster_has(config):
    with pytest.raises(ConfigError) as caught:
        plan_placement(config(), [Resources(cpus=2, gpus=2)])
    gpu, cpu = caught.value.problems
    assert re.search(r"3 actors of 1 GPU .*learner of 1 .*4 GPU, .* 2; ", gpu)
    assert "lower num_actors" in gpu
    assert re.search(r" 4 CPU, .* 2; ", cpu)


@pytest.mark.parametrize(
    ("num_gpus", "changes", "is_enough"),
    [(1, {}, True), (3, {}, True), (1, {"learner__world_size": 2}, False)],
)
def test_on_a_machine_with_enough_gpus_for_the_learner_alone_the_engines_may_share_them(
    config, num_gpus, changes, is_enough
):
    nodes = [Resources(cpus=16, gpus=num_gpus)]
    with pytest.raises(ConfigError) as caught:
        plan_placement(config(**changes), nodes)
    (problem,) = caught.value.problems
    assert ("; set backend=colocate (engines share the learner's GPUs), lower" in problem) == (
        is_enough
    )
    if is_enough:
        placement = plan_placement(config(**changes, **COLOCATE), nodes)
        assert gpus_of(placement) <= num_gpus


@pytest.mark.parametrize(
    ("nodes", "ranks", "devices"),
    [
        ((8,), 1, 4),
        ((4,), 1, 4),
        ((3,), 1, 2),
        ((2,), 1, 2),
        ((1,), 1, 1),
        ((4,), 2, 2),
        ((4,), 4, 1),
        ((2, 2), 1, 2),
        ((2, 2), 2, 2),
        ((4, 4), 2, 4),
        ((1, 1), 1, 1),
        ((4, 1), 1, 4),
        ((4, 1), 2, 2),
    ],
)
def test_an_engine_beside_the_learner_spans_4_gpus_or_the_largest_of_2_and_1_that_its_rank_can_have(
    config, nodes, ranks, devices
):
    """Of one node (decision 22)."""
    run = config(**COLOCATE, learner__world_size=ranks)
    placement = plan_placement(run, [Resources(cpus=16, gpus=gpus) for gpus in nodes])
    assert (placement.engines, placement.devices_per_engine) == ((), devices)
    # A rank shares its weights with every device of its engine, and has all of them.
    assert placement.transport == "ipc"
    assert [rank.gpus for rank in placement.ranks] == [devices] * ranks


def test_an_engine_beside_a_learner_on_cpu_is_in_its_process(config):
    placement = plan_placement(config(**COLOCATE), CPUS)
    assert (placement.engines, placement.transport, placement.devices_per_engine) == (
        (),
        "inproc",
        1,
    )


@pytest.mark.parametrize(("asked", "gpus", "devices"), [(2, 8, 2), (None, 0, 1)])
def test_a_given_number_of_devices_is_kept(asked, gpus, devices):
    assert colocate_tensor_parallel(asked, gpus) == devices


@pytest.mark.parametrize(
    ("changes", "nodes", "gpus", "transport"),
    [
        pytest.param(HF, GPUS, 1.0, "inproc", id="transformers, on the learner's own devices"),
        pytest.param(SERVER, [Resources(cpus=1, gpus=1)], 1.0, "nccl", id="servers elsewhere"),
        pytest.param(SERVER, CPUS, 0.0, "rollmatch_gloo", id="servers, on CPU"),
    ],
)
def test_a_run_without_engines_of_its_own_places_the_learner_alone(
    config, changes, nodes, gpus, transport
):
    placement = plan_placement(config(**changes), nodes)
    assert (placement.engines, gpus_of(placement)) == ((), gpus)
    assert placement.transport == transport


def test_without_a_learner_only_actors_are_placed(config):
    placement = plan_placement(config(), GPUS, learns=False)
    assert placement.ranks == () and len(placement.engines) == 3


def settings_on_cpu(run, images=1):
    return settings_of_run(run, plan_placement(run, CPUS), ImageNeeds(images))


def test_an_engine_decodes_no_more_than_decode_batch_size_for_each_of_its_devices(config):
    settings = settings_on_cpu(config(**SIZED), images=2)
    assert (settings.max_num_seqs, settings.max_model_len) == (6, 2048)
    assert (settings.max_images_per_prompt, settings.device) == (2, Device.CPU)
    two = config(**SIZED, **{f"{ACTORS}__tensor_parallel_size": 2})
    assert settings_on_cpu(two).max_num_seqs == 12


@pytest.mark.parametrize("nodes", [CPUS, GPUS])
@pytest.mark.parametrize("is_set", [True, False])
def test_a_deterministic_run_asks_engines_on_gpus_for_kernels_that_ignore_the_batch(
    config, nodes, is_set
):
    changes = {"training__deterministic": True} if is_set else {}
    run = config(**SIZED, **changes)
    settings = settings_of_run(run, plan_placement(run, nodes), ImageNeeds())
    variable = engine_environment(settings).get("VLLM_BATCH_INVARIANT")
    assert variable == ("1" if is_set and nodes is GPUS else None)


@pytest.mark.parametrize(("changes", "fraction"), [(COLOCATE, 0.45), ({}, 0.85)])
def test_an_engine_beside_the_learner_leaves_it_more_than_half_of_the_memory(
    config, changes, fraction
):
    assert settings_on_cpu(config(**changes, **SIZED)).gpu_memory_utilization == fraction


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


@pytest.mark.parametrize(("infer_s", "generate_s"), [(30.0, 120.0), (None, None), (0.0, None)])
def test_a_wait_for_servers_that_ends_names_the_keys_that_bound_it(infer_s, generate_s):
    limits = {"timeout_s": 240.0, "infer_timeout_s": infer_s}
    section = ServerSection.model_validate({"servers": [ADDRESS], **limits})
    limits_of_run = TimeoutsSection(start_s=300.0)
    timeouts = RolloutTimeouts.for_servers(section, limits_of_run, watched=True)
    server = "rollout_matching.vllm.server"
    assert timeouts.stall == timeouts.join
    assert RolloutTimeouts.for_servers(section, limits_of_run, watched=False).stall is None
    assert timeouts.start == Timeout(540.0, f"{server}.timeout_s + timeouts.start_s")
    assert timeouts.join == Timeout(240.0, f"{server}.timeout_s")
    expected = generate_s and Timeout(generate_s, f"2 x {server}.infer_timeout_s + 60")
    assert timeouts.generate == expected


def test_a_wait_for_environments_is_longer_than_that_for_their_teacher_and_names_its_key():
    limits_of_run = TimeoutsSection(start_s=300.0)
    teacher = TeacherSection(base_url="http://h:1", model="m", timeout_s=100.0)
    timeouts = RolloutTimeouts.for_environments(limits_of_run, teacher)
    # Until it is up, and two tries to have its vocabulary.
    key = "timeouts.start_s + 3 x environment.teacher.timeout_s"
    assert timeouts.start == Timeout(600.0, key)
    assert "the teacher answers" in timeouts.start_check
    alone = RolloutTimeouts.for_environments(limits_of_run, None)
    assert alone.start == Timeout(300.0, "timeouts.start_s")


def test_ranks_that_generate_have_as_long_as_what_they_play_and_cut_whole_groups(tmp_path):
    beside = {"rollout_matching__rollout_backend": "hf", "timeouts": {"generate_s": 60.0}}
    run = trajectory_config(tmp_path, tmp_path, queue=False, **beside)
    limits = RolloutTimeouts.for_ranks(run.timeouts, run.environment)
    assert limits.generate == Timeout(120.0, "2 x timeouts.generate_s")
    samples = configuration(tmp_path, tmp_path, tmp_path, **beside, **NO_QUEUE)
    assert RolloutTimeouts.for_ranks(samples.timeouts, None).generate == Timeout(
        60.0, "timeouts.generate_s"
    )
    ranks = RankRolloutClient(
        None, limits, RoundSize(9, learner_ranks=2, group_size=4), devices_per_rank=1
    )
    # Requests are groups: of 9 rollouts that a rank decodes at a time two are whole.
    rounds = ranks.split([list("abcde"), list("fgh")])
    assert rounds == [[["a", "b"], ["f"]], [["c", "d"], ["g"]], [["e"], ["h"]]]


@pytest.mark.parametrize(
    ("actors", "devices", "shares"),
    [(1, [1, 1], [7]), (3, [1, 1], [3, 2, 2]), (7, [1], [1] * 7), (3, [4, 2], [5, 5, 4])],
)
def test_environment_actors_together_ask_an_engine_for_as_many_rollouts_as_it_decodes(
    tmp_path, actors, devices, shares
):
    changes = {
        "environment__num_actors": actors,
        "rollout_matching__decode_batch_size": 7,
        "environment__rollout_timeout_s": 60.0,
        "environment__scoring_timeout_s": 5.0,
        "environment__teacher": {"base_url": "http://127.0.0.1:9/", "model": "m", "timeout_s": 7.0},
    }
    config = trajectory_config(tmp_path / "model", tmp_path / "run", **changes)
    settings = [
        runner_settings(config, config.environment, devices, ExampleCounts(6, 3), index)
        for index in range(actors)
    ]
    assert [one.max_under_way for one in settings] == shares
    assert {(one.rollout_timeout_s, one.scoring_timeout_s) for one in settings} == {(60.0, 5.0)}
    teachers = {one.teacher for one in settings}
    assert [(one.model, one.address.base_url, one.address.timeout_s) for one in teachers] == [
        ("m", "http://127.0.0.1:9", 7.0)
    ]
