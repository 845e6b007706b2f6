"""Measure how long a run waits for a full checkpoint of a 219-million-parameter model.

`python -m benchmarks.save [--layers 24] [--saves 3] [--dtype float32] [--folder FOLDER]`. A learner
takes steps of channel A on the demo's scenes on the CPU, without engines. It saves in the
foreground and in the background (`checkpoint.background`), and prints how long the run waits. For
background saves it also prints the time until the checkpoint is complete, and the duration of
concurrent steps. Both checkpoints of an update must have the same bytes.
"""

from __future__ import annotations

import argparse
import filecmp
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hydra import compose, initialize_config_dir
from transformers.utils import logging

from benchmarks.sync_sides import make_model
from launch.cli import CONF, as_mapping, as_schema_overrides
from launch.tools.demo.scenes import DemoGeometry, make_demo_data
from learner.learner import Learner
from learner.model.ranks import RankTopology, ReceiverGroup
from shared.config import RunConfig, load_config
from shared.schedule import RunSchedule, StepPlan
from shared.weight_sync.transports import TransportKind


def configured(folder: Path, dtype: str, num_steps: int) -> RunConfig:
    overrides = [
        "+experiment=stage2_3v1",
        "model=demo",
        f"model.path={folder / 'model'}",
        f"model.dtype={dtype}",
        f"data.train={folder / 'data' / 'train.jsonl'}",
        f"data.val={folder / 'data' / 'val.jsonl'}",
        f"telemetry.run_dir={folder / 'run'}",
        f"training.max_steps={num_steps}",
        f"stage2_ab.schedule.warmup_steps={num_steps}",
        "training.effective_batch_size=4",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return load_config(as_mapping(compose("train", as_schema_overrides(overrides))))


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def learn(learner: Learner, plans: Iterator[StepPlan]) -> float:
    """Let the learner take its next step; return the seconds that it took."""

    def step() -> None:
        learner.next_requests(next(plans))
        learner.finish_step()

    return seconds_of(step)


def require_same(one: Path, other: Path) -> int:
    """Require that two checkpoint folders have the same files; return their size in bytes."""
    files = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
    others = {path.relative_to(other) for path in other.rglob("*") if path.is_file()}
    assert files == others, f"files in only one checkpoint: {files ^ others}"
    for file in files:
        assert filecmp.cmp(one / file, other / file, shallow=False), f"{file} differs"
    return sum((one / file).stat().st_size for file in files)


def run(folder: Path, options: argparse.Namespace) -> None:
    make_model(folder / "model", options.layers)
    make_demo_data(folder / "data", seed=17, num_train=64, num_val=4, geometry=DemoGeometry.BOXES)
    config = configured(folder, options.dtype, num_steps=100)
    learner = Learner(config, RankTopology(TransportKind.GLOO, (ReceiverGroup(1),)))
    plans = iter(RunSchedule(config).plans())
    learn(learner, plans)  # creates the moments
    quiet = [learn(learner, plans) for _ in range(options.saves)]
    foreground, waits, writes, busy = [], [], [], []
    for _ in range(options.saves):
        one = folder / "foreground"
        other = folder / "background"
        foreground.append(seconds_of(lambda: learner.save(one, "{}")))  # noqa: B023
        started = time.perf_counter()
        reason = learner.save(other, "{}", background=True)
        assert reason is None, reason
        wait = time.perf_counter() - started
        is_written = False
        while not is_written:
            busy.append(learn(learner, plans))
            asked = time.perf_counter()
            is_written = learner.finish_save(wait=False) is not None
            wait += time.perf_counter() - asked
        waits.append(wait)
        writes.append(time.perf_counter() - started)
        size = require_same(one, other)
        print(
            f"{size / 1e9:.2f} GB, identical files: the run waits {foreground[-1]:.2f} s for the"
            f" foreground save, {wait:.2f} s for the background save"
        )
    learner.close()
    medians = [statistics.median(times) for times in (foreground, waits, writes, quiet, busy)]
    waited, waited_beside, whole, step, step_beside = medians
    print(
        f"{options.dtype}, medians: foreground {waited:.2f} s; background {waited_beside:.2f} s,"
        f" complete after {whole:.2f} s; a step takes {step:.2f} s, during a write"
        f" {step_beside:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="rollmatch-", dir=options.folder) as folder:
        run(Path(folder), options)


if __name__ == "__main__":
    main()
