"""The warm server: a Python process with torch and vLLM imported, from which engines are forked.

An engine needs two processes (its actor and vLLM's EngineCore), and each spends more than 10 s of a
core on the same imports. So do a learner rank and an environment actor. Therefore a run has a *warm
server* on each machine: the driver starts its own before it checks the run (`started_early`), and
elsewhere the first such process starts it. It imports torch, transformers and vllm once, has no
threads, and afterwards only forks. The parts of this file:

- The *shim* runs in place of `python`: Ray starts it for an actor (`py_executable` of a runtime
  environment), multiprocessing for EngineCore (`set_executable`). It sends arguments, environment,
  working folder and open files to the server, and requests a fork. It remains as the process that
  its parent knows. It exits with the fork's status and forwards signals. The fork is killed if the
  shim is killed, or `ORPHAN_S` after the parent's end, which a stopped fork would not notice.
- The *server* ends when it has had no connection for `IDLE_S`. Its forks end with it.
- The *fork* does what a new interpreter would do. It has the server's limits and processors, and a
  new `LD_PRELOAD` has no effect.

Runs never share a server. If no server is available, the shim reports it and becomes an ordinary
`python`. Engines on a GPU are never forked, because a fork cannot use CUDA.

Example:
    ROLLMATCH_WARM_FOLDER=/tmp/warm python -IS rollout_actors/warm/warm_python.py -c "import vllm"

The shim runs for every process, so this file imports only the standard library at the top.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypedDict

# Modules of this project are not imported, because a fork runs the code that is on disk.
PRELOADED = (
    "torch",
    "transformers",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3_vl",
)
# Modules that vllm and transformers would import too. Ray reads its settings from the environment
# at import, so each fork imports it again. The others are not needed here: they take 2 s, and
# pyarrow starts a thread.
HIDDEN = ("ray", "sklearn", "pandas", "pyarrow")
IDLE_S = 3.0  # time without connections after which a server ends
START_S = 240.0  # limit for all imports, on a machine where other processes do the same
REQUEST_S = 10.0  # limit for a shim to send its request
LOOK_S = 2.0  # interval of the checks of the parent
ORPHAN_S = 5.0  # time for a fork to end by itself after its parent's end
FOLDER = "ROLLMATCH_WARM_FOLDER"
"""Environment variable: folder with the socket of the warm server to use. A fork inherits it."""
VARIABLES = "ROLLMATCH_WARM_VARIABLES"
"""Environment variable: a JSON object of variables for the warm server's imports, not for forks."""
# First word of a shim in `ps -o comm`, followed by the process id of its fork.
NAME = "warm"

# OpenMP reads the second variable when torch is imported, for all forks. Threads that spin while
# they wait would slow down a learner next to engines by a factor of tens.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_THIS_FILE = Path(__file__).resolve()
_MAX_FILES = 253  # the most that Linux sends over a socket at once
_LENGTH = struct.Struct("!I")
_STATUS = struct.Struct("!i")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def command() -> list[str]:
    """Return the command to start in place of `python`, so that a warm server forks the process."""
    return [sys.executable, "-IS", str(_THIS_FILE)]


def run_folder() -> str:
    """Return the path of the folder for the sockets of this run's warm servers, one per machine.

    It is created on each machine when the first process is forked there.
    """
    return os.environ.setdefault(FOLDER, f"/tmp/rollmatch-warm-{uuid.uuid4().hex[:16]}")


