"""The display of a command at work: a line for each stage of the start, on a terminal bars."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StartUp:
    """The start of a command, which begins with this object."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show the body as a stage of the start, by a line when it is done, unless it fails."""
        began_s = time.monotonic()
        columns = (
            TextColumn("start     {task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
        )
        hidden = not self._console.is_terminal
        if hidden:
            self._console.print(f"start     {name} ...", markup=False, highlight=False)
        # Streams stay as they are: Ray looks at those of this process when it starts.
        with Progress(
            *columns,
            console=self._console,
            refresh_per_second=2,
            transient=True,
            disable=hidden,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bar:
            # Without an end, so that it pulses: nobody knows how long an engine takes.
            bar.add_task(name, total=None)
            yield
        now_s = time.monotonic()
        line = f"start     {name}: {now_s - began_s:.1f} s, {now_s - self._began_s:.0f} s in all"
        self._console.print(line, markup=False, highlight=False)


class StepBar:
    """The bar below a run's lines, on a terminal alone: its steps, what is left, and the wait.

    Example: `step 26/160 ━━━━━━╺━━━━━━ 0:04:31 left, waits for rollouts`. The time left is that of
    as many steps as the last ten minutes had; none before two steps have ended.
    """

    def __init__(self, console: Console, max_steps: int) -> None:
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("left, waits for {task.description}", markup=False),
            console=console,
            refresh_per_second=2,
            speed_estimate_period=600.0,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._max_steps = max_steps
        self._first_step = 0
        self._is_shown = False

    def go_on(self, step: int) -> None:
        """Begin behind `step` updates, which say nothing about the time of one."""
        self._first_step = step

    def waits_for(self, what: str) -> None:
        """Show what the run waits for now; the first time show the bar."""
        if not self._is_shown:
            self._is_shown = True
            self._task = self._bar.add_task(what, total=self._max_steps, completed=self._first_step)
            self._bar.start()
        self._bar.update(self._task, description=what)

    def done(self, step: int) -> None:
        """Move to `step` updates."""
        if self._is_shown:
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._is_shown:
            self._bar.stop()
