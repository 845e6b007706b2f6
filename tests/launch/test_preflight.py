"""`rollmatch preflight`: every problem with its remedy at once, and what goes where, without
starting an engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from config_support import configuration, trajectory_config
from fake_server import ObedientEngine, make_service, make_settings, serving, serving_engine
from fake_stock_server import StockServer
from fake_teacher import FakeTeacher
from forked_programs import ran
from PIL import Image
from tiny_qwen import make_stock_model
from transformers import AutoTokenizer

from launch.checks.host import path_problems
from launch.checks.learner_memory import learner_estimate
from launch.checks.memory import DeviceMemory, engine_estimate, shared_device_estimate
from launch.checks.model_shape import ModelShape, RunSizes
from launch.checks.preflight import preflight
from launch.checks.servers import (
    ask_servers,
    port_problems,
    teacher_problems,
)
from launch.loggers import sink
from launch.processes.placement import Resources
from learner.data.samples import load_samples
from rollout_actors.environments.training.teacher import MODELS
from rollout_actors.server.app import make_app
from shared.config.pipeline import EXAMPLE_PIPELINE
from shared.weight_sync.transports import Device, TransportKind

SOUND = {
    "global_max_length": 512,
    "rollout_matching__max_new_tokens": 96,
    "learner__cpus": 0.25,
    "rollout_matching__vllm__actors": {"num_actors": 3, "cpus_per_actor": 0.25},
    "rollout_matching__vllm__kv_cache_memory_bytes": 2**26,
}
NO_QUEUE = {"stage2_ab__channel_b__enable_pipeline": False}
CPU_NODE = {"nodes_of": lambda *_: [Resources(cpus=16, gpus=0)], "memory_of": lambda _: None}
NOWHERE = "http://127.0.0.1:9"
SERVER = "rollout_matching.vllm.server.servers[{}].base_url: {}"


@pytest.fixture
def config(demo_checkpoint, demo_data, tmp_path):
    folders = (demo_checkpoint, demo_data, tmp_path / "run")
    return lambda **changes: configuration(*folders, **SOUND | changes)


def in_server_mode(*base_urls, group_port=0, **section):
    servers = [{"base_url": base_url, "group_port": group_port} for base_url in base_urls]
    return {"rollout_matching__vllm": {"mode": "server", "server": {"servers": servers, **section}}}


def asked(run, settings=None, **limit):
    return ask_servers(run.rollout_matching.servers, "run", settings, **limit)


def keys(problems):
    return [problem.split(": ")[0] for problem in problems]


IMPORTS = """
import torch
from launch.checks.preflight import preflight
from shared.config import load_config
"""


def printed_after_preflight(config, folder, code):
    """Return the words of the last line that a new process prints: it runs preflight, then code."""
    before = (
        f"os.environ['XDG_CACHE_HOME'] = {str(folder / 'cache')!r}\n"
        f"report = preflight(load_config(json.loads({config.model_dump_json()!r})))\n"
        "assert report.facts is not None, report.problems\n"
    )
    lines, status, complaints = ran(before + code, IMPORTS)
    assert status == 0, complaints
    return lines[-1].split()


@pytest.mark.slow
def test_packages_that_a_run_does_not_need_are_not_imported_to_check_it(config, tmp_path):
    code = "print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(printed_after_preflight(config(), tmp_path, code))
    assert "transformers" in loaded
    assert not loaded & {"openai", "pandas", "ray", "scipy", "sklearn", "vllm"}


@pytest.mark.slow
@pytest.mark.parametrize("of_environment", [False, True])
def test_a_sound_check_is_kept_for_the_same_configuration_and_files_alone(
    config, demo_checkpoint, demo_lm, demo_data, tmp_path, of_environment
):
    folder = shutil.copytree(demo_lm if of_environment else demo_checkpoint, tmp_path / "model")
    changed = {"training__seed": 18}

    def make(**changes):
        if of_environment:
            return trajectory_config(folder, tmp_path / "run", **changes)
        return configuration(folder, demo_data, tmp_path / "run", **SOUND | changes)

    def checked(run):
        """Whether transformers was imported, and what the check found."""
        code = (
            "print('transformers' in sys.modules, *map(repr, (report.facts, *report.lines)),"
            " sep='|')"
        )
        imported, _, found = " ".join(printed_after_preflight(run, tmp_path, code)).partition("|")
        return imported == "True", found

    is_new, found = checked(make())
    assert is_new
    assert checked(make()) == (False, found)
    unread = {
        "checkpoint__save_final": False,
        "timeouts__start_s": 299.0,
        "training__weight_decay": 0.5,
    }
    assert checked(make(**unread)) == (False, found)
    assert checked(make(**changed))[0]
    assert not checked(make(**changed))[0]
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert checked(make(**changed)) == (True, found)


@pytest.mark.slow
@pytest.mark.parametrize("of_environment", [False, True])
def test_learners_and_environments_in_the_process_of_preflight_use_all_of_transformers(
    config, demo_lm, tmp_path, of_environment
):
    """Transformers remembers a package that it has not found, as if it were not installed."""
    run = (
        trajectory_config(demo_lm, tmp_path / "run")
        if of_environment
        else config(cluster__kind="local", rollout_matching__rollout_backend="hf", **NO_QUEUE)
    )
    code = (
        "from transformers.loss.loss_for_object_detection import HungarianMatcher\n"
        "boxes = torch.tensor([[0.2, 0.2, 0.1, 0.1], [0.8, 0.8, 0.1, 0.1]])\n"
        "found = {'logits': torch.zeros(1, 2, 3), 'pred_boxes': boxes.flip(0)[None]}\n"
        "true = [{'class_labels': torch.tensor([1, 1]), 'boxes': boxes}]\n"
        "print(*HungarianMatcher()(found, true)[0][1].tolist())"
    )
    assert printed_after_preflight(run, tmp_path, code) == ["1", "0"]


@pytest.mark.slow
def test_a_sound_run_has_its_places_and_its_memory_and_no_problem(config, monkeypatch):
    read = []

    def load(config, source, report):
        read.append(source.path)
        return load_samples(config, source, report)

    monkeypatch.setattr("launch.checks.data.load_samples", load)
    run = config()
    findings = preflight(run)
    assert findings.problems == []
    text = "\n".join(findings.lines)
    for index in range(3):
        assert f"place     rollout-actor-{index}: 0 GPU, 0.25 CPU, an engine of 1 device" in text
    assert "place     learner: 0 GPU, 0.25 CPU" in text
    assert "weights   travel by rollmatch_gloo" in text
    assert (
        "objects   no object of data.train (" in text and "objects   no object of data.val" in text
    )
    assert "memory    learner rank: " in text and "optimizer" in text
    assert "memory    engine device: " in text and "6 are decoded" in text
    assert read == [run.data.train, run.data.val], "once"


@pytest.mark.slow
def test_answers_that_will_be_cut_are_warned_of(config):
    """Of training, where a step generates, and of the held-out report; it is no problem, since a
    run may mean it.
    """
    findings = preflight(config(rollout_matching__max_new_tokens=8))
    assert findings.problems == []
    cut = "warning   rollout_matching.max_new_tokens: 8 is less than the ground truth of "
    warnings = [line for line in findings.lines if line.startswith(cut)]
    assert ["train.jsonl" in line for line in warnings] == [True, False]


@pytest.mark.slow
def test_every_problem_is_reported_at_once(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    served = in_server_mode(NOWHERE, token_env="ROLLMATCH_TEST_TOKEN_THAT_IS_NOT_SET")
    wrong = {
        "global_max_length": 128,
        "cluster__temp_dir": "/tmp/" + "long" * 20,
        "learner__cpus": 4096.0,
    }
    problems = preflight(config(**served, **wrong)).problems
    assert keys(problems) == [
        "telemetry.run_dir",
        "cluster.temp_dir",
        "global_max_length",
        "learner.cpus",
        "rollout_matching.vllm.server.token_env",
    ]
    assert all("; " in problem for problem in problems)


@pytest.mark.parametrize("of_environment", [False, True])
def test_a_checkpoint_that_is_missing_is_one_problem_with_the_commands_that_make_the_demos(
    config, tmp_path, of_environment
):
    missing = tmp_path / "lm"
    run = trajectory_config(missing, tmp_path / "run") if of_environment else None
    (problem,) = preflight(run or config(model__path=str(missing)), **CPU_NODE).problems
    assert problem.startswith(f"model.path: {missing} holds no checkpoint (no config.json); set")


# Servers


@pytest.mark.parametrize("of_environment", [False, True])
def test_a_server_that_does_not_answer_is_named_with_the_ways_out(config, tmp_path, of_environment):
    served = in_server_mode(NOWHERE)
    ways_out = "rollout_matching.vllm.mode: colocate or rollout_matching.rollout_backend: hf"
    run = config(**served)
    if of_environment:
        run = trajectory_config(tmp_path / "model", tmp_path / "run", **served)
    (problem,) = asked(run).problems
    assert problem.startswith(f"{SERVER.format(0, NOWHERE)} does not answer (")
    assert problem.endswith(f"start the server, check the address, or set {ways_out}")


@pytest.mark.slow
def test_a_server_that_is_not_up_is_waited_for_by_a_run_and_told_by_preflight(config):
    run = config(**in_server_mode(NOWHERE))
    answers = asked(run)
    assert answers.not_up == answers.problems and len(answers.problems) == 1
    assert preflight(run, waits_for_servers=True).problems == []
    assert preflight(run).problems == list(answers.problems)


@pytest.mark.slow
def test_an_environment_beside_the_engine_has_its_place_in_the_learner(demo_lm, tmp_path):
    beside = {"rollout_matching__vllm": {"mode": "colocate"}}
    run = trajectory_config(demo_lm, tmp_path / "run", queue=False, **beside)
    text = "\n".join(preflight(run, **CPU_NODE).lines)
    assert re.search(r"^place +learner: .* CPU, .*engine of 1 device", text, re.MULTILINE)
    assert re.search(r"^place +copy_digits: .*each learner rank$", text, re.MULTILINE)


@pytest.mark.slow
def test_a_teacher_is_asked_whether_it_suits_and_one_that_is_not_up_is_waited_for(
    demo_lm, tmp_path, monkeypatch
):
    def found(url, waits=False, **keys):
        teacher = {"base_url": url, "model": "teacher", **keys}
        run = trajectory_config(demo_lm, tmp_path / "run", environment__teacher=teacher)
        section = run.environment.teacher
        arguments = (section, run.model.path, run.global_max_length)
        return list(teacher_problems(*arguments, waits=waits))

    (problem,) = found(NOWHERE)
    assert problem.startswith(f"environment.teacher.base_url: {NOWHERE} does not answer (")
    assert found(NOWHERE, waits=True) == []
    tokenizer = AutoTokenizer.from_pretrained(demo_lm)
    with serving(FakeTeacher(tokenizer).app()) as url:
        assert found(url) == []
    with serving(FakeTeacher(tokenizer, max_model_len=48).app()) as url:
        (problem,) = found(url, waits=True)
        assert problem.startswith(f"environment.teacher: {url} accepts 48 tokens")
        assert "--max-model-len 49" in problem
    teacher = FakeTeacher(tokenizer, loads=2)
    with serving(teacher.app()) as url:
        assert found(url, waits=True) == []
        (problem,) = found(url)
        assert re.search(rf"^environment\.teacher\.base_url: {url} .*HTTP 503: loading", problem)
    assert teacher.bodies == []
    # Only what it scores has the run's own limit, not the list of its models.
    models = "rollout_actors.environments.training.teacher.Teacher._wait_until_up"
    monkeypatch.setattr(models, lambda teacher: teacher._http.get(MODELS, timeout_s=120.0))
    with serving(FakeTeacher(tokenizer, troubles=[0, 0]).app()) as url:
        (problem,) = found(url, waits=True, timeout_s=0.5)
        assert problem.endswith("one answer fits into environment.teacher.timeout_s = 0.5 s")


@pytest.fixture
def roomy(tmp_path):
    """Settings of a server that suits the run."""
    sizes = {"max_model_len": 512, "max_num_seqs": 64, "max_images_per_prompt": 4}
    return make_settings(tmp_path / "model", **sizes)


@pytest.mark.slow
def test_servers_that_suit_are_asked_for_their_devices_and_the_algebra_is_that_of_their_sizes(
    config, roomy
):
    with (
        serving_engine(ObedientEngine(devices=1), roomy) as one,
        serving_engine(ObedientEngine(devices=2), roomy) as two,
    ):
        findings = preflight(config(**in_server_mode(one, two)))
    assert findings.problems == []
    text = "\n".join(findings.lines)
    assert f"serves    {one}: 1 rollout device\nserves    {two}: 2 rollout devices\n" in text
    assert "over 2 servers of 1+2 devices" in text


@pytest.mark.slow
def test_everything_that_does_not_suit_is_a_problem_of_its_server(config, roomy, tmp_path):
    """Both sides are configured apart: dtype, length, images and adapters of each server are its
    own. The guard is the run's, which brings it."""
    other = make_settings(tmp_path / "model", dtype="bfloat16", max_model_len=64, max_num_seqs=5)
    guard = {
        "enabled": True,
        "min_new_tokens": 64,
        "max_consecutive_token_repeats": 32,
        "ngram_size": 16,
        "ngram_repeats": 4,
    }
    with (
        serving_engine(ObedientEngine(), roomy) as first,
        serving_engine(ObedientEngine(), other) as second,
    ):
        served = in_server_mode(first, second)
        problems = preflight(config(**served, rollout_matching__repeat_terminate=guard)).problems
    named = [problem.partition(" (")[0].partition(", the run")[0] for problem in problems]
    wrong = ("dtype is bfloat16", "max_model_len is 64", "max_num_seqs is 5")
    assert named == [f"{SERVER.format(1, second)} does not suit the run; {one}" for one in wrong]
    assert "start the server with dtype=float32" in problems[0]


