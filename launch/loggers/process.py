"""The process of one logger: `python -m launch.loggers.process FD LIMIT`.

FD is the descriptor of the pipe to the driver, LIMIT the time limit for an event in seconds. The
process answers every event of the driver with None, or with the logger's error; after an error it
ends. The package's output goes to `RUN/loggers/NAME.log`.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

from launch.loggers.events import (
    AlertEvent,
    EndEvent,
    Event,
    MetricsEvent,
    PicturesEvent,
    RolloutsEvent,
    RunEvent,
    rollout_table,
)
from launch.loggers.packages import LOGGERS, Logger
from launch.run_folder.console import escaped

NICENESS = 5
"""Niceness of a logger's process, so that training steps have priority."""
MARGIN_S = 1
"""The driver ends a logger's process that exceeds its time limit. If the driver was killed, the
process ends itself this many seconds after the limit."""


def main() -> None:
    pipe: Connection[str | None, Event] = Connection(int(sys.argv[1]))
    limit_s = math.ceil(float(sys.argv[2])) + MARGIN_S
    os.nice(NICENESS)
    logger: Logger | None = None
    while True:
        try:
            event = pipe.recv()
        except (EOFError, ConnectionResetError):
            # The driver was killed.
            signal.alarm(limit_s)
            if logger is not None:
                logger.close(failed=True)
            return
        signal.alarm(limit_s)
        try:
            if isinstance(event, RunEvent):
                logger = LOGGERS[event.logger](event)
            else:
                assert logger is not None, "RunEvent is the first event"
                hand_on(event, logger)
        except Exception as error:
            # Any error of a package: the driver reports it, and this process ends.
            traceback.print_exc()
            first_line = str(error).strip().partition("\n")[0]
            with suppress(BrokenPipeError):
                pipe.send(f"{type(error).__name__}: {first_line}")
            sys.exit(1)
        signal.alarm(0)
        # If the driver was killed, the next `recv` shows it.
        with suppress(BrokenPipeError):
            pipe.send(None)
        if isinstance(event, EndEvent):
            return


def hand_on(event: Event, logger: Logger) -> None:
    match event:
        case MetricsEvent():
            logger.metrics(event)
        case PicturesEvent():
            logger.pictures(event)
        case RolloutsEvent():
            try:
                table = rollout_table(event.path, event.kind)
            except (OSError, ValueError) as error:
                # The run's own file: removed meanwhile, or still incomplete on a shared disk.
                print(escaped(f"{event.path}: was not logged: {error}"), flush=True)
                return
            if table.rows:
                logger.table(event.step, event.name, table)
        case AlertEvent():
            logger.alert(event)
        case EndEvent():
            logger.close(failed=event.failed)


if __name__ == "__main__":
    main()
