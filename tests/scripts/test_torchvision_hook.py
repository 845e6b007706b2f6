"""The hook is tried in fresh processes, on a torchvision of our own making: what the real one needs
is in `SCHEMAS`.
"""

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


@pytest.fixture
def run(tmp_path):
    """Runs a program with the hook installed, beside a fake torch and a fake torchvision; gives the
    lines that it prints.
    """

    def run_program(program: str, *, has_ops: bool) -> list[str]:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("from torch import library\n")
        (tmp_path / "torch" / "library.py").write_text(TORCH)
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text(
            "from torchvision import extension\nprint('torchvision goes on')\n"
        )
        (tmp_path / "torchvision" / "extension.py").write_text(
            f"def _has_ops():\n    return {has_ops}\n"
        )
        start = (
            f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(SCRIPTS)!r}]; import"
            " torchvision_cpu_hook; torchvision_cpu_hook.install()"
        )
        # -S: without the hook of the environment that the tests run in.
        command = [sys.executable, "-S", "-c", f"{start}\n{program}"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=300
        ).stdout.splitlines()

    return run_program


def test_both_schemas_are_declared_before_torchvision_needs_them(run):
    assert run("import torchvision", has_ops=False) == [
        "library torchvision FRAGMENT",
        "define nms",
        "define qnms",
        "torchvision goes on",
    ]


def test_nothing_is_declared_where_torchvision_has_its_native_operators(run):
    assert run("import torchvision", has_ops=True) == ["torchvision goes on"]


def test_a_process_that_does_not_import_torchvision_loads_nothing_for_it(run):
    assert run("import json; print('torch' in sys.modules)", has_ops=False) == ["False"]


def test_a_second_installation_changes_nothing(run):
    assert (
        run("torchvision_cpu_hook.install(); import torchvision", has_ops=False).count("define nms")
        == 1
    )


def test_torchvision_keeps_its_source_for_those_who_look_at_it(run):
    assert (
        run(
            "import inspect, torchvision.extension as e; print('def _has_ops' in"
            " inspect.getsource(e))",
            has_ops=True,
        )[-1]
        == "True"
    )


@pytest.mark.slow
def test_torchvision_of_this_environment_is_importable():
    importlib.import_module("torchvision.transforms.v2.functional")
