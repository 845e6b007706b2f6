"""The lease of a rollout server: it accepts weights from one training run at a time."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

from rollout_actors.server.messages import shortened

LEASE_S = 60.0
"""Seconds without a call of the training run with the lease, after which another run may take the
rollout server. A live run calls more often (`HEARTBEAT_S`).
"""
HEARTBEAT_S = 10.0
"""Seconds between two calls of an otherwise idle training run, which renew its lease."""
OWNER_FILE = "owner.txt"
"""File in a run folder: the user and machine that started the run, and a random identifier."""
RUN_HEADER = "X-Rollmatch-Run"
"""HTTP header with the name of the training run that sends a call, percent-encoded."""


def run_name(folder: Path, *, is_start: bool = False) -> str:
    """Return the name of the training run in this run folder, as rollout servers know it.

    A restarted run has the same name, also on another machine that has the folder.

    `is_start`: write `OWNER_FILE` to the folder if it does not exist.
    """
    file = folder / OWNER_FILE
    try:
        owner = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a user without a name
            user = str(os.getuid())
        # Random letters, because another machine may have a folder of the same path and user.
        owner = f"{user}@{socket.gethostname()} {secrets.token_hex(4)}"
        if is_start:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(owner, encoding="utf-8")
    return f"{folder.absolute()} of {owner}"


def encoded(run: str) -> str:
    """Return the value of the header `RUN_HEADER` for this run name."""
    return quote(run)


def decoded(header: str | None) -> str:
    """Return the run name in a value of the header `RUN_HEADER`; empty: no run."""
    return shortened(unquote(header or ""))


class Lease:
    """A training run's exclusive right to send weights to a rollout server.

    It starts with the run's first weight sync. It ends when the run ends it, or `limit_s` seconds
    after the run's last call.
    """

    def __init__(self, limit_s: float, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._run = ""
        self._since_s = 0.0
        self._called_s = 0.0
        self._calls: Counter[str] = Counter()
        """Number of calls of each run that are not answered yet."""

    def renew(self, run: str) -> None:
        """Extend the lease by the full time if this run has it."""
        if run and run == self._run:
            self._called_s = self._clock_s()

    @contextmanager
    def call(self, run: str) -> Iterator[None]:
        """Keep this run's lease during the `with` block, which handles a call of the run."""
        self.renew(run)
        self._calls[run] += 1
        try:
            yield
        finally:
            self._calls[run] -= 1
            self.renew(run)

    def end(self, run: str) -> None:
        """End the lease if this run has it, so that any run may take it."""
        if run == self._run:
            self._run = ""

    def taken(self, run: str) -> str:
        """Return the reason why this run cannot take the lease; empty if it can."""
        quiet_s = self._clock_s() - self._called_s
        # A long call does not renew the lease while it runs, but its run is alive.
        is_quiet = quiet_s > self._limit_s and not self._calls[self._run]
        if self._run in ("", run) or is_quiet:
            return ""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._since_s))
        return (
            f"it has served the run {self._run} since {since} (last call {quiet_s:.0f} s ago); give"
            " this run its own servers, or wait until that run has ended or has sent no call for"
            f" lease_s = {self._limit_s:g} s"
        )

    def take(self, run: str) -> str:
        """Give the lease to this run, or return the reason why it cannot have it.

        Return an empty string if the run has the lease now.
        """
        if reason := self.taken(run):
            return reason
        if run != self._run:
            self._since_s = time.time()
            self._run = run
        self.renew(run)
        return ""
