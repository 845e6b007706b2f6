"""The console of a command: no terminal controls, a line for each stage of the start, bars."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls but for newline and tab, changes of direction, separators, surrogates."""


def escaped(text: str) -> str:
    """Write what a terminal would obey as `\\x1b` or `\\u202e`; newlines and tabs stay."""
    return _CONTROLS.sub(lambda control: ascii(control[0])[1:-1], text)


class _EscapingConsole(Console):
    """Shows texts of others as they are: terminal controls in them are escaped."""

    def render_str(self, text: str, **options: Any) -> Text:
        # Here, because `Text` drops some controls without a trace.
        return super().render_str(escaped(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(escaped(text), style)


def make_console(stderr: bool = False, **options: Any) -> Console:
    """Return the console of a command: escapes what it prints, and knows no `:emoji:`.

    Args:
        stderr: print to stderr instead of stdout.
        options: of `rich.console.Console`.
    """
    return _EscapingConsole(stderr=stderr, emoji=False, soft_wrap=True, **options)


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
