"""The hook in fresh processes, on a fake torchvision: `SCHEMAS` says what the real one needs."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

TORCH = """\
class Library:
    def __init__(self, namespace, kind):
        print("library", namespace, kind)

    def define(self, schema):
        print("define", schema.partition("(")[0])
"""
TORCHVISION = "from torchvision import extension\nprint('torchvision goes on')\n"
DECLARED = ["library torchvision FRAGMENT", "define nms", "define qnms", "torchvision goes on"]


@pytest.mark.parametrize(
    ("program", "has_ops", "printed"),
    [
        ("import torchvision", False, DECLARED),
        ("import torchvision", True, ["torchvision goes on"]),
        ("import json; print('torch' in sys.modules)", False, ["False"]),
        ("torchvision_cpu_hook.install(); import torchvision", False, DECLARED),
        (
            "import inspect, torchvision.extension as e; print(inspect.getsource(e).split()[1])",
            True,
            ["torchvision goes on", "_has_ops():"],
        ),
    ],
    ids=[
        "both schemas are declared before torchvision needs them",
        "nothing is declared where torchvision has its native operators",
        "a process that does not import torchvision loads nothing for it",
        "a second installation changes nothing",
        "torchvision keeps its source for those who look at it",
    ],
)
def test_the_hook_declares_what_torchvision_lacks(tmp_path, program, has_ops, printed):
    files = {
        "torch/__init__.py": "from torch import library\n",
        "torch/library.py": TORCH,
        "torchvision/__init__.py": TORCHVISION,
        "torchvision/extension.py": f"def _has_ops():\n    return {has_ops}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = [
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(SCRIPTS)!r}]",
        "import torchvision_cpu_hook; torchvision_cpu_hook.install()",
        program,
    ]
    # -S: without the hook of the environment that the tests run in.
    command = [sys.executable, "-S", "-c", "\n".join(lines)]
    assert subprocess.check_output(command, text=True, timeout=300).splitlines() == printed


@pytest.mark.slow
def test_torchvision_of_this_environment_is_importable():
    importlib.import_module("torchvision.transforms.v2.functional")
