"""A fork of a warm server is what `python` with the same arguments would have been, for whoever
started it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_server import eventually
from process_family import fork_of, is_alive

from rollout_actors.warm import warm_python

IMPORT = f"import sys; sys.path.insert(0, {str(Path(warm_python.__file__).parent)!r}); import warm_python"
SECONDS = 120.0
"""For something that takes none, on a machine with other work."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of a server that has imported little, and stays while these tests run."""
    folder = new_folder()
    with closing(warm_python.connect(folder, os.environ, preloaded=["fractions"])):
        yield folder


def new_folder() -> Path:
    """A short path, because a socket lives in it."""
    return Path(f"/tmp/rmwarm-{uuid.uuid4().hex[:16]}")


def environment(folder: Path, **variables: str) -> dict[str, str]:
    return os.environ | {warm_python.FOLDER: str(folder)} | variables


def run(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"env": environment(folder), "timeout": SECONDS} | options
    return subprocess.run(
        [*warm_python.command(), *arguments], capture_output=True, text=True, check=False, **options
    )


def start(folder: Path, code: str) -> subprocess.Popen[str]:
    """Returns when the code has printed its first line."""
    command = [*warm_python.command(), "-c", code]
    process = subprocess.Popen(
        command,
        env=environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def ends(process: psutil.Process) -> bool:
    return eventually(lambda: not is_alive(process))


def started_fork(shim: psutil.Process) -> psutil.Process:
    """A shim tells its fork's id in its name, perhaps after the fork has printed something."""
    assert eventually(lambda: fork_of(shim) is not None)
    fork = fork_of(shim)
    assert fork is not None
    return fork


SHOW = """
import json, os, sys
print(json.dumps([sys.argv, sys.path[0], os.getcwd(), os.environ["COLOUR"], sys.stdin.read(), __name__, "fractions" in sys.modules]))
print("to the other stream", file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["code", "module", "file"])
def test_a_fork_has_the_arguments_environment_folder_and_streams_of_its_shim(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "shown.py"
    file.write_text(SHOW)
    below = tmp_path / "below"
    below.mkdir()
    program, first, path = {
        "code": (["-c", SHOW], "-c", ""),
        "module": (["-B", "-m", "shown"], str(file), str(below)),
        "file": ([str(file)], str(file), str(tmp_path)),
    }[kind]
    variables = environment(folder, COLOUR="blue", PYTHONPATH=str(tmp_path))
    done = run(folder, *program, "one", "two words", env=variables, cwd=below, input="said")
    assert (done.returncode, done.stderr) == (0, "to the other stream\n")
    shown = json.loads(done.stdout)
    assert shown[:3] == [[first, "one", "two words"], path, str(below)]
    assert shown[3:] == ["blue", "said", "__main__", True]


@pytest.mark.slow
def test_a_fork_gives_way_to_others_as_its_shim_does(folder: Path) -> None:
    nice = min(os.nice(0) + 3, 19)
    code = "import os; print(os.nice(0))"
    done = run(folder, "-c", code, preexec_fn=lambda: os.setpriority(os.PRIO_PROCESS, 0, nice))
    assert int(done.stdout) == nice


KILL_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
IS_ALONE = "import os; print(os.getpgrp() == os.getpid())"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status", "output", "error"),
    [
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('no such thing')", 1, "", "no such thing\n"),
        ("import sys; sys.exit()", 0, "", ""),
        ("1 / 0", 1, "", "ZeroDivisionError"),
        ("import sys; sys.stdout.close()", 0, "", ""),
        (KILL_ITSELF, -signal.SIGKILL, "", ""),
        ("import atexit; atexit.register(print, 'ended')", 0, "ended\n", ""),
        (IS_ALONE, 0, "True\n", ""),  # Ray kills the process group of a worker that has ended
    ],
)
def test_a_shim_ends_as_its_fork_does(
    folder: Path, code: str, status: int, output: str, error: str
) -> None:
    done = run(folder, "-c", code)
    assert (done.returncode, done.stdout) == (status, output)
    assert error in done.stderr
    assert bool(done.stderr) == bool(error)


def test_forks_have_random_states_of_their_own(folder: Path) -> None:
    drawn = {run(folder, "-c", "import random; print(random.random())").stdout for _ in range(2)}
    assert len(drawn) == 2


@pytest.mark.slow
def test_a_fork_has_the_threads_that_it_asks_for_though_its_server_has_one() -> None:
    folder = new_folder()
    ones = "torch.ones(300, 300)"
    code = f"import torch; print(torch.get_num_threads(), {ones}.matmul({ones}).sum().item())"
    variables = environment(folder, OMP_NUM_THREADS="3,2")
    with closing(warm_python.connect(folder, variables, preloaded=["torch"])):
        assert run(folder, "-c", code, env=variables).stdout == "3 27000000.0\n"
        del variables["OMP_NUM_THREADS"]
        num_cores = len(os.sched_getaffinity(0))
        assert run(folder, "-c", code, env=variables).stdout == f"{num_cores} 27000000.0\n"


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_server_that_was_started_early_forks_and_ends_with_its_block(error, monkeypatch) -> None:
    monkeypatch.delenv(warm_python.FOLDER, raising=False)
    with suppress(KeyboardInterrupt), warm_python.started_early({}, ["fractions"]):
        folder = Path(os.environ[warm_python.FOLDER])
        server = server_of(folder)
        done = run(folder, "-c", "import os, sys; print(os.getppid(), 'fractions' in sys.modules)")
        assert done.stdout.split() == [str(server.pid), "True"]
        if error is not None:
            raise error
    assert not server.is_running()
    assert not folder.exists()
    assert warm_python.FOLDER not in os.environ


def test_another_commands_server_is_used_and_not_ended(folder, monkeypatch) -> None:
    monkeypatch.setenv(warm_python.FOLDER, str(folder))
    with warm_python.started_early({}):
        pass
    assert run(folder, "-c", "").returncode == 0
    assert os.environ[warm_python.FOLDER] == str(folder)


@pytest.mark.slow
def test_a_server_has_the_variables_that_are_named_for_it_and_a_fork_its_own() -> None:
    folder = new_folder()
    variables = environment(
        folder, OMP_WAIT_POLICY="ACTIVE", **{warm_python.VARIABLES: '{"COLOUR": "red"}'}
    )
    with closing(warm_python.connect(folder, variables, preloaded=["fractions"])):
        code = "import os; print(os.environ.get('COLOUR'))"
        assert run(folder, "-c", code, env=variables).stdout == "None\n"
        # Only now: for a moment after its start a process shows no command line.
        expected = {"COLOUR": "red", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        assert expected.items() <= server_of(folder).environ().items()


def test_a_signal_to_the_shim_reaches_the_fork(folder: Path) -> None:
    code = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("here", flush=True)
sys.stdin.read()
"""
    process = start(folder, code)
    process.terminate()
    assert process.wait(SECONDS) == 5


def test_a_fork_ends_with_a_shim_that_was_killed(folder: Path) -> None:
    process = start(folder, "import time; print('here', flush=True); time.sleep(600)")
    fork = started_fork(psutil.Process(process.pid))
    process.kill()
    assert ends(fork)


def test_a_stopped_fork_ends_with_the_parent_of_its_shim(folder: Path) -> None:
    started = [
        *warm_python.command(),
        "-c",
        "import time; print('here', flush=True); time.sleep(600)",
    ]
    code = f"import subprocess, time; subprocess.Popen({started!r}); time.sleep(600)"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(folder), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "here\n"
    (shim,) = psutil.Process(parent.pid).children()
    fork = started_fork(shim)
    fork.suspend()
    parent.kill()
    assert ends(fork)
    assert ends(shim)
    parent.communicate(timeout=SECONDS)


def test_a_pipe_ends_with_the_fork_that_writes_to_it(folder: Path) -> None:
    """The shim holds none of the files that it has handed over."""
    process = start(
        folder, "import os, sys; print('here', flush=True); os.close(1); sys.stdin.read()"
    )
    assert process.stdout is not None
    assert process.stdout.read() == "", "at its end, while the fork is alive"
    assert process.poll() is None
    process.communicate(timeout=SECONDS)


@pytest.mark.slow
def test_multiprocessing_starts_further_forks_of_the_same_server(
    folder: Path, tmp_path: Path
) -> None:
    program = """
import multiprocessing, os, sys
def work(queue):
    queue.put(("fractions" in sys.modules, os.environ["ROLLMATCH_WARM_FOLDER"]))
    sys.exit(7)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(*queue.get(timeout=100))
    process.join(100)
    sys.exit(process.exitcode)
"""
    (tmp_path / "program.py").write_text(program)
    done = run(folder, str(tmp_path / "program.py"))
    assert (done.stdout, done.returncode) == (f"True {folder}\n", 7), done.stderr


@pytest.mark.slow
def test_a_server_that_nobody_is_connected_to_ends_with_its_folder_and_the_next_shim_starts_another() -> (
    None
):
    folder = new_folder()
    with closing(warm_python.connect(folder, os.environ, preloaded=["fractions"])):
        assert run(folder, "-c", "print('forked')").stdout == "forked\n"
        server = server_of(folder)
    assert ends(server)
    assert not folder.exists()
    with closing(warm_python.connect(folder, os.environ, preloaded=["fractions"])):
        assert run(folder, "-c", "print('forked again')").stdout == "forked again\n"


@pytest.mark.slow
def test_forks_end_with_a_server_that_was_killed_and_their_shims_tell() -> None:
    folder = new_folder()
    with closing(warm_python.connect(folder, os.environ, preloaded=["fractions"])):
        process = start(folder, "import time; print('here', flush=True); time.sleep(600)")
        fork = started_fork(psutil.Process(process.pid))
        server_of(folder).kill()
        assert process.wait(SECONDS) == 1
        assert ends(fork)
    shutil.rmtree(folder)


def server_of(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "pid").read_text()))