@pytest.mark.slow
def test_servers_that_cannot_give_every_learner_rank_a_request_are_refused_before_the_start(
    config, roomy
):
    """Scenario: vLLM server mode fails fast when cap is infeasible."""
    few = {
        "learner__world_size": 3,
        "rollout_matching__decode_batch_size": 2,
        "learner__parallel": "ddp",
    }
    with serving_engine(ObedientEngine(), roomy) as url:
        (problem,) = preflight(config(**in_server_mode(url), **few)).problems
    assert problem.startswith(
        "rollout_matching.decode_batch_size: decode_batch_size 2 x 1 rollout devices is less than 3"
        " learner ranks; raise decode_batch_size to at least 3"
    )


@pytest.mark.slow
def test_one_server_under_two_addresses_is_noticed(config, roomy):
    one = make_service(ObedientEngine(), roomy)
    asyncio.run(one.start())
    with serving(make_app(one)) as first, serving(make_app(one)) as second:
        problems = preflight(config(**in_server_mode(first, second))).problems
    twice = f"{SERVER.format(1, second)} is the same server as servers[0]; list it once"
    assert problems == [twice]


@pytest.mark.slow
def test_a_server_that_asks_for_a_token_names_the_key(config, roomy):
    with serving_engine(ObedientEngine(), roomy, token="secret") as url:
        (problem,) = preflight(config(**in_server_mode(url))).problems
    assert "HTTP 401" in problem and "rollout_matching.vllm.server.token_env" in problem


