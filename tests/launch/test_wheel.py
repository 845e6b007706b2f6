"""A wheel installs the whole project: commands, experiments and templates."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from command_support import FROM_RANDOM_WEIGHTS

ROOT = Path(__file__).parents[2]
HOOK = "rollmatch_torchvision_hook"
# The wheel's dependencies, which are installed here already. Python follows no `.pth` file of a
# folder that one names: neither our editable install, nor the hook of the CPU set-up.
DEPENDENCIES = sysconfig.get_path("purelib")
if importlib.util.find_spec(HOOK):
    DEPENDENCIES += f"\nimport {HOOK}; {HOOK}.install()"


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command that has to succeed, without the repository on Python's path."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        env=environ,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
def test_a_wheel_in_an_empty_environment_trains_the_demo_from_any_folder(tmp_path, demo_checkpoint):
    source, elsewhere, environment = (tmp_path / name for name in ("source", "else", "venv"))
    elsewhere.mkdir()
    # A copy: the build leaves its files beside the sources, and takes what an older one has left.
    for folder in ("conf", "launch", "learner", "rollout_actors", "shared"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    built = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path)
    run(*pip, *built, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("rollmatch-*.whl")
    venv.create(environment, symlinks=True, with_pip=False)
    python, rollmatch = environment / "bin" / "python", environment / "bin" / "rollmatch"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    (packages / "dependencies.pth").write_text(DEPENDENCIES + "\n")
    shutil.rmtree(source)

    for folder in ("conf", "launch/templates", "launch/tools/demo/start"):
        files = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.*")}
        lost = {name for name in files if not (packages / name).is_file()}
        assert files and not lost
    run(rollmatch, "demo", "data", "--train", "64", "--val", "8", cwd=elsewhere)
    shutil.copytree(demo_checkpoint, elsewhere / "outputs" / "demo" / "model")
    job = ("+experiment=stage2_hf", *FROM_RANDOM_WEIGHTS, "cluster=local", "training.max_steps=1")
    told = run(rollmatch, "train", *job, "telemetry.run_dir=run", cwd=elsewhere)
    assert "step    1/1 A" in told
    assert run(rollmatch, "ledger", "run", cwd=elsewhere).startswith("complete, steps 1 to 1,")
    assert sorted(path.name for path in elsewhere.iterdir()) == ["outputs", "run"]
