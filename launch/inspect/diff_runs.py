"""Finds the first difference between two runs: its step, stage and sample.

    rollmatch diff-runs outputs/a outputs/b

Compares `metrics.jsonl` and `rollouts/` of both runs bit by bit, except times and places (which
engine answered, at which attempt). Compares only steps that both runs have. The exit status is 0 if
nothing differs, else 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from launch.cli import explained, read_words
from launch.run_folder.console import escaped, make_console
from launch.run_folder.ledger import check_ledger
from launch.run_folder.saved_run import read_run
from learner.rollout_logs.writer import step_path
from shared.errors import ConfigError
from shared.run_files import read_lines

Line: TypeAlias = dict[str, Any]
"""A JSON line of a run's files, or an object in a line."""

_MATCHED = (
    *("pairs", "excluded", "unmatched_predictions", "gating_rejections"),
    *("appended", "appended_text"),
    # The match decides how much is kept (`trim_trailing_false_positives`).
    *("prefix_text", "num_kept_bytes", "num_kept", "num_prefix", "max_object_index"),
    *("trimmed", "num_trimmed_dropped"),
)
SAMPLE_STAGES: dict[str, Callable[[Line], object]] = {
    "draw": lambda line: _of(line, "sample_id", "ground_truth", "example"),
    "request": lambda line: (
        _of(line["rollout"], "seed", "num_prompt_tokens")
        if "rollout" in line
        else [_of(call, "path", "turn", "seed") for call in line["calls"]]
    ),
    "rollout": lambda line: (
        _without(line["rollout"], "actor", "attempt", "seed", "num_prompt_tokens")
        if "rollout" in line
        else {
            "error": line["error"],
            "completion": line["completion"],
            "examples": [
                _of(one, "token_ids", "mask", "logprobs", "weight_version")
                for one in line["examples"]
            ],
        }
    ),
    "parse": lambda line: _without(line.get("reading"), *_MATCHED),
    "match": lambda line: _of(line.get("reading"), *_MATCHED),
    "reward": lambda line: _of(line, "reward", "metrics", "reward_errors"),
    "target": lambda line: (
        line["target"]
        if "target" in line
        else [_of(one, "advantage", "token_advantages") for one in line["examples"]]
    ),
}
"""The stages of a sample in order. A function returns what a stage compares of the sample's line in
`rollouts/`."""
METRIC_STAGES = {
    "row": ("packing/",),
    "loss": ("loss/", "policy/"),
    "gradient": ("optim/grad_norm", "optim/num_skipped"),
    "update": ("optim/",),
    "sync": ("weight_version", "sync/version"),
    "other": ("",),
}
"""The stages of a step after those of its samples, each with prefixes of the metrics to compare. A
metric belongs to the first stage with a prefix that fits."""
NOT_LEARNED = (
    *("time/", "sync/", "rollout/decode_mode", "rollout/num_replaced"),
    *("rollout/logprob", "rollout/num_logprob", "rollout/num_compared"),
)
"""Prefixes of metrics without effect on training: times, syncs, facts about engines, and
comparisons with the engines' log-probabilities."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference between two runs.

    Example: `Parting(7, "rollout", "position 3 (scene_12)", "response_token_ids[41]", 17, 96)`.
    """

    step: int
    stage: str
    where: str
    """Name of the sample that differs; empty if the difference is of the whole step."""
    field: str
    a: object
    b: object

    def describe(self) -> list[str]:
        place = f", {self.where}" if self.where else ""
        return [
            f"part      at step {self.step}, stage {self.stage}{place}: {self.field}",
            f"          A {shown(self.a)}",
            f"          B {shown(self.b)}",
        ]


def diff_runs(a: Path, b: Path) -> tuple[list[str], bool]:
    """Compare two run folders. Returns lines to print, and whether the runs differ.

    Raises ConfigError if a folder holds no run, or its metrics are incomplete.
    """
    lines = [f"A         {a}", f"B         {b}"]
    lines += [
        f"changed   {field}: A {shown(one)}, B {shown(other)}"
        for field, one, other in differences(computed(read_run(a)), computed(read_run(b)))
    ]
    for name, run in (("A", a), ("B", b)):
        if (problem := check_ledger(run)) is not None:
            lines.append(f"ledger    {name} has a damaged ledger: {problem}")
    metrics = _metrics(a), _metrics(b)
    has_logs = (a / "rollouts").is_dir() and (b / "rollouts").is_dir()
    if not has_logs:
        lines.append(
            "note      samples are not compared: a run has no rollouts/ (telemetry.rollouts)"
        )
    parting = first_difference((a, b), metrics, has_logs=has_logs)
    if parting is not None:
        equal = f"equal     {parting.step - 1} steps before, to the bit"
        return [*lines, *parting.describe(), equal], True
    lengths = [len(one) for one in metrics]
    both = f"equal     {min(lengths)} steps, to the bit"
    if lengths[0] != lengths[1]:
        longer = "A" if lengths[0] > lengths[1] else "B"
        both += f"; {longer} continues to step {max(lengths)}, which is not compared"
    return [*lines, both], False


