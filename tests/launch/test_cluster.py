"""What a run asks of a cluster, without one (issue 2: too few resources; one GPU per actor and one for the learner)."""

import pytest
from config_support import configuration

from launch.cluster import engine_settings, plan_placement
from rollout_actors.engine_settings import Device
from shared.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    return lambda **changes: configuration(tmp_path / "model", tmp_path / "data", tmp_path / "run", **changes)


def test_on_a_cluster_with_gpus_every_actor_and_the_learner_take_one(config):
    placement = plan_placement(config(), {"GPU": 4.0, "CPU": 16.0})
    assert [bundle["GPU"] for bundle in placement.bundles] == [1.0] * 4
    assert placement.transport == "nccl"


def test_without_gpus_they_share_the_cores_and_weights_travel_by_gloo(config):
    half = {"learner__cpus": 0.5, "rollout_matching__vllm__actors__cpus_per_actor": 0.5}
    placement = plan_placement(config(**half), {"CPU": 2.0})
    assert placement.bundles == [{"GPU": 0.0, "CPU": 0.5}] * 4
    assert placement.transport == "rollmatch_gloo"


def test_a_tensor_parallel_engine_takes_a_gpu_per_device(config):
    placement = plan_placement(config(rollout_matching__vllm__actors__tensor_parallel_size=2), {"GPU": 8.0, "CPU": 16.0})
    assert placement.total("GPU") == 7.0


def test_too_few_resources_say_what_was_asked_and_what_there_is(config):
    with pytest.raises(ConfigError) as caught:
        plan_placement(config(), {"GPU": 2.0, "CPU": 2.0})
    gpu, cpu = caught.value.problems
    assert "3 actors of 1 GPU and a learner of 1 ask for 4 GPU, the cluster has 2" in gpu
    assert "ask for 4 CPU, the cluster has 2" in cpu
    assert "lower num_actors" in gpu


def test_gpus_on_one_side_of_the_sync_only_are_refused(config):
    with pytest.raises(ConfigError, match=r"learner\.gpus: 0 GPUs for the learner and 1 for each actor"):
        plan_placement(config(learner__gpus=0.0), {"GPU": 4.0, "CPU": 16.0})


def test_an_engine_decodes_no_more_than_decode_batch_size_at_a_time(config):
    settings = engine_settings(config(), Device.CPU, "rollmatch_gloo", max_images=2)
    assert settings.max_num_seqs == 6
    assert settings.max_model_len == 2048
    assert settings.max_images_per_prompt == 2
