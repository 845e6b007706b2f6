"""What an engine is started with for adapters, and which of vLLM's bounds the configuration keeps
to.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from config_support import trajectory_config
from engine_support import noise_image, small_settings
from tiny_qwen import make_stock_model
from transformers import PreTrainedConfig

from launch.checks.data import ImageNeeds
from launch.processes.engine_settings import settings_of_run
from launch.processes.placement import Resources, plan_placement
from learner.model.loading import load_tokens
from learner.segments import PromptEncoder, decode_image
from rollout_actors.engine.settings import (
    EngineSettings,
    engine_arguments,
    engine_environment,
    engine_runtime_env,
    neighbour_runtime_env,
)
from rollout_actors.warm import warm_python
from shared.config.checks.engines import MAX_VLLM_BEAMS
from shared.prompts import Prompts
from shared.records import Sample
from shared.rollouts import MAX_TEMPERATURE
from shared.weight_sync.offer import LORA_RANKS
from shared.weight_sync.transports import Device


def settings_of(**changes: Any) -> EngineSettings:
    return small_settings(Path("model"), **changes)


@pytest.mark.parametrize(
    ("rank", "room"), [(1, 1), (4, 8), (8, 8), (9, 16), (64, 64), (300, 320), (512, 512)]
)
def test_an_adapter_takes_the_room_of_the_next_rank_that_vllm_knows(rank: int, room: int) -> None:
    arguments = engine_arguments(settings_of(enable_lora=True, max_lora_rank=rank))
    expected = {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
    assert expected.items() <= arguments.items()
    without = engine_arguments(settings_of(max_lora_rank=rank))
    assert {name: arguments[name] for name in arguments.keys() - without} == expected


def test_vllm_is_told_to_compute_logits_in_float32_by_the_override_that_it_knows() -> None:
    assert "hf_overrides" not in engine_arguments(settings_of())
    arguments = engine_arguments(settings_of(dtype="bfloat16", head_dtype="float32"))
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}


@pytest.mark.engine
def test_vllm_reads_the_type_of_logits_from_the_override() -> None:
    import torch
    from vllm.config.model import _get_head_dtype

    overrides = {"head_dtype": "float32"}
    for given, expected in ((overrides, torch.float32), ({}, torch.bfloat16)):
        config = PreTrainedConfig(**given)
        found = _get_head_dtype(config=config, dtype=torch.bfloat16, runner_type="generate")
        assert found is expected


@pytest.mark.parametrize(("cache_bytes", "demanded"), [(None, 0.45), (1 << 30, 0.01)])
def test_where_the_bytes_of_the_cache_are_given_vllm_demands_no_fraction_of_the_device(
    cache_bytes: int | None, demanded: float
) -> None:
    """It would refuse a GPU with less than that free, which the learner beside it may have
    taken."""
    arguments = engine_arguments(
        settings_of(kv_cache_memory_bytes=cache_bytes, gpu_memory_utilization=0.45)
    )
    assert arguments["kv_cache_memory_bytes"] == cache_bytes
    assert arguments["gpu_memory_utilization"] == demanded


def test_engines_on_cpu_and_their_neighbours_are_forked_from_a_server_with_an_engines_variables() -> (
    None
):
    settings = settings_of()
    of_engine = engine_environment(settings)
    server = {
        warm_python.FOLDER: warm_python.run_folder(),
        warm_python.VARIABLES: json.dumps(of_engine),
    }
    for runtime_env, variables in (
        (engine_runtime_env(settings, PLACE="here"), of_engine),
        (neighbour_runtime_env(settings, PLACE="here"), {}),
    ):
        assert runtime_env == {
            "env_vars": variables | {"PLACE": "here"} | server,
            "py_executable": shlex.join(warm_python.command()),
        }


@pytest.mark.parametrize("changes", [{"device": Device.CUDA}, {"tensor_parallel_size": 2}])
def test_beside_engines_that_cannot_be_forked_an_actor_gets_its_own_variables_alone(
    changes: dict[str, Any],
) -> None:
    settings = settings_of(**changes)
    variables = {"PLACE": "here"}
    assert neighbour_runtime_env(settings, **variables) == {"env_vars": variables}
    of_engine = engine_environment(settings) | variables
    assert engine_runtime_env(settings, **variables) == {"env_vars": of_engine}


ON_EVERY_DEVICE = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_PLUGINS": "rollmatch",
    "GLOO_SOCKET_IFNAME": "lo",
}
ON_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@pytest.mark.parametrize(
    ("device", "dtype", "precision", "expected"),
    [
        (Device.CUDA, "float32", "ieee", ON_EVERY_DEVICE),
        (Device.CUDA, "bfloat16", None, ON_EVERY_DEVICE),
        (Device.CPU, "float32", None, ON_EVERY_DEVICE | ON_ONE_THREAD),
    ],
)
def test_an_engine_in_float32_on_a_gpu_has_triton_multiply_in_float32_and_one_on_cpu_has_one_thread(
    device: Device, dtype: str, precision: str | None, expected: dict[str, str]
) -> None:
    """On every device its processes are started anew, and load no foreign plugin."""
    environment = engine_environment(settings_of(device=device, dtype=dtype))
    assert environment.get("TRITON_F32_DEFAULT") == precision
    assert expected.items() <= environment.items()


def test_triton_knows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert knobs.language.fp32_default == "ieee"


@pytest.mark.engine
def test_the_ranks_are_vllms_own() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == LORA_RANKS


def test_an_engine_on_cpu_reads_no_prompt_in_two_steps() -> None:
    """vLLM sets back the generator of such a request, which a seeded one on CPU does not
    survive."""
    assert engine_arguments(settings_of(device=Device.CPU))["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in engine_arguments(settings_of(device=Device.CUDA))


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "expected"),
    [(64, 4096, 8192), (4, 512, 2048), (10_000, 4096, 10_000)],
    ids=["the usual number", "as many as there can be", "one for each sequence"],
)
def test_an_engine_on_a_gpu_reads_8192_tokens_in_a_step_if_so_many_can_be_there(
    max_num_seqs: int, max_model_len: int, expected: int
) -> None:
    sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    on_gpu = engine_arguments(settings_of(device=Device.CUDA, **sizes))
    assert on_gpu["max_num_batched_tokens"] == expected
    assert "max_num_batched_tokens" not in engine_arguments(settings_of(**sizes))


def test_blocks_of_32_tokens_are_shared_on_cpu_and_vllm_chooses_their_size_on_a_gpu():
    assert engine_arguments(settings_of(device=Device.CPU))["block_size"] == 32
    assert "block_size" not in engine_arguments(settings_of(device=Device.CUDA))


@pytest.mark.parametrize(("kind", "cuts"), [("internvl", True), ("qwen3_vl", False)])
def test_an_engine_is_told_where_a_processor_cuts_tiles(
    tmp_path: Path, kind: str, cuts: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    expected = {"crop_to_patches": True} if cuts else None
    assert engine_arguments(small_settings(tmp_path)).get("mm_processor_kwargs") == expected


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "most", "grid"), [("qwen3_vl", 9216, [1, 8, 14]), ("internvl", 5000, [3, 2, 2])]
)
def test_a_limit_of_pixels_gives_engine_and_learner_the_same_prompt(
    tmp_path: Path, family: str, most: int, grid: list[int]
) -> None:
    """By vLLM's processor with an engine's arguments."""
    from vllm import AsyncEngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    folder = make_stock_model(tmp_path / family, family)
    config = trajectory_config(folder, tmp_path, data__max_pixels=most)
    processor = load_tokens(config).processor
    sample = Sample("one", (noise_image(0, 230, 150),), 230, 150, ())
    encoder = PromptEncoder(processor, Prompts())
    expected = encoder.encode(sample)
    assert expected.image_grid_I3.tolist() == [grid]
    assert encoder.num_tokens(sample) == len(expected.token_ids)
    settings = settings_of_run(config, plan_placement(config, [Resources(8, 0)]), ImageNeeds())
    arguments = engine_arguments(settings)["mm_processor_kwargs"]
    engine = MULTIMODAL_REGISTRY.create_processor(
        AsyncEngineArgs(model=str(folder), mm_processor_kwargs=arguments).create_model_config()
    )
    image = {"image": [decode_image(sample.images[0])]}
    token_ids = processor.tokenizer(encoder.text(sample), add_special_tokens=False).input_ids
    prompt = engine(token_ids, engine.info.parse_mm_data(image))
    assert tuple(prompt["prompt_token_ids"]) == expected.token_ids


@pytest.mark.parametrize(("kind", "keeps"), [("qwen3_vl", True), ("qwen3_5", False)])
def test_states_of_prefixes_are_not_kept_on_cpu_where_vllm_wants_chunked_prefill_for_them(
    tmp_path: Path, kind: str, keeps: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    on_cpu = engine_arguments(small_settings(tmp_path))
    assert ("enable_prefix_caching" not in on_cpu) == keeps
    assert on_cpu.get("enable_prefix_caching", True) == keeps
    on_gpu = engine_arguments(small_settings(tmp_path, device=Device.CUDA))
    assert "enable_prefix_caching" not in on_gpu


@pytest.mark.engine
def test_the_highest_temperature_is_vllms_own() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    SamplingParams(temperature=MAX_TEMPERATURE)
    with pytest.raises(VLLMValidationError, match="temperature must be in"):
        SamplingParams(temperature=MAX_TEMPERATURE + 1e-6)


@pytest.mark.engine
def test_as_many_beams_are_permitted_as_vllms_search_gets_log_probabilities_for() -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert "max_logprobs" not in engine_arguments(settings_of())
    assert EngineArgs.max_logprobs == 2 * MAX_VLLM_BEAMS
