"""The command line of `rollmatch serve`: every problem at once, with what to do."""

from __future__ import annotations

import re
import shlex
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from launch.cli import CONF, as_mapping, read_arguments
from launch.tools import serve
from launch.tools.serve import ServeOptions, settings_of
from rollout_actors.backends.rollmatch_server import serve_arguments, serve_command
from rollout_actors.engine.settings import EngineSettings
from shared.config import load_config
from shared.errors import ConfigError
from shared.weight_sync.transports import Device

ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_vl"}')
    return folder


def settings(*arguments: str) -> EngineSettings:
    return settings_of(read_arguments(ServeOptions, arguments))


def printed_commands() -> list[tuple[str, ...]]:
    """The arguments of every server that README and docs start, without the model."""
    commands = set()
    names = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text().replace("\\\n", " ")
        for command in re.findall(r"rollmatch serve (model=[^&`]+)&", text):
            names.append(page.name)
            words = [re.sub(r"\$\w+", "1", word) for word in shlex.split(command)]
            commands.add(tuple(word for word in words if not word.startswith("model=")))
    assert "servers.md" in names
    return sorted(commands)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", printed_commands(), ids=len)
def test_every_server_of_the_readme_and_the_docs_suits_the_run_beside_it(
    arguments: tuple[str, ...], model: Path
) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        run = load_config(as_mapping(compose("train", overrides=["+experiment=stage2_server"])))
    started = settings(f"model={model}", *arguments)
    assert (started.dtype, started.max_model_len) == (run.model.dtype, run.global_max_length)
    assert started.max_num_seqs >= run.rollout_matching.decode_batch_size


def problems(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        settings(*arguments)
    return caught.value.problems


@pytest.mark.parametrize(
    ("device", "transport", "other"),
    [(Device.CPU, "rollmatch_gloo", "nccl"), (Device.CUDA, "nccl", "rollmatch_gloo")],
)
def test_a_model_is_enough_and_the_device_decides_the_transport(
    model: Path, device: Device, transport: str, other: str
) -> None:
    options = read_arguments(ServeOptions, [f"model={model}"])
    assert (options.host, options.port, options.token_env) == ("127.0.0.1", 8000, None)
    chosen = (f"model={model}", f"device={device}")
    started = settings(*chosen)
    assert (started.model_path, started.device) == (str(model), device)
    assert (started.transport, started.repeat_guard) == (transport, None)
    (problem,) = problems(*chosen, f"transport={other}")
    assert problem.startswith(f"transport: {other} ")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org"])
def test_other_machines_need_a_token(
    model: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = problems(f"model={model}", f"host={host}")
    assert problem.startswith(f"host: {host} lets other machines")
    assert "token_env" in problem
    monkeypatch.setenv("SERVE_TEST_TOKEN", "x")
    settings(f"model={model}", f"host={host}", "token_env=SERVE_TEST_TOKEN")


ON_CPU = {
    "device": Device.CPU,
    "transport": "rollmatch_gloo",
    "kv_cache_memory_bytes": 1 << 20,
    "enforce_eager": False,
}
OF_ADAPTERS = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "tensor_parallel_size": 2,
}
OF_HEAD = {"head_dtype": "float32"}
OF_IMAGES = {"max_images_per_prompt": 3, "max_pixels": 9216}


@pytest.mark.parametrize("changes", [{}, ON_CPU, OF_ADAPTERS, OF_IMAGES, OF_HEAD])
def test_the_command_that_a_client_names_starts_the_engine_that_its_run_expects(
    model: Path, changes: dict[str, Any]
) -> None:
    fields = {
        "dtype": "float16",
        "max_model_len": 99,
        "max_num_seqs": 9,
        "seed": 4,
        "transport": "nccl",
        "device": Device.CUDA,
        "gpu_memory_utilization": 0.85,
    }
    expected = EngineSettings(model_path=str(model), **fields | changes)
    assert settings(*serve_arguments(expected, port=8001)) == expected
    rollmatch, command, *arguments = shlex.split(serve_command(expected, "http://10.0.0.1:8001"))
    assert (rollmatch, command) == ("rollmatch", "serve")
    assert read_arguments(ServeOptions, arguments).port == 8001


def test_the_command_for_a_run_without_images_is_one_that_the_server_takes(model: Path) -> None:
    """With room that a text model does not need."""
    expected = replace(settings(f"model={model}", "device=cpu"), max_images_per_prompt=0)
    started = settings(*serve_arguments(expected, port=8001))
    assert started == replace(expected, max_images_per_prompt=1)


def test_every_problem_is_said_at_once(tmp_path: Path) -> None:
    wrong = [
        f"model={tmp_path}",
        "host=0.0.0.0",
        "device=cpu",
        "transport=nccl",
        f"image_root={tmp_path}/nope",
        "enable_lora=true",
        "max_lora_rank=4096",
    ]
    keys = {"model", "host", "transport", "image_root", "max_lora_rank"}
    assert {problem.partition(":")[0] for problem in problems(*wrong)} == keys
    both = "token: `none` contradicts token_env=NOT_THERE; remove one of them"
    assert both in problems(f"model={tmp_path}", "token_env=NOT_THERE", "token=none")
    unset = "token_env: the environment variable NOT_THERE is not set"
    assert problems(f"model={tmp_path}", "token_env=NOT_THERE")[-1].startswith(unset)


def test_what_vllm_does_not_do_with_a_family_is_said_before_anything_is_loaded(tmp_path) -> None:
    config = tmp_path / "config.json"
    words = (f"model={tmp_path}", "device=cpu")
    config.write_text('{"model_type": "qwen3_5"}')
    with pytest.raises(ConfigError, match=r"^dtype: float32, .*linear.* bfloat16"):
        settings(*words, "dtype=float32")
    assert settings(*words, "dtype=bfloat16").dtype == "bfloat16"
    config.write_text('{"model_type": "qwen3_vl_moe"}')
    with pytest.raises(ConfigError, match=r"^enable_lora: vLLM 0.32 serves adapters"):
        settings(*words, "enable_lora=true")


@pytest.mark.slow
def test_a_port_that_is_taken_is_known_before_anything_is_loaded(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            serve.main([f"model={model}", f"port={port}"])
    assert ended.value.code == 2
    assert f"port: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
