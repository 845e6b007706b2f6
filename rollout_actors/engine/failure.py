"""The reason why an engine's process ended: written by that process, read by its parent.

When one of an engine's processes ends (EngineCore, or a worker for each of several devices), vLLM
logs the exception only in the output of that process. Errors in the engine's other processes only
refer to that output. This module does not import vllm.
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
"""Environment variable: path of the file to which an engine's processes write their errors."""
# A file larger than this is emptied before the next error, because the latest matter most.
MAX_BYTES = 1 << 20
# An error older than this did not end the process, because the engine has survived it.
RECENT_S = 3600.0
# Matches a vLLM error that only refers to another process.
POINTS_ELSEWHERE = re.compile("root cause|stack trace", re.IGNORECASE)
# vLLM's error if a process ended during the start: `Failed core proc(s): {'EngineCore': -9}`, or
# `{}` if the exit code is not known yet.
PROCESS_ENDED = "Failed core proc(s)"
EXIT_CODES = re.compile(r"'(\w*(?:EngineCore|Worker)\w*)': (-?\d+)")
KEYS = {
    "gpu_memory_utilization": (
        "rollout_matching.vllm.gpu_memory_utilization, or"
        " rollout_matching.vllm.kv_cache_memory_bytes if that is set"
    ),
    "max_model_len": "rollout_matching.vllm.max_model_len, or global_max_length if that is null",
    "max_num_seqs": "rollout_matching.decode_batch_size",
}
"""Maps options that vLLM's errors recommend to change to keys of this project's configuration."""


class EngineEndedError(RuntimeError):
    """The engine's process has ended. The message says why."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One error that one of an engine's processes has logged."""

    process: str
    """vLLM's name of the process that logged the error, for example EngineCore."""
    error: str
    """Type and message of the exception."""
    traceback: str
    logged_s: float
    """Unix time of the error."""


class FailureLog(logging.Handler):
    """A logging handler that writes every logged exception to a file as a `Failure`."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        try:
            failure = Failure(
                current_process().name,
                f"{type(error).__name__}: {error}",
                "".join(traceback.format_exception(error)),
                time.time(),
            )
            # O_APPEND, because several processes write lines to the same file.
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o600)
            with os.fdopen(descriptor, "ab") as file:
                if file.tell() > MAX_BYTES:
                    file.truncate(0)
                file.write((json.dumps(asdict(failure)) + "\n").encode())
        except OSError:  # disk full: the error is still in the process's output
            self.handleError(record)


def write_failures_down() -> None:
    """Write this vLLM process's later errors to the file that the variable FILE names.

    Does nothing if the variable is not set.
    """
    if FILE in os.environ:
        logging.getLogger("vllm").addHandler(FailureLog(Path(os.environ[FILE])))


class EngineFailures:
    """Finds out why an engine's processes ended, from a file with the errors that they logged.

    The parent starts the processes with the variables of `environment`.
    """

    def __init__(self) -> None:
        self._file = Path(tempfile.gettempdir()) / f"rollmatch-engine-{uuid.uuid4().hex}.jsonl"
        self.environment = {FILE: str(self._file)}

    def first_cause(self) -> Failure | None:
        """Return the error that probably ended the engine; None: no error of the last hour.

        It is the latest error that names a cause, or else the latest error.
        """
        try:
            lines = self._file.read_text().splitlines()
        except FileNotFoundError:
            return None
        # Workers and EngineCore write here in any order. An error that only refers to another
        # process names no cause.
        recent: list[Failure] = []
        for line in lines:
            with suppress(json.JSONDecodeError):  # the process was killed during the write
                failure = Failure(**json.loads(line))
                if time.time() - failure.logged_s < RECENT_S:
                    recent.append(failure)
        for failure in reversed(recent):
            if not POINTS_ELSEWHERE.search(failure.error):
                return failure
        return recent[-1] if recent else None

    def of_error(self, error: Exception) -> tuple[str, str]:
        """Return the reason for an error that vLLM raised in the parent, and a traceback or ""."""
        text = str(error)
        points_to_process = POINTS_ELSEWHERE.search(text) is not None
        if points_to_process and (PROCESS_ENDED in text or self.first_cause()):
            return self.of_end({name: int(code) for name, code in EXIT_CODES.findall(text)})
        return f"{type(error).__name__}: {error}", ""

    def was_killed(self, error: Exception) -> bool:
        """Return whether the start failed because something else killed an engine's process.

        `error` is the error that vLLM raised in the parent.
        """
        text = str(error)
        codes = [int(code) for _, code in EXIT_CODES.findall(text)]
        from_outside = (-signal.SIGKILL, -signal.SIGTERM)  # a crash would happen again
        return (
            PROCESS_ENDED in text
            and self.first_cause() is None
            and all(code in from_outside for code in codes)
        )

    def of_end(self, exit_codes: Mapping[str, int | None]) -> tuple[str, str]:
        """Return the reason why an engine's process ended, and the error's traceback or "".

        `exit_codes` maps process names to exit codes; None: the process has not ended yet.
        """
        for name, code in exit_codes.items():
            # This engine sends SIGTERM itself when it shuts down.
            if code is not None and code < 0 and code != -signal.SIGTERM:
                hint = ""
                if code == -signal.SIGKILL:
                    hint = ", which is the system's signal when memory runs out"
                return f"{name} was ended by {signal.Signals(-code).name}{hint}", ""
        cause = self.first_cause()
        if cause is None:
            ends = ", ".join(
                f"{name} ended{'' if code is None else f' with status {code}'}"
                for name, code in exit_codes.items()
            )
            ends = ends or "EngineCore ended"
            why = "probably killed, often for lack of memory; see the output of the process"
            return f"{ends} without an error, {why}", ""
        reason = f"{cause.process}: {cause.error}"
        meant = "; ".join(f"{name} is {key}" for name, key in KEYS.items() if name in cause.error)
        return f"{reason} ({meant})" if meant else reason, cause.traceback

    def remove(self) -> None:
        """Delete the file with the errors. A second call has no effect."""
        self._file.unlink(missing_ok=True)
