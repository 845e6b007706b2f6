"""What the Makefile's targets start on a machine with GPUs, which a script plays here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("num_gpus", "visible", "backend"),
    [
        (0, None, ""),
        (1, None, "colocate"),
        (3, None, "colocate"),
        (4, None, ""),
        (8, None, ""),
        (8, "5,7", "colocate"),
        (8, "0,1,2,3", ""),
        (0, "0", ""),
        (8, "", ""),
    ],
)
def test_with_too_few_gpus_for_three_actors_and_a_learner_the_demo_has_one_engine_in_the_learner(
    tmp_path: Path, num_gpus: int, visible: str | None, backend: str
) -> None:
    smi = tmp_path / "nvidia-smi"
    lines = "".join(
        f"echo 'GPU {index}: NVIDIA (UUID: GPU-{index})'\n" for index in range(num_gpus)
    )
    smi.write_text(f"#!/bin/sh\n{lines}")
    smi.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    printed = subprocess.run(
        ["make", "--dry-run", "demo", "demo-agent", "aligned"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    runs = re.findall(
        r"launch\.train \+experiment=(\w+)[^&\n]*?(?:backend=(\w+))?(?= *&&|\n)", printed
    )
    experiments = ("stage2_3v1", "agent_sums", "rollout_aligned_3v1")
    # The control generates with the learner's own model.
    assert sorted(runs) == sorted([("control", ""), *((name, backend) for name in experiments)])
