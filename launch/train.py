"""`python -m launch.train +experiment=stage2_3v1`: the main job from one command.

Nothing heavy is imported before the configuration and the data are known to be sound.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from launch.command import end_on_signals, explained, with_absolute_paths
from shared.config import RunConfig, load_config
from shared.config.derive import batch_algebra

CONF = Path(__file__).resolve().parent.parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(composed: DictConfig) -> None:
    console = Console(soft_wrap=True)
    with explained(console):
        run(load_config(_mapping(composed)), console)


def run(config: RunConfig, console: Console) -> None:
    """The whole job: place, train, report, save; whatever happens, no process stays."""
    from launch.preflight import check_data

    started_s = time.monotonic()
    algebra = batch_algebra(config)
    for line in algebra.describe():
        console.print(line, markup=False, highlight=False)
    config = with_absolute_paths(config)
    facts = check_data(config)
    for line in facts.describe():
        console.print(line, markup=False, highlight=False)

    from launch.cluster import Cluster
    from launch.driver import train
    from launch.pipeline import one_ahead, one_at_a_time
    from launch.telemetry import Telemetry
    from shared.schedule import RunSchedule

    queue = one_ahead if config.stage2_ab.channel_b.enable_pipeline else one_at_a_time
    schedule = RunSchedule(config)
    with Telemetry(config, algebra, console) as telemetry, Cluster(config, max_images=facts.max_images) as cluster:
        end_on_signals()  # ray.init has put a handler of its own in place of ours
        learner, rollouts = cluster.start()
        telemetry.placed(rollouts.names, learner_threads=learner.num_threads)
        console.print(
            f"ready     {', '.join(rollouts.names)} and the learner after {time.monotonic() - started_s:.0f} s; run folder {config.telemetry.run_dir}",
            highlight=False,
        )
        checkpoint = config.telemetry.run_dir / "checkpoint" if config.checkpoint.save_final else None
        train(learner, rollouts, schedule, queue, telemetry, checkpoint=checkpoint)
    improvement = telemetry.improvement()
    if improvement is not None:
        effort = f"B steps: {schedule.num_b_steps}, wall: {time.monotonic() - started_s:.0f} s"
        console.print(f"{config.telemetry.name}: {improvement} ({effort})", highlight=False)


def _mapping(composed: DictConfig) -> dict[str, Any]:
    mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    assert isinstance(mapping, dict)
    return {str(key): value for key, value in mapping.items()}


def _as_schema_overrides(arguments: list[str]) -> list[str]:
    """`a.b=c` becomes `++a.b=c`: any key of the schema may be set from the command line, written in a file or not, and a wrong key gets the schema's answer.

    Options, config groups (`model=...`), Hydra's own keys and overrides with a prefix stay as they are.
    """

    def converted(argument: str) -> str:
        key = argument.split("=", 1)[0]
        plain = "=" in argument and key[:1].isalpha() and not (CONF / key).is_dir() and not key.startswith("hydra")
        return f"++{argument}" if plain else argument

    return [converted(argument) for argument in arguments]


if __name__ == "__main__":
    sys.argv[1:] = _as_schema_overrides(sys.argv[1:])
    main()
