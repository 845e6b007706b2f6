"""The probes of docs/gpu_plan.md run, so that an hour on a card is not spent on typing."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import PROBES

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_runs_on_a_cpu_at_toy_size(probe, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [probe, "--device", "cpu", "--toy"])
    importlib.import_module(f"benchmarks.gpu.{probe}").main()
    assert capfd.readouterr().out.startswith("CPU, torch ")


def test_a_probe_that_fails_is_told_and_does_not_end_the_others(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--device",
        "meta",
        "--toy",
        "--out",
        str(tmp_path),
    ]
    ran = subprocess.run(
        [*command, "update_order", "patch_embedding"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    lines = [json.loads(line) for line in (tmp_path / "probes.jsonl").read_text().splitlines()]
    assert [(line["probe"], line["status"]) for line in lines] == [
        ("update_order", 1),
        ("patch_embedding", 1),
    ]
    assert "== update_order: FAILED (1)" in ran.stdout and "Error" in lines[0]["said"]


def test_the_probes_need_nothing_that_a_bare_card_lacks():
    """What docs/gpu_plan.md lists, and neither peft nor what starts engines and actors."""
    probes = "; ".join(f"import benchmarks.gpu.{probe}" for probe in PROBES)
    absent = (
        "import sys; sys.modules |= dict.fromkeys(['peft', 'vllm', 'ray', 'hydra', 'omegaconf',"
        " 'psutil', 'PIL'])"
    )
    subprocess.run([sys.executable, "-c", f"{absent}; {probes}"], check=True)


def test_the_plan_names_every_probe():
    plan = (Path(__file__).parents[2] / "docs" / "gpu_plan.md").read_text()
    assert all(f"| `{probe}` |" in plan for probe in PROBES)
