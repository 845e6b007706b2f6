"""Times the page of a long run, and the rows of one of its steps, as `rollmatch view` serves them.

    python -m benchmarks.view_page [--steps 5000] [--rollouts 1000]

The writer of the rollout log writes one step, and all steps share its file (hard links). Every
rollout has 200 tokens. The page must show what was written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path

from hydra import compose, initialize_config_dir

from launch.cli import CONF, as_mapping, as_schema_overrides
from launch.reports.run_page import as_json, page, step_rows
from learner.rollout_logs.trajectories import trajectory_record
from learner.rollout_logs.writer import StepLog, step_path
from shared.config import load_config
from shared.trajectory import EnvironmentRollout, TrainingExample

TOKENS = 200
METRICS = [f"loss/part_{number}" for number in range(80)]
"""As many metrics as a run has."""


def rollout(position: int) -> EnvironmentRollout:
    ones = [1] * TOKENS
    example = TrainingExample(ones, [-0.5] * TOKENS, ones, 0.25, 0.0, example_id="x")
    head = (position, position // 8, 0.25, {"exact": 0.25}, None, False, 1, TOKENS, 0, 0)
    prompt = [{"role": "user", "content": "a question of some length " * 4}]
    answer = [{"role": "assistant", "content": "an answer " * 80}]
    return EnvironmentRollout(*head, (example,), prompt, answer, "environment-0", 0.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rollouts", type=int, default=1000)
    options = parser.parse_args()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = ["+experiment=env_3v1", f"training.max_steps={options.steps}"]
        config = load_config(as_mapping(compose("train", as_schema_overrides(words))))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "config.json").write_text(config.model_dump_json())
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(1, options.steps + 1):
                values = dict.fromkeys(METRICS, step / 7) | {"time/step_s": 1.0}
                file.write(json.dumps({"step": step, "channel": "B", **values}) + "\n")
        log = StepLog(run / "rollouts")
        log.begin(1)
        for position in range(options.rollouts):
            log.write(trajectory_record(1, rollout(position)))
        log.close()
        first = step_path(run / "rollouts", 1)
        for step in range(2, options.steps + 1):
            os.link(first, step_path(run / "rollouts", step))
        started_s = time.perf_counter()
        html = page({run: config}, run, served=True)
        page_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        rows = step_rows(run, options.steps, config)
        text = as_json(rows)
        step_s = time.perf_counter() - started_s
        data = re.search('id="data">(.*?)</script>', html)
        assert data is not None
        (shown,) = json.loads(data[1])["runs"]
        assert shown["logged"] == list(range(1, options.steps + 1))
        assert shown["curves"][METRICS[-1]]["x"][-1] >= options.steps
        assert [row["position"] for row in json.loads(text)] == list(range(options.rollouts))
        size = first.stat().st_size / 1e6
        print(f"{options.steps} steps of {options.rollouts} rollouts, {size:.1f} MB a step")
        print(f"page      {page_s:.2f} s, {len(html) / 1e6:.1f} MB")
        print(f"step      {step_s:.2f} s, {len(text) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
