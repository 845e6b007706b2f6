"""Lines of a command while its processes start: one for each stage, and on a terminal a bar."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


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
