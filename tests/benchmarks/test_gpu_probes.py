"""The probes of docs/project/gpu_plan.md run, so that an hour on a card is not spent on typing."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import PROBES
from benchmarks.gpu.__main__ import main as run_probes

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_runs_on_a_cpu_at_toy_size(probe, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [probe, "--device", "cpu", "--toy"])
    importlib.import_module(f"benchmarks.gpu.{probe}").main()
    assert capfd.readouterr().out.startswith("CPU, torch ")


def test_a_probe_that_fails_is_told_and_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    """A script stands in for Python, whose imports take longer than a probe."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "Error of $*" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    probes = ["update_order", "patch_embedding"]
    options = ["--device", "meta", "--toy", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *options, *probes])
    assert run_probes() == 1
    lines = [json.loads(line) for line in (tmp_path / "probes.jsonl").read_text().splitlines()]
    assert [(line["probe"], line["status"]) for line in lines] == [(probe, 1) for probe in probes]
    assert "== update_order: FAILED (1)" in capsys.readouterr().out
    for line in lines:
        assert line["said"] == f"Error of -m benchmarks.gpu.{line['probe']} --device meta --toy\n"


def test_the_probes_need_nothing_that_a_bare_card_lacks():
    """Neither peft nor what starts engines and actors."""
    absent = ["peft", "vllm", "ray", "hydra", "omegaconf", "psutil", "PIL"]
    imports = "; ".join(f"import benchmarks.gpu.{probe}" for probe in PROBES)
    program = f"import sys; sys.modules |= dict.fromkeys({absent}); {imports}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_plan_names_every_probe():
    plan = (Path(__file__).parents[2] / "docs" / "project" / "gpu_plan.md").read_text()
    assert all(f"| `{probe}` |" in plan for probe in PROBES)
