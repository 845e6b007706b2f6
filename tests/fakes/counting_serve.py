"""`rollmatch serve` with an engine that notes how many sequences it samples for at a time
(`counting_worker`).
"""

from __future__ import annotations

import sys
from dataclasses import replace

from launch.cli import read_arguments
from launch.tools.serve import ServeOptions, serve, settings_of

if __name__ == "__main__":
    options = read_arguments(ServeOptions, sys.argv[1:])
    serve(options, replace(settings_of(options), worker_extension="counting_worker.CountingWorker"))
