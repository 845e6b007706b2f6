"""The page of one or more runs: one HTML file with curves, findings, faults, and rollouts.

Figures are read from the files that a run writes, not computed again. The page has the curves of
all steps; curves of more than `MAX_POINTS` steps are averaged. It has the rollouts only of some
steps (`MAX_BYTES`), because a long run has millions. The file of a step in `rollouts/` is the index
of its rollouts: a step is read when it is asked for.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from launch.doctor.learning import VERDICT, read_findings
from launch.inspect.diff_runs import computed, differences, shown
from launch.inspect.sample_pages.html import render
from launch.loggers.events import as_cell, sample_row, trajectory_row
from launch.run_folder.ledger import LEDGER
from launch.run_folder.saved_run import read_run
from learner.rollout_logs import samples, trajectories
from learner.rollout_logs.samples import RolloutRecord
from learner.rollout_logs.trajectories import TrajectoryRecord
from learner.rollout_logs.writer import logged_steps, step_path
from shared.config import RunConfig
from shared.config.pipeline import Channel
from shared.errors import ConfigError
from shared.metrics import metric_of
from shared.run_files import cannot_write, read_lines, read_steps, replace_file
from shared.trajectory import group_advantages

PAGE = "report.html"
"""Name of the page in a run's folder."""
COMPARED = "compared.html"
"""Name of the page of several runs, in the folder of the first."""
MAX_POINTS = 500
"""Maximum number of points of a curve, about as many as a screen shows."""
MAX_BYTES = 12_000_000
"""Maximum size of the rollout logs that a page reads by itself, the newest steps first."""
SEED = "training.seed"
FAULTS = (
    *("rollout/num_replaced", "optim/num_skipped", "rollout/num_failed"),
    *("rollout/num_reward_errors", "rollout/num_given_up"),
)
"""Metrics that count faults and repairs."""

Line = Mapping[str, Any]
Row = dict[str, Any]


def write_page(runs: Mapping[Path, RunConfig], path: Path, step: int | None = None) -> None:
    """Write the page of runs, given by folder, to `path`.

    `step`: the step whose rollouts the page contains; None: the newest steps (`MAX_BYTES`).

    Raises StorageError if `path` cannot be written, OSError if a run's file cannot be read,
    ConfigError if a run has no log of the step, and RecordError for a damaged line.
    """
    text = page(runs, path.parent, step)
    try:
        replace_file(path, text)
    except OSError as error:
        remedy = "free space or permit writing there, or choose another file with out="
        raise cannot_write(path, error, remedy=remedy) from error


