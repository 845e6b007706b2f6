"""The reason why an engine's process has ended, written by that process and read by the one that
started it.

vLLM logs the exception that ends one of its processes (EngineCore, and a worker for each of several
devices) wherever that process writes, and tells the process that started it no more than to look
there. No vllm here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import current_process
from pathlib import Path

FILE = "ROLLMATCH_ENGINE_FAILURE"
"""Environment variable of an engine's processes: the file in which they write their errors down.
Nobody has made it before there is one.
"""
MAX_BYTES = 1 << 20
"""Largest size of that file, which then begins anew: the errors that end a process are the last
ones.
"""
RECENT_S = 3600.0
"""Age at which an error is no longer taken for what ended a process: the engine has survived it."""
POINTS_ELSEWHERE = re.compile("root cause|stack trace", re.IGNORECASE)
"""Words in an error of vLLM's that only says that another process has failed."""
PROCESS_ENDED = "Failed core proc(s)"
EXIT_CODES = re.compile(r"'(\w*(?:EngineCore|Worker)\w*)': (-?\d+)")
"""Two parts of what vLLM raises where a process ended during the start: `Failed core proc(s):
{'EngineCore': -9}`, or `{}` where the code is not there yet.
"""
KEYS = {
    "gpu_memory_utilization": (
        "rollout_matching.vllm.gpu_memory_utilization, or"
        " rollout_matching.vllm.kv_cache_memory_bytes where that is set"
    ),
    "max_model_len": "rollout_matching.vllm.max_model_len, or global_max_length where that is null",
    "max_num_seqs": "rollout_matching.decode_batch_size",
}
"""How the configuration of a run calls what vLLM's errors advise to change."""


class EngineEndedError(RuntimeError):
    """The engine's process is there no more. The message is why."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One error of one process."""

    process: str
    """vLLM's name for it, such as EngineCore."""
    error: str
    """Type and message."""
    traceback: str
    logged_s: float
    """Unix time."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(
            current_process().name,
            f"{type(error).__name__}: {error}",
            "".join(traceback.format_exception(error)),
            time.time(),
        )


class FailureLog(logging.Handler):
    """Writes down every exception that is logged, with the name of this process."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o600)
            with os.fdopen(descriptor, "ab") as file:
                if file.tell() > MAX_BYTES:
                    file.truncate(0)
                file.write((json.dumps(asdict(Failure.of(error))) + "\n").encode())
        except OSError:  # no space left: the process's own output still has it
            self.handleError(record)


def write_failures_down() -> None:
    """Have this process, one of vLLM's, write down what it logs, if it was asked to."""
    if FILE in os.environ:
        logging.getLogger("vllm").addHandler(FailureLog(Path(os.environ[FILE])))


class EngineFailures:
    """The errors that the processes of one engine wrote, for the process that starts them with
    `environment`.
    """

    def __init__(self) -> None:
        self._file = Path(tempfile.gettempdir()) / f"rollmatch-engine-{uuid.uuid4().hex}.jsonl"
        self.environment = {FILE: str(self._file)}

    def first_cause(self) -> Failure | None:
        """Return the error that ended the engine: the last one, unless that says to look at
        another. None where no process has written one down of late.
        """
        try:
            lines = self._file.read_text().splitlines()
        except FileNotFoundError:
            return None
        failures: list[Failure] = []
        for line in lines:
            with suppress(json.JSONDecodeError):  # a process that was killed while it wrote
                failures.append(Failure(**json.loads(line)))
        failures = [failure for failure in failures if time.time() - failure.logged_s < RECENT_S]
        return next(
            (
                failure
                for failure in reversed(failures)
                if not POINTS_ELSEWHERE.search(failure.error)
            ),
            failures[-1] if failures else None,
        )

    def of_error(self, error: Exception) -> tuple[str, str]:
        """Return what was wrong, in short, and the whole story. `error` is what vLLM has raised in
        this process.
        """
        if not POINTS_ELSEWHERE.search(str(error)) or not (
            PROCESS_ENDED in str(error) or self.first_cause()
        ):
            return f"{type(error).__name__}: {error}", ""
        return self.of_end({name: int(code) for name, code in EXIT_CODES.findall(str(error))})

    def of_end(self, exit_codes: Mapping[str, int | None]) -> tuple[str, str]:
        """Return why the engine's process has ended, in short, and the whole story. `exit_codes`,
        by name: None where it has not ended yet.
        """
        killed = {
            name: -code
            for name, code in exit_codes.items()
            if code is not None and code < 0 and code != -signal.SIGTERM
        }
        if killed:
            name, number = next(iter(killed.items()))
            hint = ", as the system does where memory runs out" if number == signal.SIGKILL else ""
            return f"{name} was ended by {signal.Signals(number).name}{hint}", ""
        cause = self.first_cause()
        if cause is None:
            ends = ", ".join(
                f"{name} ended{'' if code is None else f' with status {code}'}"
                for name, code in exit_codes.items()
            )
            return (
                (
                    f"{ends or 'EngineCore ended'} and wrote no error, as where it is killed; see"
                    " what it printed"
                ),
                "",
            )
        meant = "; ".join(f"{name} is {key}" for name, key in KEYS.items() if name in cause.error)
        return f"{cause.process}: {cause.error}" + (f" ({meant})" if meant else ""), cause.traceback

    def remove(self) -> None:
        """Delete what was written down. Twice is harmless."""
        self._file.unlink(missing_ok=True)