STOCK = {"model_config.max_model_len": 512, "scheduler_config.max_num_seqs": 64}


@pytest.mark.slow
def test_a_stock_server_is_asked_what_its_client_asks_and_is_left_as_it_was(config):
    server = StockServer(changes=STOCK | {"model_config.dtype": "torch.bfloat16"})
    with serving(server.app()) as url:
        findings = preflight(config(**in_server_mode(url, kind="vllm")))
    dtype = "dtype is bfloat16, the run's is float32: start the server with --dtype float32"
    assert findings.problems == [f"{SERVER.format(0, url)} does not suit the run; {dtype}"]
    assert f"serves    {url}: 1 rollout device" in findings.lines
    assert (server.label, server.routes) == ("default", [])


@pytest.mark.slow
def test_a_server_whose_engine_is_stuck_is_given_up(config, tmp_path):
    with serving(StockServer(changes=STOCK, worker_latency_s=60.0).app()) as url:
        run = config(**in_server_mode(url, kind="vllm"))
        (problem,) = asked(run, make_settings(tmp_path / "model"), inspect_s=1.0).problems
    assert problem.endswith(
        f"{url} answers /health, but did not report its settings in 1 s: its engine may"
        " be stuck; start it again"
    )


def test_a_group_port_that_is_taken_is_named(config):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = port_problems(
            config(**in_server_mode(NOWHERE, group_port=port)).rollout_matching.servers.servers
        )
    assert problem.startswith(f"rollout_matching.vllm.server.servers[0].group_port: {port} ")
    assert " 0 " in problem