def page(
    runs: Mapping[Path, RunConfig],
    where: Path,
    step: int | None = None,
    *,
    served: bool = False,
) -> str:
    """Return the page of runs, given by folder, as HTML.

    Args:
        where: folder of the page, for its links to the runs' files.
        served: a server answers the page's requests for further steps and samples.
    """
    metrics = [read_steps(run / "metrics.jsonl") for run in runs]
    last = max((lines[-1]["step"] for lines in metrics if lines), default=1)
    width = -(-last // MAX_POINTS)
    changes = changed_keys(list(runs))
    names = [config.telemetry.name for config in runs.values()]
    if len(set(names)) < len(names):
        names = [run.resolve().name for run in runs]
    # Runs that differ only in their seed are one setting, and are drawn as a band.
    settings = [[values[n] for key, values in changes if key != SEED] for n in range(len(runs))]
    shown_runs = [
        {
            "name": names[n],
            "setting": settings.index(settings[n]),
            "link": str(n) if served else quote(os.path.relpath(run, where)),
            **_run_data(run, config, metrics[n], width),
        }
        for n, (run, config) in enumerate(runs.items())
    ]
    curve_names = {name for run in shown_runs for name in (*run["curves"], *run["heldOut"])}
    known = {name: metric_of(name) for name in (name.split(",")[0] for name in curve_names)}
    data = {
        "served": served,
        "width": width,
        "meanings": {name: metric.meaning for name, metric in known.items() if metric is not None},
        "runs": shown_runs,
        "changes": changes,
        "rollouts": [
            {one: step_rows(run, one, config) for one in _embedded(run, step, served=served)}
            for run, config in runs.items()
        ],
    }
    return render(
        "run.html",
        heading=names[0] if len(names) == 1 else f"{len(names)} runs",
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        data=Markup(as_json(data)),
    )


def changed_keys(runs: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """Return the configuration keys that differ between runs, with the value of each run.

    Sections that do not affect results are left out.
    """
    first, *others = (computed(read_run(run)) for run in runs)
    values: dict[str, list[str]] = {}
    for number, other in enumerate(others, 1):
        for key, one, another in differences(first, other):
            values.setdefault(key, [shown(one)] * len(runs))[number] = shown(another)
    return list(values.items())


def _run_data(run: Path, config: RunConfig, lines: Sequence[Line], width: int) -> dict[str, Any]:
    reports = read_steps(run / "evaluations.jsonl")
    findings = read_findings(run)
    pages = {line["step"]: f"evaluations/step_{line['step']:06d}/report.html" for line in reports}
    bounds = Counter(line["time/bounded_by"] for line in lines if "time/bounded_by" in line)
    return {
        "folder": str(run),
        "seed": config.training.seed,
        "numSteps": config.training.num_steps,
        "lastStep": lines[-1]["step"] if lines else 0,
        "seconds": sum(line["time/step_s"] for line in lines),
        "curves": curves(lines, width),
        "heldOut": curves(reports, 1),
        "headline": reports[-1]["headline"] if reports else None,
        "reports": [
            {
                "step": line["step"],
                "score": line["score"],
                "page": pages[line["step"]] if (run / pages[line["step"]]).exists() else None,
            }
            for line in reports
        ],
        "bounds": bounds.most_common(),
        "verdict": next((one.text for one in findings[::-1] if one.rule == VERDICT), None),
        "findings": [
            {"rule": one.rule, "step": one.step, "text": one.text}
            for one in findings
            if one.rule != VERDICT
        ],
        "faults": faults(run, lines),
        "logged": logged_steps(run / "rollouts"),
        "samples": [file.name for file in (run / "samples").glob("step_*.html")],
    }


def curves(lines: Sequence[Line], width: int) -> dict[str, dict[str, list[float]]]:
    """Return the curve of each metric: `x`, the steps, and `y`, the values.

    A metric of both channels has a curve for each, because their values cannot be compared.
    With a `width` above 1, a point is the mean of the values in so many successive steps, at their
    last step; `low` and `high` are the least and the largest of them. Values that are no finite
    numbers are left out.
    """
    points: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for channel in sorted({line.get("channel", "") for line in lines}):
        own = [line for line in lines if line.get("channel", "") == channel]
        steps = np.array([line["step"] for line in own])
        for name in sorted(name for name in set().union(*own) if "/" in name):
            column = [line.get(name) for line in own]
            if not any(isinstance(value, str) for value in column):
                values = np.array(column, dtype=float)  # None becomes NaN
                known = np.isfinite(values)
                if known.any():
                    points.setdefault(name, {})[channel] = steps[known], values[known]
    found = {}
    for metric, by_channel in points.items():
        for channel, (x, y) in by_channel.items():
            name = f"{metric}, channel {channel}" if len(by_channel) > 1 else metric
            bins, starts, counts = np.unique(
                (x - 1) // width, return_index=True, return_counts=True
            )
            means = np.add.reduceat(y, starts) / counts
            found[name] = {"x": ((bins + 1) * width).tolist(), "y": _short(means)}
            if width > 1:
                found[name] |= {
                    "low": _short(np.minimum.reduceat(y, starts)),
                    "high": _short(np.maximum.reduceat(y, starts)),
                }
    return found


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def faults(run: Path, lines: Sequence[Line]) -> list[str]:
    """Describe the faults and repairs of a run: errors, replaced actors, skipped updates, ..."""
    found = []
    for name in FAULTS:
        steps = [line["step"] for line in lines if line.get(name)]
        if steps:
            total = sum(line.get(name, 0) for line in lines)
            metric = metric_of(name)
            assert metric is not None, f"{name} is in the table of metrics"
            where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]}"
            found.append(f"{name} {total:g} ({where}): {metric.meaning}")
    timeline = run / "timeline.json"
    if any("rollout/num_replaced" in line for line in lines) and timeline.exists():
        tracks = {}
        with timeline.open("rb") as trace:
            # Only these events are parsed: the timeline of a long run has a million of them.
            texts = [text for text in trace if b'"replace"' in text or b'"thread_name"' in text]
        for event in (json.loads(text.rstrip(b",\n")) for text in texts if text.endswith(b"\n")):
            if event["name"] == "thread_name":
                tracks[event["tid"]] = event["args"]["name"]
            elif event["name"] == "replace":
                took_s = event["dur"] / 1e6
                reason = event["args"].get("reason")
                found.append(f"{tracks[event['tid']]} was replaced in {took_s:.1f} s: {reason}")
    heads = [line["step"] for line in read_lines(run / LEDGER) if "versions" in line]
    found += [
        f"resumed after step {step} with another configuration, code or packages"
        for step in heads[1:]
    ]
    for file in sorted(run.glob("error*.txt")):
        story = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        found.append(f"{file.name}: {story[-1] if story else 'empty'}")
    return found