@contextmanager
def started_early(
    variables: Mapping[str, str], preloaded: Sequence[str] = PRELOADED
) -> Iterator[None]:
    """Start this run's warm server now, and end it with the `with` block.

    Otherwise its first fork starts it, and waits for all its imports. For `variables` see
    `VARIABLES`. Nothing is done if the environment already names a folder.
    """
    if FOLDER in os.environ:
        yield
        return
    folder = Path(run_folder())
    try:
        environment = {**os.environ, VARIABLES: json.dumps(variables)}
        connection = connect(folder, environment, preloaded)
    except OSError:  # each shim says why, and becomes an ordinary python
        yield
        return
    try:
        with connection:
            yield
    finally:
        del os.environ[FOLDER]
        with suppress(OSError):  # it did not start, or has ended by itself
            pid = int((folder / "pid").read_text())
            if os.waitpid(pid, os.WNOHANG) == (0, 0):  # its id is not another process's
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def shim(arguments: Sequence[str], preloaded: Sequence[str] = PRELOADED) -> NoReturn:
    """Run `python *arguments` in a fork of the warm server, and act as that process.

    This process forwards signals to the fork and ends with the fork's exit status.
    """
    parent = os.getppid()
    folder = Path(os.environ[FOLDER])
    reason = f"the warm server ended instead of forking; see {folder / 'log'}"
    pid: int | None = None
    early: list[int] = []

    def forward(received: int, _frame: object) -> None:
        if pid is None:
            early.append(received)
        else:
            _kill(pid, received)

    try:
        connection = connect(folder, os.environ, preloaded)
        # The server answers after all its imports, which takes minutes on a busy machine.
        connection.settimeout(START_S)
        files = _open_files(connection)
        # Before the fork exists, because it may run before this process learns its id.
        for number in _FORWARDED:
            signal.signal(number, forward)
        _ask_for_fork(connection, arguments, files)
        pid = _receive_number(connection)
        connection.settimeout(None)
    except ConnectionError:  # it ended before it had the request
        pass
    except OSError as error:  # a timeout too
        reason = f"no warm server in {folder}: {error or type(error).__name__}"
    if pid is None:
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        for received in early:
            os.kill(os.getpid(), received)
        message = f"rollmatch: {reason}; starting without it, which takes 10 s longer"
        print(message, file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *arguments])
    for received in early:
        _kill(pid, received)
    Path("/proc/self/comm").write_text(f"{NAME} {pid}")
    # A pipe's reader waits until the last writer has closed it, so only the fork may have it open.
    for file in files:
        os.close(file)
    while not select.select([connection], [], [], LOOK_S)[0]:
        if os.getppid() != parent:
            if not select.select([connection], [], [], ORPHAN_S)[0]:
                _kill(pid, signal.SIGKILL)
            break
    status = _receive_number(connection)
    if status is None:  # the server has died
        _kill(pid, signal.SIGKILL)
        os._exit(1)
    # The fork was killed by a signal. This process ends by the same one, so that its parent sees
    # the same status.
    if status < 0:
        with suppress(OSError):  # the action of SIGKILL cannot be changed
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def connect(
    folder: Path, environment: Mapping[str, str], preloaded: Sequence[str] = PRELOADED
) -> socket.socket:
    """Connect to the warm server whose socket is in this folder. Start it if it is not running.

    `environment` and `preloaded` are the variables and the imported modules of a new warm server.
    Raises OSError if other users can write to the folder, or no socket can be created in it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is not private to this user, so another user could read this process's"
            " environment there; remove it"
        )
    address = str(folder / "socket")
    connection = socket.socket(socket.AF_UNIX)
    with (folder / "lock").open("w") as lock:  # a server that is about to end holds it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(address)
            return connection
        # A killed server has left its socket. The lock keeps others from making one now.
        Path(address).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener, (folder / "log").open("ab") as log:
            listener.bind(address)
            listener.listen(128)
            server = [sys.executable, str(_THIS_FILE), "--server", str(folder)]
            process = subprocess.Popen(
                [*server, str(listener.fileno()), *preloaded],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                # Ctrl-C must reach the processes that started something, not the warm server.
                start_new_session=True,
                env={**environment, **json.loads(environment.get(VARIABLES, "{}")), **_ONE_THREAD},
                cwd="/",
            )
            (folder / "pid").write_text(str(process.pid))
            connection.connect(address)
    return connection


def _open_files(connection: socket.socket) -> list[int]:
    """Return the descriptors of the files that this process has inherited."""
    files = []
    for number in sorted(int(file.name) for file in Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the descriptor of the listing itself
            os.fstat(number)
            files.append(number)
    files.remove(connection.fileno())
    if len(files) > _MAX_FILES:
        raise OSError(f"{len(files)} open files are too many to pass on (at most {_MAX_FILES})")
    return files


def _ask_for_fork(
    connection: socket.socket, arguments: Sequence[str], files: Sequence[int]
) -> None:
    request: _Request = {
        "arguments": list(arguments),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "files": files,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }
    text = json.dumps(request).encode("utf-8")
    socket.send_fds(connection, [_LENGTH.pack(len(text))], files)
    connection.sendall(text)


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _receive_number(connection: socket.socket) -> int | None:
    data = _receive(connection, _STATUS.size)
    return None if data is None else int(_STATUS.unpack(data)[0])


def _receive(connection: socket.socket, size: int) -> bytes | None:
    """Return `size` bytes; None if the other end has closed."""
    data = b""
    while len(data) < size:
        try:
            more = connection.recv(size - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            return None
        data += more
    return data


def serve(folder: Path, listener: socket.socket, preloaded: Sequence[str]) -> None:
    """Be the warm server: import the modules, then fork a process for each shim that connects.

    It returns when no process has been connected for some seconds.
    """
    import gc
    import importlib

    gc.disable()  # it would take a fifth of the imports' time
    sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]  # a module that is None cannot be imported
    for name in preloaded:
        importlib.import_module(name)
    for name in HIDDEN:
        del sys.modules[name]
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    if num_threads != 1:
        raise RuntimeError(
            f"a fork would inherit the locks of {num_threads - 1} other threads; set"
            " OMP_NUM_THREADS=1"
        )
    python = folder / "python"
    python.write_text("#!/bin/sh\nexec " + shlex.join(command()) + ' "$@"\n')
    python.chmod(0o700)
    if not os.access(python, os.X_OK):
        raise RuntimeError(f"{python} cannot be run: {folder} is mounted noexec")
    # Forks do not collect frozen objects. A collection would copy every memory page of them.
    gc.collect()
    gc.freeze()
    gc.enable()
    _Server(folder, listener).run()
    shutil.rmtree(folder, ignore_errors=True)  # after a failure the log remains


class _Request(TypedDict):
    """A shim's request to the server, as JSON."""

    arguments: list[str]
    """The arguments of `python`."""
    environment: dict[str, str]
    folder: str
    """Working folder."""
    files: Sequence[int]
    """Numbers, in the shim, of the open files that are sent with the request."""
    nice: int
    """Nice value of the shim. Ray gives its workers another than the driver's."""


