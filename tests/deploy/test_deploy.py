"""Files for containers and schedulers: what they name is there, and their commands compose."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from launch.cli import COMMANDS, CONF, as_mapping, as_schema_overrides
from shared.config import RunConfig, load_config

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SBATCH = ROOT / "deploy" / "slurm.sbatch"
SBATCH_NODES = ROOT / "deploy" / "slurm_nodes.sbatch"
RAYJOB = ROOT / "deploy" / "rayjob.yaml"
SKYPILOT = ROOT / "deploy" / "skypilot.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_of(command: str) -> RunConfig:
    """Return the configuration of a `rollmatch train` line, which goes on from its checkpoint."""
    rollmatch, name, *arguments = shlex.split(command.removeprefix("exec "))
    assert rollmatch == "rollmatch" and name == "train" and name in COMMANDS
    assert "resume=auto" in arguments
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", overrides=as_schema_overrides(arguments))
    run = load_config(as_mapping(composed))
    assert str(run.resume.run) == "auto"
    return run


def num_gpus(run: RunConfig) -> int:
    actors = run.rollout_matching.vllm.actors
    return actors.num_actors * actors.tensor_parallel_size + run.learner.world_size


def paths_of(run: RunConfig) -> list[Path]:
    data = [run.data.train, run.data.val]
    assert all(data)
    return [Path(run.model.path), run.telemetry.run_dir, *filter(None, data)]


def read(path: Path) -> dict[str, Any]:
    document = yaml.safe_load(path.read_text())
    assert isinstance(document, dict)
    return document


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, each with its words."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


@pytest.mark.parametrize("path", [ROOT / "Dockerfile", SBATCH, SBATCH_NODES, RAYJOB, SKYPILOT])
def test_what_was_not_run_says_so_and_names_no_host(path):
    text = path.read_text()
    assert "# NOT RUN" in text
    assert "://" not in text


def test_each_stage_of_the_dockerfile_installs_with_what_the_repository_has():
    stages = [words.split(" AS ") for name, words in instructions() if name == "FROM"]
    image = stages[0][0]
    assert stages == [[image, "base"], ["base", "cpu"], ["base", "gpu"]]
    version = re.fullmatch(r"python:(\d+\.\d+)-slim-bookworm", image)
    assert version and f">={version[1]}" == PROJECT["requires-python"]
    system, *set_ups = [words for name, words in instructions() if name == "RUN"]
    assert set_ups == [
        f"scripts/setup.sh {extra}{part}" for extra in ("cpu", "gpu") for part in (" packages", "")
    ]
    assert (ROOT / "scripts" / "setup.sh").stat().st_mode & 0o100
    # What scripts/setup.sh asks of a system with a GPU; this Python has venv and its headers.
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    for package in ("libnuma1", "gcc", "libc6-dev"):
        assert package in setup and f" {package} " in system
    linked = re.findall(r"/rollmatch/\.venv/bin/(\S+)", system)
    assert linked == ["ray", "rollmatch"] and "rollmatch" in PROJECT["scripts"]
    assert ("ENTRYPOINT", '["rollmatch"]') in instructions()


def test_an_image_has_its_packages_before_the_sources_and_does_not_run_as_root():
    """So that a change of a source installs no package again."""
    _, base, *stages = re.split(r"(?m)^FROM .*\n", DOCKERFILE)
    copied = set(re.findall(r"(?m)^COPY (\S+) ", base))
    assert copied == {"pyproject.toml", "locks", "scripts"}
    for stage in stages:
        lines = [line for line in stage.splitlines() if re.match("COPY|RUN|USER", line)]
        packages, sources, project, user = lines
        assert packages.endswith(" packages") and sources == "COPY . ."
        assert project == packages.removesuffix(" packages")
        assert user == "USER rollmatch" and "useradd --uid 1000 --create-home rollmatch" in base


def test_a_clone_s_own_environment_and_runs_stay_out_of_the_image():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs"} <= set(ignored)
    # Nothing of what is built or installed is among them.
    needed = ("conf", "launch", "learner", "rollout_actors", "shared", "scripts", "README.md")
    assert not set(ignored) & {*needed, "locks", "LICENSE", "pyproject.toml"}


def test_the_ray_job_has_the_cluster_that_its_run_asks_for():
    job = read(RAYJOB)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    fields = {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "rayClusterSpec"}
    assert spec.keys() == fields
    cluster = spec["rayClusterSpec"]
    fields = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert cluster.keys() == fields
    assert f"ray[default]=={cluster['rayVersion']}" in PROJECT["dependencies"]
    assert cluster["authOptions"] == {"mode": "token"}

    run = run_of(spec["entrypoint"])
    assert run.cluster.address == "auto"
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head.keys() == {"rayStartParams", "template"}
    sizes = {"replicas", "minReplicas", "maxReplicas"}
    assert workers.keys() == {"groupName", "rayStartParams", "template"} | sizes
    assert {workers[size] for size in sizes} == {num_gpus(run)}
    for group in (head, workers):
        # A map of strings, to Kubernetes.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
        assert pod["terminationGracePeriodSeconds"] > run.timeouts.interrupt_s
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        assert gpus == ("1" if group is workers else None)
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
        assert all(path.is_relative_to(mounted["data"]) for path in paths_of(run))
    cpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert cpus >= max(run.learner.cpus, run.rollout_matching.vllm.actors.cpus_per_actor)


def test_the_skypilot_task_has_the_gpus_and_the_volume_of_its_run():
    task = read(SKYPILOT)
    assert task.keys() == {"name", "num_nodes", "resources", "volumes", "run"}
    fields = {"infra", "accelerators", "cpus", "memory", "use_spot", "image_id"}
    assert task["resources"].keys() == fields
    run = run_of(task["run"])
    assert task["resources"]["accelerators"].endswith(f":{num_gpus(run)}")
    (folder,) = task["volumes"]
    assert all(path.is_relative_to(folder) for path in paths_of(run))


def test_the_batch_job_asks_for_the_gpus_and_the_time_to_save_of_its_example():
    text = SBATCH.read_text()
    options = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)(?:=(\S+))?$", text))
    example = text.partition("deploy/slurm.sbatch ")[2].partition("\n# A job")[0]
    run = run_of(f"rollmatch train {example.replace('#', '')} resume=auto".replace("\\\n", " "))
    assert options["gpus-per-node"] == str(num_gpus(run))
    receiver, seconds = options["signal"].split("@")
    assert receiver == "B:TERM" and int(seconds) > run.timeouts.interrupt_s
    assert "requeue" in options and options["open-mode"] == "append"


@pytest.mark.slow
def test_the_batch_job_runs_the_command_and_passes_slurm_s_signal_on(tmp_path):
    """Under a stand-in for srun, which takes its options and becomes the command."""
    programs = {
        "bin/srun": 'while [[ $1 == --* ]]; do echo "srun $1"; shift; done; exec "$@"',
        ".venv/bin/rollmatch": (
            'printf "%s\\n" "$@"; trap "echo saved; exit 130" TERM; touch started;'
            " for _ in {1..600}; do sleep 0.1; done"
        ),
    }
    for name, program in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/bash\n{program}\n")
        path.chmod(0o755)
    # SLURM runs a copy of the file, in the folder of the submission.
    copy = tmp_path / "slurm_script"
    copy.write_text(SBATCH.read_text())
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "32"}
    words = ["+experiment=stage2_3v1", "data.user_prompt=Find {phrase}.", "telemetry.run_dir=run"]
    job = subprocess.Popen(
        ["/bin/bash", copy, *words], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    )
    end_s = time.monotonic() + 120
    while not (tmp_path / "started").exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    told, _ = job.communicate(timeout=240)
    srun = ["srun --ntasks=1", "srun --cpus-per-task=32"]
    assert told.splitlines() == [*srun, "train", *words, "resume=auto", "saved"]
    assert job.returncode == 130


@pytest.mark.slow
def test_the_batch_job_of_several_nodes_is_sound_and_refuses_an_address_that_they_cannot_reach(
    tmp_path,
):
    """`python -m benchmarks.two_hosts --only on_one slurm` runs the rest of it."""
    assert subprocess.run(["bash", "-n", SBATCH_NODES], check=False).returncode == 0
    ip = tmp_path / "ip"
    ip.write_text("#!/bin/sh\necho 1: lo inet 127.0.1.1/8 scope host lo\n")
    ip.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_CPUS_PER_TASK": "1",
        "HEAD_INTERFACE": "lo",
    }
    job = subprocess.run(
        ["bash", SBATCH_NODES], env=environ, cwd=tmp_path, capture_output=True, check=False
    )
    assert job.returncode == 1 and b"HEAD_INTERFACE=NAME" in job.stdout
