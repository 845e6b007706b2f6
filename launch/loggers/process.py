"""The process of one logger: `python -m launch.loggers.process FD LIMIT`.

It answers every event of the driver with None, or with what the logger raised, which ends it. What
the package prints goes to `RUN/loggers/NAME.log`.
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
"""Steps go first."""
MARGIN_S = 1
"""The driver ends a process that needs longer than the limit. One that was killed cannot: then the
process ends itself so much later."""


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
                assert logger is not None, "the run comes first"
                hand_on(event, logger)
        except Exception as error:
            # Whatever a package raises: the driver reports it, and this process ends.
            traceback.print_exc()
            first_line = str(error).strip().partition("\n")[0]
            with suppress(BrokenPipeError):
                pipe.send(f"{type(error).__name__}: {first_line}")
            sys.exit(1)
        signal.alarm(0)
        # The next event shows that the driver was killed.
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
                # The run's own file: removed meanwhile, or not whole yet on a shared disk.
                print(escaped(f"{event.path}: is not in this logger: {error}"), flush=True)
                return
            if table.rows:
                logger.table(event.step, event.name, table)
        case EndEvent():
            logger.close(failed=event.failed)


if __name__ == "__main__":
    main()