# Paths, packages, model and data


def test_a_folder_that_cannot_be_made_is_named(config, tmp_path):
    # A file in the way stops everybody, root too, who may write where others may not.
    file = tmp_path / "file"
    file.write_text("")
    (problem,) = path_problems(config(telemetry={"run_dir": str(file / "run")}))
    remedy = f"cannot be created, because {file} is not writable; choose another folder, "
    assert remedy in problem


def test_every_folder_that_a_run_writes_is_looked_at(config, tmp_path, monkeypatch):
    for name in ("RAY_TMPDIR", "XDG_CACHE_HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert list(path_problems(config(cluster__temp_dir="/tmp"))) == []
    (tmp_path / "file").write_text("")  # in the way of everybody, root too
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    problems = list(path_problems(config(cluster__temp_dir="/tmp")))
    assert keys(problems) == ["XDG_CACHE_HOME", "HOME"]
    assert all(f"{tmp_path / 'file'} is not writable" in problem for problem in problems)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 20)))
    (problem,) = path_problems(config())
    assert problem.startswith("TMPDIR: ") and "107 are possible; set cluster.temp_dir" in problem
    (tmp_path / f"rollmatch-{os.getuid()}").symlink_to("/")
    (*_, problem) = path_problems(config(cluster__temp_dir=str(tmp_path)))
    assert "is a link or another user's folder" in problem


