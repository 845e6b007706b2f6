"""The lease of a server: it takes the weights of one run at a time."""

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
"""Time without a call of a run after which another may take its server; a run that lives calls more
often (`HEARTBEAT_S`).
"""
HEARTBEAT_S = 10.0
"""Time between two calls with which a run renews its lease while it has nothing else to ask."""
OWNER_FILE = "owner.txt"
"""File in a run's folder: the user and machine that started it, and a random identifier."""
RUN_HEADER = "X-Rollmatch-Run"
"""Header in which the calls of a run say whose they are, percent-encoded."""


def run_name(folder: Path, *, is_start: bool = False) -> str:
    """Return the name under which a run holds a lease.

    A restart has it again, also on another machine that has the folder.

    Args:
        is_start: writes `OWNER_FILE` into the folder if it is not there.
    """
    file = folder / OWNER_FILE
    try:
        owner = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a user without a name
            user = str(os.getuid())
        # Random letters: another machine may have another folder of the same path and user.
        owner = f"{user}@{socket.gethostname()} {secrets.token_hex(4)}"
        if is_start:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(owner, encoding="utf-8")
    return f"{folder.absolute()} of {owner}"


def encoded(run: str) -> str:
    """Return the header's text."""
    return quote(run)


def decoded(header: str | None) -> str:
    """Return the run of the header; empty: the call is of no run."""
    return shortened(unquote(header or ""))


class Lease:
    """Is taken with the first phase of a sync and renewed with every call of its run.

    It is free again when the run ends it, or `limit_s` after the run's last call.
    """

    def __init__(self, limit_s: float, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._run = ""
        self._since_s = 0.0
        self._called_s = 0.0
        self._calls: Counter[str] = Counter()
        """Calls of each run that are not answered yet."""

    def renew(self, run: str) -> None:
        """Note that this run calls, or has been answered."""
        if run and run == self._run:
            self._called_s = self._clock_s()

    @contextmanager
    def call(self, run: str) -> Iterator[None]:
        """Renew it for a call of this run, which keeps it until it is answered."""
        self.renew(run)
        self._calls[run] += 1
        try:
            yield
        finally:
            self._calls[run] -= 1
            self.renew(run)

    def end(self, run: str) -> None:
        """Free the lease if this run has it."""
        if run == self._run:
            self._run = ""

    def taken(self, run: str) -> str:
        """Return why this run cannot have it; empty: it can."""
        quiet_s = self._clock_s() - self._called_s
        # A long call renews nothing while it runs, and its run is alive all the same.
        is_quiet = quiet_s > self._limit_s and not self._calls[self._run]
        if self._run in ("", run) or is_quiet:
            return ""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._since_s))
        return (
            f"it serves the run {self._run} since {since} (last call {quiet_s:.0f} s ago); give"
            " this run servers of its own, or wait until that one has ended, or has asked for"
            f" nothing for lease_s = {self._limit_s:g} s"
        )

    def take(self, run: str) -> str:
        """Give it to this run, unless another has it; return why it cannot have it, or nothing."""
        if reason := self.taken(run):
            return reason
        if run != self._run:
            self._since_s = time.time()
            self._run = run
        self.renew(run)
        return ""
