"""vLLM finds the transport by its entry point, in every process and however often it asks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from engine_support import small_settings

from rollout_actors.engine import vllm_plugin
from rollout_actors.engine.settings import engine_environment
from rollout_actors.engine.vllm_plugin import register
from shared.weight_sync.transports import TransportKind

SETTINGS = small_settings(Path("model"))


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )


def test_the_plugin_is_installed_as_an_entry_point() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="rollmatch")
    assert entry.value == "rollout_actors.engine.vllm_plugin:register"


def test_registering_again_does_nothing() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()
    for transport in (TransportKind.GLOO, TransportKind.INPROC):
        with pytest.raises(ValueError, match="already registered"):
            WeightTransferEngineFactory.register_engine(transport, "elsewhere", "Other")


@pytest.mark.slow
def test_memory_that_syncs_free_is_there_for_the_next_one() -> None:
    """glibc reads its settings when a process starts. It needs a few rounds to settle, then what is
    freed and taken again costs no page faults.
    """
    code = (
        "import resource, torch\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(30):\n"
        "    before = faults()\n"
        "    [torch.empty(26 << 20, dtype=torch.uint8).fill_(1) for _ in range(3)]\n"
        "print(faults() - before)"
    )
    done = run("-c", code, env=os.environ | engine_environment(SETTINGS))
    assert int(done.stdout) < 1000, "of 20,000 pages"


@pytest.mark.slow
def test_whoever_places_the_actors_need_not_import_vllm_or_torch() -> None:
    code = (
        "import sys, launch.processes.rollout_client, rollout_actors.engine.actor,"
        " rollout_actors.engine.settings; print({'vllm', 'torch'} & set(sys.modules))"
    )
    assert run("-c", code).stdout.strip() == "set()"


ENDING = """
import atexit, multiprocessing, sys
from multiprocessing.util import Finalize
from rollout_actors.engine import vllm_plugin

def engine(ending):
    atexit.register(print, "tidied up")
    Finalize(None, vllm_plugin._end_at_once, exitpriority=vllm_plugin.LAST)
    exec(ending)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(sys.argv[1],), name="EngineCore")
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(4)", 4, ""),
        ("sys.exit('no memory')", 1, "no memory"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_an_engines_process_that_ends_at_once_keeps_its_exit_code_and_says_why(
    tmp_path: Path, ending: str, status: int, said: str
) -> None:
    (tmp_path / "program.py").write_text(ENDING)
    done = run("program.py", ending, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (status, "tidied up\n")
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)


def test_an_engines_process_keeps_its_objects_frozen_at_its_end_unless_its_devices_have_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two devices give back named memory while their modules are taken apart, for which their
    objects have to be seen.
    """
    monkeypatch.delitem(sys.modules, vllm_plugin.SEVERAL_DEVICES, raising=False)
    gc.freeze()
    try:
        vllm_plugin._unfreeze()
        assert gc.get_freeze_count() > 0
        monkeypatch.setitem(sys.modules, vllm_plugin.SEVERAL_DEVICES, vllm_plugin)
        vllm_plugin._unfreeze()
        assert gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()