def test_a_full_folder_for_temporary_files_is_told(config, monkeypatch):
    full = "/dev/shm"
    monkeypatch.setenv("TMPDIR", full)
    usage = shutil.disk_usage
    left = {full: 2**20}
    monkeypatch.setattr(
        "shutil.disk_usage",
        lambda path: usage(path)._replace(free=left.get(str(path), 2**40)),
    )
    stat = os.statvfs("/")
    numbers = [*stat[:5], 0, 0, 0, *stat[8:]]  # btrfs: no number of files
    monkeypatch.setattr("os.statvfs", lambda path: os.statvfs_result(numbers))
    problems = list(path_problems(config()))
    assert keys(problems) == ["TMPDIR", "TMPDIR"]  # Ray's folder lies there, too
    assert all("has 1 MiB" in problem and "needs 64 MiB" in problem for problem in problems)


def test_checkpoints_that_do_not_fit_the_disk_are_announced(config):
    (problem,) = path_problems(config(checkpoint__keep_last=10**9))
    assert problem.startswith("telemetry.run_dir: the checkpoints that are kept need about ")
    assert "keep fewer" in problem
    none = config(checkpoint__keep_last=10**9, checkpoint__save_minutes=None)
    assert list(path_problems(none)) == []


def test_a_logger_without_its_package_is_a_problem(tmp_path, monkeypatch):
    def nothing_is(name: str) -> str:
        raise sink.PackageNotFoundError(name)

    monkeypatch.setattr(sink, "version", nothing_is)
    folders = (tmp_path / "model", tmp_path / "data", tmp_path / "run")
    found = preflight(configuration(*folders, telemetry__loggers=["jsonl", "wandb"]), **CPU_NODE)
    missing = "telemetry.loggers: wandb is not installed; run `pip install 'rollmatch[wandb]'`"
    assert any(problem.startswith(missing) for problem in found.problems)


@pytest.mark.slow
def test_offload_that_cannot_work_here_is_refused_with_a_way_out(config):
    changes = {
        "rollout_matching__vllm": {"mode": "colocate", "kv_cache_memory_bytes": 2**26},
        "rollout_matching__offload": {"enabled": True, "offload_model": True},
    }
    (problem,) = preflight(config(**changes, **NO_QUEUE)).problems
    assert problem.startswith(
        "rollout_matching.offload.enabled: the learner already runs on the CPU"
    )


def test_linear_attention_on_cpu_is_served_in_bfloat16_alone(tmp_path):
    stock = make_stock_model(tmp_path / "model", "qwen3_5")
    config = trajectory_config(stock, tmp_path / "run")
    message = "float32, but vLLM 0.32 computes the linear attention of a qwen3_5 model on CPU"
    assert any(message in problem for problem in preflight(config, **CPU_NODE).problems)
    in_half = trajectory_config(stock, tmp_path / "run", model__dtype="bfloat16")
    assert not any("linear attention" in one for one in preflight(in_half, **CPU_NODE).problems)


def test_adapters_beside_experts_are_not_served_alone_on_cpu(tmp_path):
    stock = make_stock_model(tmp_path / "model", "qwen3_vl_moe")
    adapter = {"kind": "lora", "rank": 4, "target_modules": ["q_proj", "v_proj"]}
    changes = {"model__adapter": adapter, "rollout_matching__vllm__enable_lora": True}
    config = trajectory_config(stock, tmp_path / "run", **changes)
    message = "rollout_matching.vllm.enable_lora: vLLM 0.32 serves adapters"
    assert any(one.startswith(message) for one in preflight(config, **CPU_NODE).problems)
    merged = changes | {"rollout_matching__vllm__enable_lora": False}
    config = trajectory_config(stock, tmp_path / "run", **merged)
    assert not any("enable_lora" in one for one in preflight(config, **CPU_NODE).problems)