def _embedded(run: Path, step: int | None, *, served: bool) -> list[int]:
    """Return the steps whose rollouts the page contains.

    Raises ConfigError if `step` is not logged.
    """
    logged = logged_steps(run / "rollouts")
    if step is not None:
        if step not in logged:
            has = f"has {logged[0]} to {logged[-1]}" if logged else "has no rollouts"
            raise ConfigError(f"step: {run} has no step {step} in rollouts/; it {has}")
        return [step]
    if served:
        return []
    sizes = (step_path(run / "rollouts", one).stat().st_size for one in reversed(logged))
    num = len(list(takewhile(lambda size: size <= MAX_BYTES, accumulate(sizes))))
    return logged[len(logged) - num :]


# The rollouts of a step, as rows of the page.


def step_rows(folder: Path, step: int, config: RunConfig) -> list[Row]:
    """Return a row for each sample or rollout that the run in `folder` logged in `step`.

    Siblings, which are rollouts of the same sample or dataset row, have the same `group`, a number
    from 0. A row has only the keys that apply: `reward` and `advantage` with a policy gradient,
    `error` in an environment, `match` (matched share of the ground truth) and `dropped` (reasons)
    in detection.

    Raises OSError, and RecordError for a damaged line.
    """
    path = step_path(folder / "rollouts", step)
    if config.environment is not None:
        size = config.environment.rollouts_per_example
        rows = [_of_trajectory(line) for line in trajectories.read_step(path)]
    else:
        lines = samples.read_step(path)
        has_sources = any(one.name is not None for one in config.data.sources("train"))
        is_b = bool(lines) and lines[0]["channel"] == Channel.B
        size = config.stage2_ab.channel_b.rollouts_per_sample if is_b else 1
        rows = [_of_sample(line, has_sources=has_sources) for line in lines]
        by_group: dict[int, list[Row]] = {}
        for row in rows:
            if row.get("reward") is not None:
                by_group.setdefault(row["position"] // size, []).append(row)
        for siblings in by_group.values():
            advantages = group_advantages([row["reward"] for row in siblings])
            for row, advantage in zip(siblings, advantages, strict=True):
                row["advantage"] = advantage
    return [
        {"group": row["position"] // size}
        | {name: as_cell(value) for name, value in row.items() if value not in (None, "")}
        for row in rows
    ]


def _of_trajectory(line: TrajectoryRecord) -> Row:
    row: Row = trajectory_row(line)
    # Examples of one rollout have the same advantage, unless the environment set it by token.
    advantages = {example["advantage"] for example in line["examples"]}
    advantage = advantages.pop() if len(advantages) == 1 else None
    return {
        "position": row["position"],
        "name": f"row {row['example']}",
        "source": line.get("task"),
        "reward": None if row["error"] else row["reward"],
        "advantage": advantage if advantage is not None and math.isfinite(advantage) else None,
        "tokens": line.get("num_tokens"),
        "end": "failed" if row["error"] else "cut" if line["is_truncated"] else "ended",
        "parts": row["rewards"],
        "turns": row["turns"],
        "error": row["error"],
        "prompt": row["prompt"],
        "answer": row["completion"],
    }


def _of_sample(line: RolloutRecord, *, has_sources: bool) -> Row:
    # A sample's name begins with the name of its file if there are several files.
    name = line["sample_id"]
    row: Row = {
        "position": line["position"],
        "name": name,
        "source": name.partition("/")[0] if has_sources else None,
        "truth": ", ".join(truth["desc"] for truth in line["ground_truth"]),
    }
    if (read := sample_row(line)) is not None:
        row |= {key: value for key, value in read.items() if key != "sample"}
        num_truths = len(line["ground_truth"])
        row["match"] = row["matched"] / num_truths if num_truths else None
        row["reward"] = line.get("reward")
    return row


def as_json(value: object) -> str:
    """Return a value as compact JSON that a script element of a page can contain."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
