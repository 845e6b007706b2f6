"""A command's console: progress, escaped terminal controls, output after the console is lost."""

from __future__ import annotations

import io
import logging
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

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
"""Characters to escape: controls except newline and tab, changes of text direction, line and
paragraph separators, surrogates."""


def escaped(text: str) -> str:
    """Escape terminal controls, as `\\x1b` or `\\u202e`; newlines and tabs stay."""
    return _CONTROLS.sub(lambda control: ascii(control[0])[1:-1], text)


class EscapedRecord(logging.LogRecord):
    """A log record with escaped terminal controls, for `logging.setLogRecordFactory`."""

    def __init__(self, *fields: Any, **more: Any) -> None:
        super().__init__(*fields, **more)
        # It may also be False, because callers give `exc_info=` a condition.
        if self.exc_info and self.exc_info[0] is not None:
            self.exc_text = escaped(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:
        return escaped(super().getMessage())


class _EscapingConsole(Console):
    """A console that escapes terminal controls in all texts."""

    def render_str(self, text: str, **options: Any) -> Text:
        # Escaped here, because `Text` drops some controls silently.
        return super().render_str(escaped(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(escaped(text), style)


def make_console(stderr: bool = False, **options: Any) -> Console:
    """Return a command's console, which escapes terminal controls and does not expand `:emoji:`.

    Args:
        stderr: print to stderr instead of stdout.
        options: options of `rich.console.Console`.
    """
    return _EscapingConsole(stderr=stderr, emoji=False, soft_wrap=True, **options)


CONSOLE_LOG = "console.log"
"""File in a run's folder that gets the console's lines after the console is lost."""


FULL_S = 60.0
"""Longest wait in seconds for a full, non-blocking console. Then the console counts as lost."""


class _ConsoleStream(io.TextIOWrapper):
    """Standard output or error, which continues in a file if the console is lost.

    When a write fails (a closed terminal, `| head`, a full disk), the file descriptor itself is
    moved to `CONSOLE_LOG`, so that libraries and child processes continue there, too.
    """

    # Not a raw stream below the buffer: a signal between write and return would repeat the line.

    folder: ClassVar[Path | None] = None
    """The run's folder. While it is None, the lines of a lost console go to /dev/null."""
    lost: ClassVar[dict[int, str]] = {}
    """Why a file descriptor no longer writes to the console, by descriptor."""

    def write(self, text: str, /) -> int:
        """Write like any text stream. If that fails, `flush` writes what is in the buffer."""
        try:
            return super().write(text)
        except OSError:
            self.flush()
            return len(text)

    def flush(self) -> None:
        """Write the buffers, to the log or to /dev/null if the console refuses them."""
        while True:
            try:
                return super().flush()
            except OSError as error:
                # A full pipe that another process has made non-blocking may have space later.
                is_full = isinstance(error, BlockingIOError)
                if is_full and select.select([], [self.fileno()], [], FULL_S)[1]:
                    continue
                is_log_lost = self.fileno() in self.lost
                self.lost[self.fileno()] = str(error)
                _move(self.fileno(), None if is_log_lost else self.folder, str(error))


def outlive_console() -> None:
    """Let this command continue if its standard output or error cannot be written.

    Does nothing to streams that Python did not create, as in a test.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # closed before the start: `>&-`
            if not _is_open(descriptor):
                os.dup2(null, descriptor)
            elif descriptor != null:  # another file of this process has this number
                descriptor = os.dup(null)
        if name != "stdin":
            if stream is None:
                _ConsoleStream.lost[descriptor] = "it was closed before the start"
            lasting = _ConsoleStream(
                io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False)),
                encoding=stream.encoding if stream else "utf-8",
                errors="backslashreplace",
                line_buffering=(
                    os.isatty(descriptor)
                    or name == "stderr"
                    or (stream is not None and stream.write_through)  # `python -u`
                ),
            )
            setattr(sys, name, lasting)
    if null > 2:
        os.close(null)


def keep_lost_console(folder: Path) -> None:
    """Write all further lines of a lost console to `CONSOLE_LOG` in this run folder."""
    _ConsoleStream.folder = folder
    for descriptor, why in _ConsoleStream.lost.items():
        _move(descriptor, folder, why)


def _move(descriptor: int, folder: Path | None, why: str) -> None:
    """Redirect the descriptor to the log in the folder, or else to /dev/null."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    line = f"{now} the console could not be written ({why}); its lines continue here\n"
    path = Path(os.devnull) if folder is None else folder / CONSOLE_LOG
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError:  # other code waits for the run's disk and reports it; this is only the console
        file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, descriptor)
    os.close(file)
    with suppress(OSError):  # on a full disk the next line is refused, too, and goes to /dev/null
        os.write(descriptor, line.encode(errors="backslashreplace"))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


SHOW_EVERY_S = 5.0
"""Least time in seconds between two lines about the progress of one wait."""


class Wait:
    """A wait of the command, open in its `with` block; it shows how much of the work is done."""

    _open: ClassVar[list[Wait]] = []

    def __init__(self, console: Console, on_bar: Callable[[int, int, str], object]) -> None:
        """`on_bar(done, total, what)` shows the progress on the terminal, if there is one."""
        self._console = console
        self._on_bar = on_bar
        self._shown_s = time.monotonic()

    def __enter__(self) -> Wait:
        self._open.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.remove(self)

    @classmethod
    def count(cls, label: str, done: int, total: int, what: str) -> None:
        """Report that `done` of `total` parts of the work of the innermost open wait are done.

        A terminal shows it in its bar. Elsewhere a line is printed, at most every `SHOW_EVERY_S`
        seconds. When all is done, it is printed at once.

        Example: `Wait.count("data", 2, 5, "images are checked")`.
        """
        wait = cls._open[-1] if cls._open else cls(make_console(), lambda *_: None)
        now_s = time.monotonic()
        wait._on_bar(done, total, what)
        is_late = not wait._console.is_terminal and now_s - wait._shown_s > SHOW_EVERY_S
        if is_late or done == total:
            wait._shown_s = now_s
            line = f"{label:<10}{done} of {total} {what}"
            wait._console.print(line, markup=False, highlight=False)


class StartUp:
    """Prints the stages of a command's start-up with their durations.

    The total duration counts from the creation of this object.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()

    @contextmanager
    def stage(self, name: str, label: str = "start") -> Iterator[None]:
        """Show the `with` block as a stage of the start-up; print its seconds if it succeeds.

        `label`: first word of the line.
        """
        began_s = time.monotonic()
        columns = (
            TextColumn(f"{label:<10}{{task.description}}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
        )
        hidden = not self._console.is_terminal
        if hidden:
            self._console.print(f"{label:<10}{name} ...", markup=False, highlight=False)
        # The streams are not redirected, because Ray inspects them when it starts.
        with Progress(
            *columns,
            console=self._console,
            refresh_per_second=2,
            transient=True,
            disable=hidden,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bar:
            # Without a total, so that it pulses: the duration is unknown.
            task = bar.add_task(name, total=None)

            def on_bar(done: int, total: int, what: str) -> None:
                text = f"{name}, {done} of {total} {what}"
                bar.update(task, completed=done, total=total, description=text)

            with Wait(self._console, on_bar):
                yield
        now_s = time.monotonic()
        seconds = f"{now_s - began_s:.1f} s, {now_s - self._began_s:.0f} s in total"
        line = f"{label:<10}{name}: {seconds}"
        self._console.print(line, markup=False, highlight=False)

    def note(self, line: str) -> None:
        """Print a line between two stages of the start-up."""
        self._console.print(line, markup=False, highlight=False)


class StepBar:
    """The progress bar below a run's lines, only on a terminal.

    Example: `step 26/160 ━━━━━━╺━━━━━━ 0:04:31 left, waits for rollouts`. The estimate of the time
    left is from the steps of the last ten minutes, as soon as two steps have ended.
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
        self._console = console
        self._max_steps = max_steps
        self._first_step = 0
        self._is_shown = False
        self._is_waiting = False

    def go_on(self, step: int) -> None:
        """Start the bar at `step` updates, which do not count for the estimate of the time left."""
        self._first_step = step

    @contextmanager
    def waits_for(self, what: str) -> Iterator[None]:
        """Show that the run waits for `what` in the `with` block. The first call shows the bar.

        Has no effect in the `with` block of another call, whose text stays.
        """
        if self._is_waiting:
            yield
            return
        if not self._is_shown:
            self._is_shown = True
            self._task = self._bar.add_task(what, total=self._max_steps, completed=self._first_step)
            self._bar.start()
        self._bar.update(self._task, description=what)
        self._is_waiting = True

        def on_bar(done: int, total: int, part: str) -> None:
            self._bar.update(self._task, description=f"{what}, {done} of {total} {part}")

        try:
            with Wait(self._console, on_bar):
                yield
        finally:
            self._is_waiting = False

    def done(self, step: int) -> None:
        if self._is_shown:
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        if self._is_shown:
            self._bar.stop()
