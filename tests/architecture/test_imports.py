"""The import rules of decision 40, by executing the imports and looking at `sys.modules`."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.cli import COMMANDS
from rollout_actors.warm import warm_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "ray", "vllm", "transformers", "hydra", "omegaconf"}
LATE = {"torch", "ray", "vllm", "transformers", "openai", "pandas", "scipy", "sklearn"}
"""Packages that a command imports only after it has read its arguments."""


def modules_of(package: str) -> list[str]:
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


def loaded_after(
    *groups: list[str], python: Sequence[str] = (sys.executable,), apart: str = ""
) -> list[set[str]]:
    """Import the groups one after the other in a fresh process; return what is loaded after each.

    Names are those at the top level of `sys.modules`. `apart`: import these first, and then each
    group in a fork of that process.
    """
    code = (
        f"import importlib, json, os, sys\n{apart}\n"
        "for group in json.loads(sys.argv[1]):\n"
        f"    if {bool(apart)} and os.fork():\n"
        "        assert os.wait()[1] == 0\n"
        "        continue\n"
        "    for name in group: importlib.import_module(name)\n"
        "    names = sorted({name.split('.')[0] for name in sys.modules})\n"
        "    print(json.dumps(names), flush=True)\n"
        f"    if {bool(apart)}: os._exit(0)"
    )
    done = subprocess.run(
        [*python, "-c", code, json.dumps(groups)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [set(json.loads(line)) for line in done.stdout.splitlines()[-len(groups) :]]


def loaded_by(modules: list[str], python: Sequence[str] = (sys.executable,)) -> set[str]:
    return loaded_after(modules, python=python)[0]


def test_shared_is_pure():
    # Both ends of a wire of tensors.
    with_torch = {"shared.weight_sync.gloo"}
    loaded = loaded_by([name for name in modules_of("shared") if name not in with_torch])
    assert not loaded & (HEAVY | {"learner", "rollout_actors", "launch", "PIL"})


def imported_at_the_top_of(name: str) -> set[str]:
    """List the modules that importing this one imports, outside functions and conditions."""
    names: set[str] = set()
    for statement in ast.parse(source_of(name).read_text()).body:
        if isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.module is not None, "no relative imports"
            names.add(statement.module)
            names |= {f"{statement.module}.{alias.name}" for alias in statement.names}
    return names


def source_of(name: str) -> Path:
    return (ROOT / name.replace(".", "/")).with_suffix(".py")


def engine_modules() -> set[str]:
    """Find what imports vllm at its top, or something that does.

    It is left to the engine tests, which import it anyway, ten seconds each.
    """
    modules = [name for name in modules_of("rollout_actors") if source_of(name).is_file()]
    imports = {name: imported_at_the_top_of(name) for name in modules}
    found = {
        name for name, names in imports.items() if "vllm" in {of.split(".")[0] for of in names}
    }
    while more := {name for name, names in imports.items() if name not in found and names & found}:
        found |= more
    return found


ENGINE_MODULES = engine_modules()


def test_the_engine_modules_are_found():
    assert {
        "rollout_actors.engine.vllm_engine",
        "rollout_actors.weight_sync.worker",
        "rollout_actors.backends.colocated_llm",
    } <= ENGINE_MODULES
    assert not ENGINE_MODULES & {
        "rollout_actors.engine.actor",
        "rollout_actors.backends.colocate",
        "rollout_actors.engine.vllm_plugin",
    }


def test_learner_and_rollout_actors_import_neither_each_other_nor_launch_and_ray_only_in_actors():
    """And in what asks actors. Both import torch and transformers, which is done once."""
    with_ray = {
        "rollout_actors.engine.ray_calls",
        "rollout_actors.engine.actor",
        "rollout_actors.environments.training.actor",
    }
    names = [name for name in modules_of("rollout_actors") if name not in ENGINE_MODULES]
    learner, without_ray, everything = loaded_after(
        [name for name in modules_of("learner") if name != "learner.actor"],
        [name for name in names if name not in with_ray],
        names,
        apart="import torch, transformers.generation",
    )
    assert not learner & {"ray", "vllm", "rollout_actors", "launch", "hydra", "omegaconf"}
    assert "ray" not in without_ray and "ray" in everything
    assert not everything & {"learner", "launch", "hydra", "omegaconf", "vllm"}


@pytest.mark.engine
@pytest.mark.long
def test_the_engine_modules_import_neither_learner_nor_launch_nor_ray_themselves():
    for name in sorted(ENGINE_MODULES):
        source = source_of(name).read_text()
        assert "import ray" not in source
        assert "from ray" not in source
    loaded = loaded_by(sorted(ENGINE_MODULES), warm_python.command())
    assert not loaded & {"learner", "launch", "hydra", "omegaconf"}


def test_nobody_imports_launch():
    for package in ("shared", "learner", "rollout_actors"):
        for path in (ROOT / package).rglob("*.py"):
            assert not re.search(r"^\s*(from|import) launch\b", path.read_text(), re.MULTILINE), (
                path
            )


def test_a_wrong_configuration_is_reported_before_anything_heavy_is_imported():
    assert not loaded_by(["launch.train", "launch.preflight"]) & LATE


def test_the_help_of_a_command_imports_nothing_heavy():
    code = (
        "import json, os, sys\n"
        "from contextlib import redirect_stdout\n"
        "from launch.cli import COMMANDS, run_command\n"
        "for name in COMMANDS:\n"
        "    if os.fork():\n"
        "        assert os.wait()[1] == 0, name\n"
        "        continue\n"
        "    sys.argv = ['rollmatch', name, '--help']\n"
        "    os._exit = sys.exit\n"
        "    with redirect_stdout(open(os.devnull, 'w')):\n"
        "        try: run_command()\n"
        "        except SystemExit as end: assert not end.code\n"
        "    loaded = {module.split('.')[0] for module in sys.modules}\n"
        "    loaded |= {'shared.config.run'} & set(sys.modules)\n"
        "    print(json.dumps([name, sorted(loaded)]), flush=True)\n"
        "    break"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    loaded = dict(map(json.loads, printed.splitlines()))
    assert loaded.keys() == COMMANDS.keys()
    assert {
        name: LATE & set(modules) for name, modules in loaded.items() if LATE & set(modules)
    } == {}
    has_schema = {name for name, modules in loaded.items() if "shared.config.run" in modules}
    assert not has_schema & {"train", "preflight", "view", "diff-runs", "replay"}