@pytest.mark.slow
def test_layers_that_are_not_there_and_a_rank_that_none_has_are_refused_with_the_layers_that_are(
    config, demo_checkpoint
):
    modules = ["q_projj", "v_proj", "embed_tokens"]
    adapter = {"kind": "lora", "rank": 100_000, "target_modules": modules}
    names, rank = preflight(config(model__adapter=adapter), **CPU_NODE).problems
    assert names.startswith("model.adapter.target_modules: ")
    assert re.search(rf" {demo_checkpoint} .* embed_tokens, q_projj; ", names)
    assert names.endswith(" down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj")
    assert rank.startswith("model.adapter.rank: 100000 is more") and rank.endswith("; lower it")
    assert preflight(config(model__adapter={"kind": "lora"}), **CPU_NODE).problems == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "length"),
    [
        ("global_max_length", 5000),
        ("rollout_matching.vllm.max_model_len", 4097),
        ("global_max_length", 4096),
    ],
)
def test_sequences_longer_than_the_model_s_positions_are_refused_where_engines_are_started(
    config, demo_checkpoint, key, length
):
    """vLLM would refuse them when the engine starts."""
    findings = preflight(config(**{key.replace(".", "__"): length}), **CPU_NODE)
    too_long = (
        f"{key}: {length} tokens are more than the 4096 positions of {demo_checkpoint}"
        " (max_position_embeddings); lower it"
    )
    assert findings.problems == ([too_long] if length > 4096 else [])