def run_with(
    preloaded: str, *, before: str = "pass", **variables: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A shim whose server, a new one, imports this module."""
    folder = new_folder()
    program = ["-c", "import sys; print(10); sys.exit(3)"]
    code = f"{IMPORT}\n{before}\nwarm_python.shim({program!r}, preloaded=[{preloaded!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("10\n", 3), done.stderr
    return done, folder


WAIT_FOR_ITS_END = """
import os, pathlib
ask = warm_python._ask_for_fork
def ask_late(*request):
    os.waitpid(int((pathlib.Path(os.environ[warm_python.FOLDER]) / "pid").read_text()), 0)
    ask(*request)
warm_python._ask_for_fork = ask_late
"""
"""The shim asks when its server has ended."""


@pytest.mark.slow
def test_a_fork_needs_no_more_open_files_than_it_has() -> None:
    """The limit is the server's, and some systems begin with a low one."""
    done, _ = run_with(
        "fractions", before="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))"
    )
    assert done.stderr == "", "it was forked"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "reason", "before"),
    [
        ("no_such_module", "No module named", "pass"),
        ("no_such_module", "No module named", WAIT_FOR_ITS_END),
        ("threaded", "1 other threads", "pass"),
    ],
    ids=["a module that is missing", "that of a shim that asks late", "threads"],
)
def test_where_a_server_cannot_start_the_shim_says_so_and_is_an_ordinary_python(
    tmp_path: Path, module: str, reason: str, before: str
) -> None:
    """A fork of a process with threads would have their locks, held as they were."""
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    done, folder = run_with(module, before=before, PYTHONPATH=str(tmp_path))
    assert re.search(rf"warm server ended .*{folder / 'log'}; .*without it", done.stderr)
    assert reason in (folder / "log").read_text()
    shutil.rmtree(folder)


def test_somebody_elses_folder_is_not_used(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(PermissionError, match="not private to this user"):
        warm_python.connect(tmp_path, os.environ)


def test_the_shim_imports_nothing_slow() -> None:
    """It runs for every process."""
    code = f"{IMPORT}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-IS", "-c", code],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    slow = {"asyncio", "email", "logging", "multiprocessing", "runpy", "torch"}
    assert not slow & set(done.stdout.split())
