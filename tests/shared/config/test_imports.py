from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from shared.config import load_config
try:
    load_config({"training": {"sed": 1}})
except ValueError as error:
    assert "did you mean 'seed'?" in str(error)
print(*sorted({"torch", "ray", "vllm", "transformers", "hydra", "omegaconf", "scipy"} & set(sys.modules)))
"""


def test_configuration_errors_need_nothing_heavy():
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