def _metrics(run: Path) -> list[Line]:
    """Return the lines of metrics. Raises ConfigError unless they cover steps 1, 2, 3, ..."""
    lines = read_lines(run / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    if not steps or steps != list(range(1, len(steps) + 1)):
        raise ConfigError(
            f"{run / 'metrics.jsonl'}: must have a line for every step from 1, and has"
            f" {len(steps)} lines; compare runs of at least one step, with complete files"
        )
    return lines


def first_difference(
    runs: tuple[Path, Path],
    metrics: tuple[list[Line], list[Line]],
    *,
    has_logs: bool,
) -> Parting | None:
    """Return the first difference between two runs, in the steps that both have; else None.

    Args:
        metrics: lines of each run's metrics.jsonl.
        has_logs: both runs have logs of their rollouts, which are compared too.
    """
    for one, other in zip(*metrics, strict=False):
        step = one["step"]
        if has_logs:
            logs = _samples(runs[0], step), _samples(runs[1], step)
            for parting in _of_samples(step, *logs):
                return parting
        left = [name for name in dict.fromkeys((*one, *other)) if not name.endswith("_s")]
        for stage, beginnings in METRIC_STAGES.items():
            names = [name for name in left if name.startswith(beginnings)]
            left = [name for name in left if name not in names]
            if stage == "sync":
                # There is no sync after a run's last step.
                names = [name for name in names if name in one and name in other]
            elif stage == "other":
                names = [name for name in names if not name.startswith(NOT_LEARNED)]
            for field, a, b in differences(_of(one, *names), _of(other, *names)):
                return Parting(step, stage, "", field, a, b)
    return None


def _of_samples(step: int, one: dict[int, Line], other: dict[int, Line]) -> Iterator[Parting]:
    """Yield the differences between a step's samples, by stage and then by position."""
    if one.keys() != other.keys():
        positions = [sorted(one), sorted(other)]
        yield Parting(step, "draw", "", "positions in the log", *positions)
        return
    for stage, part in SAMPLE_STAGES.items():
        for position in sorted(one):
            for field, a, b in differences(part(one[position]), part(other[position])):
                name = one[position].get("sample_id", one[position].get("example"))
                yield Parting(step, stage, f"position {position} ({name})", field, a, b)


def _samples(run: Path, step: int) -> dict[int, Line]:
    """Return the lines of a step from all ranks, by position."""
    path = step_path(run / "rollouts", step)
    files = [path, *path.parent.glob(f"{path.stem}.rank*.jsonl")]
    return {line["position"]: line for file in files for line in read_lines(file)}


def computed(config: Line) -> Line:
    """Return the configuration without the sections that do not affect results."""
    return _without(config, "telemetry", "cluster", "timeouts", "checkpoint", "resume")


def differences(a: object, b: object, field: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the differences of two JSON values in order: path of the field, its two values."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in (*a, *(name for name in b if name not in a)):
            path = f"{field}.{name}" if field else name
            yield from differences(a.get(name), b.get(name), path)
    elif isinstance(a, list) and isinstance(b, list):
        for index, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from differences(one, other, f"{field}[{index}]")
        if len(a) != len(b):
            yield f"length of {field}", len(a), len(b)
    elif a != b and not (a != a and b != b):  # two NaN are the same
        yield field, a, b


def _of(line: Line | None, *names: str) -> Line:
    return {name: line[name] for name in names if name in line} if line is not None else {}


def _without(line: Line | None, *names: str) -> Line:
    return {name: value for name, value in (line or {}).items() if name not in names}


def shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def main(arguments: Sequence[str] | None = None) -> None:
    words = read_words(__doc__, arguments)
    with explained(make_console(stderr=True)):
        if len(words) != 2:
            raise ConfigError("diff_runs: needs two run folders; write `rollmatch diff-runs A B`")
        lines, parts = diff_runs(*map(Path, words))
    print(escaped("\n".join(lines)))
    sys.exit(int(parts))


if __name__ == "__main__":
    main()