@pytest.mark.slow
def test_an_objective_of_ones_own_module_is_imported_and_its_settings_are_checked_before_the_start(
    config, tmp_path, monkeypatch
):
    (tmp_path / "own_loss.py").write_text(
        "from learner.objectives.bbox_geo import BboxGeo\n"
        "from shared.config.base import Section\n"
        "class OwnLoss(BboxGeo):\n"
        "    class Config(Section):\n"
        "        gamma: float\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = {"enabled": True, "weight": 1.0, "channels": ["B"], "name": "own_loss:OwnLoss"}

    def problems(**settings):
        changes = {
            "rollout_matching__pipeline__objective": [entry | {"config": settings}],
            "stage2_ab__schedule__warmup_steps": 0,
        }
        return preflight(config(**changes), **CPU_NODE).problems

    assert problems(gamma=2.0) == []
    objective = "rollout_matching.pipeline.objective[0]"
    unknown = f"{objective}.config.gama: is not a known key; did you mean 'gamma'?"
    assert problems(gama=2.0, gamma=1.0) == [unknown]


@pytest.fixture
def with_picture(demo_data, tmp_path):
    """A copy of the training data whose rows of these numbers show a picture of this size."""

    def make(width, height, *numbers):
        picture = tmp_path / "picture.png"
        Image.new("RGB", (width, height)).save(picture)
        rows = [json.loads(line) for line in (demo_data / "train.jsonl").read_text().splitlines()]
        for row in rows:
            row["images"] = [str(demo_data / image) for image in row["images"]]
        for number in numbers:
            rows[number] |= {"images": [str(picture)], "width": width, "height": height}
        file = tmp_path / "train.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return make


@pytest.mark.slow
def test_a_server_that_takes_no_image_as_large_as_the_data_s_is_refused_before_the_start(
    config, roomy, with_picture
):
    with serving_engine(ObedientEngine(), roomy) as url:
        run = config(**in_server_mode(url), data__train=with_picture(200, 101, 3))
        problems = preflight(run).problems
    wrong = "max_image_pixels is 10000, the run needs 20200: start the server with max_image_pixels=20200"
    assert problems == [f"{SERVER.format(0, url)} does not suit the run; {wrong}"]


@pytest.mark.slow
def test_prompts_are_as_long_as_images_within_max_pixels_make_them(config, tmp_path):
    stock = {
        "model__path": str(make_stock_model(tmp_path / "stock", "qwen3_vl")),
        "data__answer_format": "qwen3_vl",
        "rollout_matching__pipeline": EXAMPLE_PIPELINE,
        "global_max_length": 100,
    }

    def found(**changes):
        report = preflight(config(**stock, **changes), **CPU_NODE)
        (problem,) = [line for line in report.problems if line.startswith("global_max_length")]
        return int(re.search(r": prompt (\d+) ", problem)[1])

    # Of 96 x 96 and 64 x 64 pixels, a token for each 16 x 16.
    assert found() - found(data__max_pixels=4096) == 36 - 16
    refused = preflight(config(**stock, data__max_pixels=9), **CPU_NODE).problems
    assert any(line.startswith("data.max_pixels: 9 is less") for line in refused)


@pytest.mark.slow
def test_all_pictures_that_the_image_processor_does_not_take_are_named(config, with_picture):
    """Qwen's takes none with a side more than 200 times the other."""
    file = with_picture(300, 1, 3, 5)
    (problem,) = preflight(config(data__train=file), **CPU_NODE).problems
    first, second, count = problem.splitlines()
    refused = (
        "has an image of 300 x 1 pixels, which the checkpoint's image processor does not accept"
        " (absolute aspect ratio must be smaller than 200, got 300.0)"
    )
    remedy = "crop or pad the image, or remove the row"
    assert first == f"{file}:4: images: sample train:4 {refused}; {remedy}"
    assert second.startswith(f"{file}:6: images: sample train:6 {refused}")
    assert count == f"{file}: bad rows: these 2"
    skipping = preflight(config(data__train=file, data__on_bad_row="skip"), **CPU_NODE)
    assert not skipping.problems
    assert skipping.facts.num_train_skipped == 2
    assert skipping.facts.images.max_pixels == 96 * 96


# Memory


@pytest.mark.slow
def test_a_cache_that_cannot_hold_one_sequence_is_refused_and_hides_no_other_lack_of_memory(config):
    run = config(rollout_matching__vllm__kv_cache_memory_bytes=1024)
    too_small = (
        "rollout_matching.vllm.kv_cache_memory_bytes: the cache cannot hold one sequence; raise it,"
        " or lower global_max_length"
    )
    assert preflight(run).problems == [too_small]
    problems = preflight(run, memory_of=lambda device: DeviceMemory(device, 2**20)).problems
    assert problems[0] == too_small
    assert keys(problems[1:]) == ["cluster.address"]


CPU = Resources(cpus=8, gpus=0)
GPU = Resources(cpus=16, gpus=4)


@pytest.mark.slow
def test_where_memory_is_too_little_settings_that_fit_are_named(config):
    run = config(global_max_length=4096)
    sizes = RunSizes.of(run, ModelShape.read(Path(run.model.path)))
    needed = learner_estimate(sizes, Device.CUDA, TransportKind.NCCL).total

    def findings(total, run=run):
        sizes = {"memory_of": lambda device: DeviceMemory(device, total)}
        return preflight(run, nodes_of=lambda *_: [GPU], **sizes)

    little = findings(int(needed / 0.92) - 2**20)
    assert little.problems == []
    fits = [line for line in little.lines if "fits with" in line]
    cheapest = "model.gradient_checkpointing=true model.recompute_every=4"
    assert fits[0].startswith(f"memory    fits with {cheapest}: learner rank")
    assert "training.optimizer=adamw_offload: " in "".join(fits)
    enough = findings(int(needed / 0.92) + 2**20)
    assert not any("fits" in line for line in enough.lines)
    recomputed = config(global_max_length=4096, model__gradient_checkpointing=True)
    (faster,) = [line for line in findings(10**12, recomputed).lines if "fits" in line]
    expected = "memory    faster, and fits: model.gradient_checkpointing=false: learner rank"
    assert faster.startswith(expected)


SHARDED = "memory    fits with learner.parallel=fsdp learner.world_size=2: "
IN_RANKS = {
    **NO_QUEUE,
    "rollout_matching__vllm": {
        "mode": "colocate",
        "tensor_parallel_size": 1,
        "kv_cache_memory_bytes": 2**26,
    },
}
MOVED = {"rollout_matching__offload": {"enabled": True, "offload_model": True}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_gpus", "changes", "is_first"),
    [
        pytest.param(5, {}, True, id="an idle GPU"),
        pytest.param(4, {}, False, id="none"),
        pytest.param(5, {"training__optimizer": "adamw_offload"}, False, id="not with fsdp"),
        pytest.param(2, IN_RANKS, True, id="with an engine"),
        pytest.param(2, IN_RANKS | MOVED, False, id="shards cannot be moved"),
    ],
)
def test_a_learner_that_does_not_fit_is_first_sharded_over_gpus_that_the_run_leaves_idle(
    config, num_gpus, changes, is_first
):
    run = config(global_max_length=4096, **changes)
    sizes = RunSizes.of(run, ModelShape.read(Path(run.model.path)))
    needed = learner_estimate(sizes, Device.CUDA, TransportKind.NCCL)
    if run.rollout_matching.in_learner:
        engine = engine_estimate(sizes, 1, Device.CUDA, 0, TransportKind.IPC)
        needed = shared_device_estimate(sizes, needed, engine, TransportKind.IPC)
    card = DeviceMemory(Device.CUDA, int(needed.total / 0.92) - 2**21)
    memory = {Device.CUDA: card}
    nodes = [Resources(cpus=32, gpus=num_gpus)]
    findings = preflight(run, nodes_of=lambda *_: nodes, memory_of=memory.get)
    assert any("learner.gpus: " in line for line in findings.lines), "it does not fit"
    proposed = [line.startswith(SHARDED) for line in findings.lines if "fits with" in line]
    assert (proposed[:1] == [True]) == is_first
    assert not any(proposed[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "ranks", "copies", "key"),
    [
        ({}, 1, 1, "model.path"),
        ({"learner__world_size": 2}, 2, 2, "learner.world_size"),
        ({"learner__parallel": "fsdp", "learner__world_size": 2}, 2, 1, "model.path"),
    ],
)
def test_a_machine_whose_memory_cannot_hold_the_models_that_ranks_load_is_refused(
    config, changes, ranks, copies, key
):
    run = config(**changes)
    of_model = ModelShape.read(Path(run.model.path)).num_parameters * 4
    nodes = [Resources(cpus=32, gpus=8)]

    def problems(host_bytes, nodes=nodes):
        memory = {
            Device.CUDA: DeviceMemory(Device.CUDA, 80 << 30),
            Device.CPU: DeviceMemory(Device.CPU, host_bytes),
        }
        return preflight(run, nodes_of=lambda *_: nodes, memory_of=memory.get).problems

    (problem,) = problems(copies * of_model - 1)
    plural = "" if ranks == 1 else "s"
    assert problem.startswith(
        f"{key}: host memory of {ranks} learner rank{plural}, while the model"
    )
    assert problems(copies * of_model) == problems(1, nodes * 2) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "total", "problems", "last_line"),
    [
        pytest.param(
            [CPU, GPU],
            None,
            [],
            "memory    not compared, and engines not estimated: this machine has no GPU; ",
            id="GPUs seen from a head or login node",
        ),
        pytest.param([CPU], 2**20, ["cluster.address"], "", id="one CPU node"),
        pytest.param(
            [CPU, CPU],
            2**20,
            [],
            "memory    not compared: it is not known on which of the 2 nodes a process",
            id="two CPU nodes",
        ),
        pytest.param(
            [GPU, GPU],
            2**20,
            ["learner.gpus", "rollout_matching.vllm.kv_cache_memory_bytes"],
            "memory    compared with this machine's GPUs; other nodes may have others",
            id="GPUs of several nodes",
        ),
    ],
)
def test_memory_is_compared_with_that_of_the_machine_where_it_is_that_of_the_run(
    config, nodes, total, problems, last_line
):
    findings = preflight(
        config(),
        nodes_of=lambda *_: nodes,
        memory_of=lambda device: None if total is None else DeviceMemory(device, total),
    )
    assert keys(findings.problems) == problems
    assert any(line.startswith(last_line) for line in findings.lines)
    text = "\n".join(findings.lines)
    assert "memory    learner rank: " in text
    if GPU in nodes:
        assert "place     rollout-actor-0: 1 GPU" in text and "weights   travel by nccl" in text


@pytest.mark.slow
def test_the_command_exits_non_zero_on_a_problem_and_starts_nothing(
    demo_checkpoint, demo_data, tmp_path, call_command
):
    overrides = [
        "+experiment=stage2_hf",
        f"model.path={demo_checkpoint}",
        f"data.train={demo_data}/train.jsonl",
        f"data.val={demo_data}/val.jsonl",
        f"telemetry.run_dir={tmp_path}/run",
    ]
    for further, expected, last in (
        ([], 0, "no problem was found"),
        (["data.val=/nowhere.jsonl"], 1, "data.val: there is no file /nowhere.jsonl; "),
    ):
        status, output = call_command("launch.preflight", *overrides, *further)
        assert status == expected and last in output, output
    assert not (tmp_path / "run").exists()
