"""`python -m launch.serve` with an engine that notes how many sequences it samples for at a time (`counting_worker`)."""

from __future__ import annotations

from dataclasses import replace

import launch.serve
from launch.serve_options import ServeOptions, settings_of
from rollout_actors.engine_settings import EngineSettings


def counting(options: ServeOptions) -> EngineSettings:
    return replace(settings_of(options), worker_extension="counting_worker.CountingWorker")


if __name__ == "__main__":
    launch.serve.settings_of = counting
    launch.serve.main()
