"""Every benchmark that a page names runs at toy size, so that none of them breaks unnoticed."""

from __future__ import annotations

import importlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from rollout_actors.warm import warm_python

ROOT = Path(__file__).parents[2]
HERE = {
    "environments": "--rollouts 5 --turns 2 --repetitions 1",
    "learner_parts": "groups calls embedding adamw logits --layers 1 --hidden 64 --words 600"
    " --updates 2 --calls 20",
    "learner_step": "--tokens 500 --segment 250 --repeats 1 --rows 1",
    "matching": "--scenes 1 --repeats 1",
    "overlap": "--generate 0.01 --learn 0.01 --sync 0.01 --rounds 2 --steps 2",
    "packing": "--draws 1 --one-window 100",
    "parsing": "--repetitions 1 --responses 5 --tokenizer none",
    "save": "--layers 1 --saves 1",
    "shared_prompts": "--layers 1 --heads 3 --words 300 --groups 2 --row 256 --repeats 1",
    "view_page": "--steps 3 --rollouts 8",
    "turns": "--library rollmatch --rollouts 5",
}
"""Arguments of benchmarks that run in this process."""
APART = {
    "attention": "--tokens 64 --segments 2 --layers 1 --repeats 1",
    "logit_memory": "--positions 60 --vocabulary 2500 --hidden 16 --chunks 30 --plain-positions 30",
    "start": "--records 20",
}
"""Arguments of benchmarks that measure in processes of their own, each a command of its own."""
ON_RAY = {"scale": "--actors 1 --rollouts 4 --processes 1 --repeats 1"}
WITH_ENGINES = {
    "repeat_guard": "--sequences 2 --tokens 8 --rounds 1",
    "weight_sync": "--engines 1 --syncs 1 --warm-up 0 --layers 2",
}
ELSEWHERE = {
    "evidence": "tests/benchmarks/test_evidence.py",
    "gpu": "tests/benchmarks/test_gpu_probes.py",
    "hostile": "tests/benchmarks/test_hostile.py",
    "learner_memory": "tests/benchmarks/test_learner_memory.py",
    "mutations": "tests/benchmarks/test_mutations.py",
    "photographs": "tests/benchmarks/test_photographs.py",
    "scale_sync": "tests/benchmarks/test_scale_sync.py",
    "two_hosts": "tests/benchmarks/test_two_hosts.py",
}
"""Benchmarks whose parts another file tests."""
TOO_LONG = ("chaos", "env_3v1", "recovery", "against_trl")
"""Benchmarks of whole runs; the last one needs an interpreter with TRL. Only their options."""


def main_of(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(arguments)])
    return importlib.import_module(f"benchmarks.{name}").main()


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_a_benchmark_runs_and_checks_its_results(name, monkeypatch, capsys):
    # A collection takes half a second in a process that has collected thousands of tests.
    monkeypatch.setattr("gc.collect", lambda: 0)
    main_of(name, HERE[name], monkeypatch)
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_a_benchmark_whose_processes_are_called_here_runs_and_checks_its_results(
    name, monkeypatch, capsys
):
    """They are `python -m benchmarks.NAME` too, and would import torch for seconds each."""
    called = []

    def call(command: Sequence[str | Path], *, env: Mapping[str, str] = {}, **_: bool) -> Any:
        python, option, module, *arguments = map(str, command)
        assert (python, option, module) == (sys.executable, "-m", f"benchmarks.{name}")
        called.append(arguments)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
            for variable, value in env.items():
                patch.setenv(variable, value)
            main_of(name, shlex.join(arguments), patch)
        return subprocess.CompletedProcess(command, 0, printed.getvalue())

    monkeypatch.setattr(subprocess, "run", call)
    main_of(name, APART[name], monkeypatch)
    assert called and capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.parametrize("name", ON_RAY)
def test_a_benchmark_of_ray_actors_runs_and_checks_its_results(
    name, ray_cluster, monkeypatch, capsys
):
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    main_of(name, ON_RAY[name], monkeypatch)
    assert capsys.readouterr().out


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.parametrize("name", WITH_ENGINES)
def test_a_benchmark_with_engines_runs_and_checks_its_results(name):
    command = [*warm_python.command(), "-m", f"benchmarks.{name}", *WITH_ENGINES[name].split()]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOO_LONG)
def test_a_benchmark_of_whole_runs_is_imported_and_reads_its_options(name, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        main_of(name, "--help", monkeypatch)
    assert capsys.readouterr().out


def test_every_benchmark_that_a_page_names_is_among_them():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = re.findall(
        r"benchmarks[./](\w+)|`(\w+)`, 20\d\d-", "".join(page.read_text() for page in pages)
    )
    named = {
        name
        for name in map("".join, found)
        for path in (f"{name}.py", f"{name}/__main__.py")
        if (ROOT / "benchmarks" / path).is_file()
    }
    assert {"weight_sync", "packing", "gpu"} <= named
    assert named <= {*HERE, *APART, *ON_RAY, *WITH_ENGINES, *ELSEWHERE, *TOO_LONG}
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())