class _Server:
    """The warm server's loop: one thread waits for connections, requests and ended forks."""

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self._folder = folder
        self._listener = listener
        self._forks: dict[socket.socket, int | None] = {}
        """Process id of each connection's fork; None before the shim has sent its request."""
        self._woken, self._wake = os.pipe()
        """Both ends of a pipe that wakes `select` when a fork ends. SIGCHLD itself does not."""

    def run(self) -> None:
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        idle_since_s = time.monotonic()
        while True:
            waited_for: list[Any] = [self._listener, self._woken, *self._forks]
            ready = select.select(waited_for, [], [], 1.0)[0]
            if self._listener in ready:
                with suppress(OSError):  # too many open files: retried in the next iteration
                    connection = self._listener.accept()[0]
                    # A shim that stops during its request would block all others.
                    connection.settimeout(REQUEST_S)
                    self._forks[connection] = None
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._report_ended()
            for connection in ready:
                if connection in self._forks:
                    self._answer(connection)
            if self._forks:
                idle_since_s = time.monotonic()
            elif time.monotonic() - idle_since_s > IDLE_S and self._has_closed():
                return

    def _report_ended(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for connection, fork in list(self._forks.items()):
                    if fork == pid:
                        self._send(connection, os.waitstatus_to_exitcode(status))
                        self._forget(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Handle a request. If the shim has ended instead, kill its fork."""
        fork = self._forks[connection]
        if fork is not None:
            _kill(fork, signal.SIGKILL)
            self._forget(connection)
            return
        received = _receive_request(connection)
        if received is None:
            self._forget(connection)
            return
        request, files = received
        # Buffered output would be written twice: here and by the fork.
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            fork = os.fork()
        except OSError as error:  # no processes or memory left: the shim becomes plain python
            print(f"cannot fork: {error}", flush=True)
            fork = None
        if fork == 0:
            # The ends of the fork's own children must not wake the server.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # If the fork kept the server's files open, shims could not detect the server's end.
            sockets = [self._listener, *self._forks]
            for file in (self._woken, self._wake, *(each.detach() for each in sockets)):
                os.close(file)
            _run_as(self._folder, request, files)
        for file in files:
            os.close(file)
        if fork is None:
            self._forget(connection)
            return
        self._forks[connection] = fork
        self._send(connection, fork)

    def _send(self, connection: socket.socket, number: int) -> None:
        with suppress(OSError):  # the shim has ended
            connection.sendall(_STATUS.pack(number))

    def _forget(self, connection: socket.socket) -> None:
        del self._forks[connection]
        connection.close()

    def _has_closed(self) -> bool:
        """Return whether the server may end, because no shim is connecting to it.

        In this case remove the socket, so that later shims start a new server.
        """
        import select

        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if select.select([self._listener], [], [], 0)[0]:
                return False
            (self._folder / "socket").unlink(missing_ok=True)
            return True


def _receive_request(connection: socket.socket) -> tuple[_Request, list[int]] | None:
    """Return a shim's request and files; None if the shim has ended or stopped sending."""
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, _MAX_FILES)
        text = _receive(connection, _LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None
    except OSError:
        text = None
    if text is not None:
        return json.loads(text), files
    for file in files:
        os.close(file)
    return None


def _run_as(folder: Path, request: _Request, files: Sequence[int]) -> NoReturn:
    """Act as the requested process, in the fork."""
    import threading

    error: BaseException | None = None
    try:
        _take_over(folder, request, files)
        _program(request["arguments"])()
    except BaseException as raised:
        error = raised
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    finally:
        end_at_once(error)


def end_at_once(error: BaseException | None) -> NoReturn:
    """End this process as Python does, but without freeing its modules, which takes 4 s.

    `error` is the exception that ends the process; None: there is none.
    """
    import atexit

    status = 0 if error is None else 1
    try:
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the reader has ended, or the stream is closed
                stream.flush()
        os._exit(status & 0xFF)


def _take_over(folder: Path, request: _Request, files: Sequence[int]) -> None:
    """Take over the shim's open files, environment and working folder.

    Also start a session (`setsid`), and seed the random generators.
    """
    import multiprocessing.spawn
    import random

    # Not if the program is a file, as Ray's worker is: Ray could no longer set its own title.
    if request["arguments"][0].startswith("-"):
        import setproctitle

        setproctitle.setproctitle(shlex.join([sys.executable, *request["arguments"]]))
    os.setsid()  # Ray kills a worker's process group, which must not be the server's
    # Moved to numbers that are not needed, because `dup2` closes the file that has the number.
    free = max([*request["files"], *files], default=2) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, free) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"
        stream = open(number, mode, buffering=1, closefd=False, errors="surrogateescape")  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    with suppress(PermissionError):  # only root lowers it
        os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.environ.clear()
    os.environ.update(request["environment"] | {FOLDER: str(folder)})
    os.chdir(request["folder"])
    multiprocessing.spawn.set_executable(str(folder / "python"))
    # Otherwise all forks would draw the same numbers, from the server's state.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:  # it has read the server's variables
        # "4,2": 2 threads are for nested loops
        num_threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        is_number = num_threads.isdecimal() and int(num_threads) > 0
        sys.modules["torch"].set_num_threads(
            int(num_threads) if is_number else len(os.sched_getaffinity(0))
        )


def _program(arguments: Sequence[str]) -> Callable[[], object]:
    """Return the program in the arguments of `python`: `-c CODE`, `-m MODULE` or a file."""
    import runpy
    import types

    rest = list(arguments)
    # Other flags have no effect here.
    while rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
        if rest.pop(0) in ("-X", "-W"):
            rest.pop(0)
    kind = rest.pop(0) if rest[0] in ("-c", "-m") else ""
    first = {"-c": "", "-m": str(Path.cwd()), "": str(Path(rest[0]).parent)}[kind]
    sys.path[:0] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["-c", *rest[1:]] if kind == "-c" else rest
    if kind == "-m":
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        return lambda: exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    main.__file__ = rest[0]
    return lambda: exec(compile(Path(rest[0]).read_bytes(), rest[0], "exec"), main.__dict__)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        with suppress(ValueError):
            sys.path.remove(str(_THIS_FILE.parent))  # a fork uses the folders of its program
        serve(Path(sys.argv[2]), socket.socket(fileno=int(sys.argv[3])), sys.argv[4:])
    else:
        shim(sys.argv[1:])
