"""Compare ways of continued training from one initial checkpoint, on several seeds.

    python -m benchmarks.evidence [--out outputs/evidence] [--arms NAME ...] [--seeds 1 2 3]
                                  [--jobs 2]
    python -m benchmarks.evidence --table [--results FOLDER]
    python -m benchmarks.evidence --write-start FOLDER

Makes crowded scenes and trains the demo's initial checkpoint on them until its held-out curve is
flat. From the best checkpoint it runs every arm of `ARMS` with each seed. Existing results are
kept and interrupted runs are resumed, so the command can be repeated. Each finished run writes a
file in benchmarks/results/evidence/ with its counts for every test image, its command and its
commit. `--table` only prints the table of these files. `--write-start` only makes the initial
checkpoint and writes it to FOLDER in bfloat16; the demo begins with launch/tools/demo/start. The
plan and the results are in docs/explanation/evidence.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shared.dataset import load_dataset
from shared.grounding.coco import ScoredObject
from shared.grounding.evaluation import Scene, pair_objects, summarise
from shared.grounding.geometry import box_iou
from shared.records import GeometryKind, Sample

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
SEED = 17
"""The seed of the initial checkpoint, and the default seed of the data and the model."""
COUNTS = {"train": 8000, "val": 128, "test": 256}
START_RATE = 2e-3
RATE = 2e-4
"""The final learning rate of the initial checkpoint, and the rate of all arms but `sft_low`."""
FALL_UPDATES = 1500
"""Updates on crowded scenes with a falling learning rate."""
START_BATCH = 4
"""Scenes per update for the initial checkpoint, as in the demo."""
EVERY = 100
"""Updates between two evaluations at the final learning rate."""
MAX_FLAT_UPDATES = 1500
FLAT_GAIN = 0.005
FLAT_REPORTS = 3
"""Number of evaluations that decide whether the held-out curve is flat.

The curve is flat if they gain less than `FLAT_GAIN` over the best evaluation before them.
"""
UPDATES = 60
"""Updates of every arm."""
IOUS = (0.5, 0.75)
BASES = ("sft", "b_50")
"""Names of the arms that the other arms are compared with."""
NUM_RESAMPLES = 2000

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to continue from the initial checkpoint, by overrides of `experiment=crowded_on`."""

    what: str
    overrides: Sequence[str] = ()
    token_ce: Mapping[str, float] = field(default_factory=dict)
    """Keys of the objective `token_ce` that differ, with their values."""
    rewards: bool = False
    """Whether the objective `policy_gradient` is used too."""
    targets: bool = True
    """Whether matched and appended tokens are learned."""
    as_long_as: str | None = None
    """Name of another arm, whose wall time with the same seed this arm uses too.

    The number of updates is chosen for that.
    """


@dataclass(frozen=True, slots=True)
class Task:
    """Data and an initial checkpoint on which the arms are compared."""

    results: Path
    """Folder of the results: a file for each run, and `start.json`."""
    make_start: Callable[[Path], Path]
    """Writes the data to `data` in the given folder, trains the initial checkpoint there, and
    returns its folder. Existing results are kept."""
    overrides: Sequence[str] = ()
    """Overrides of all arms."""


_GROUPS = (
    "stage2_ab.schedule.b_ratio=1.0",
    "stage2_ab.channel_b.rollouts_per_sample=4",
    "rollout_matching.decoding.temperature=1.0",
)
_HALF = "stage2_ab.schedule.b_ratio=0.5"
_TRIM = "rollout_matching.trim_trailing_false_positives=true"
_SEPARATORS = "rollout_matching.supervise_separators=true"
_GATE = "rollout_matching.maskiou_gate_schedule={start: 0.1, steps: 60}"
_SFT = "custom.trainer_variant=stage1_sft"


ARMS = {
    "sft": Arm("supervised", [_SFT]),
    "sft_low": Arm(
        "supervised, at a tenth of the rate", [_SFT, f"training.learning_rate={RATE / 10:g}"]
    ),
    "b": Arm("channel B alone", ["stage2_ab.schedule.b_ratio=1.0"]),
    "b_20": Arm("a fifth of the steps channel B", ["stage2_ab.schedule.b_ratio=0.2"]),
    "b_50": Arm("half of the steps channel B", [_HALF]),
    "trim": Arm("b_50, trailing false positives trimmed", [_HALF, _TRIM]),
    "separators": Arm("b_50, separators supervised", [_HALF, _SEPARATORS]),
    "names": Arm("b_50, matched names corrected", [_HALF], {"matched_desc_weight": 6.0}),
    "gate": Arm("b_50, a gate that rises", [_HALF, _GATE]),
    "end": Arm("b_50, the end behind mistakes weighs less", [_HALF], {"fp_end_weight": 0.25}),
    "rewards": Arm("policy gradient alone", [*_GROUPS], rewards=True, targets=False),
    "both": Arm("channel B and policy gradient at once", [*_GROUPS], rewards=True),
    "best": Arm(
        "b_50, matched names corrected and trailing false positives trimmed",
        [_HALF, _TRIM],
        {"matched_desc_weight": 6.0},
    ),
    "sft_wall": Arm("supervised, in the wall time of b_50", [_SFT], as_long_as="b_50"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, Path("outputs/evidence"), list(ARMS))
    parser.add_argument("--write-start", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.write_start is None:
        run(Task(RESULTS / "evidence", make_start), options)
    else:
        if options.out.exists():
            parser.error(f"--out: {options.out} exists; choose a new folder for the runs")
        start = make_start(options.out, options.write_start)
        write_start(start, options.write_start)


def add_options(parser: argparse.ArgumentParser, out: Path, arms: Sequence[str]) -> None:
    """Add the options that all tasks have; `arms` are the default."""
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=arms)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--table", action="store_true", help="print the table of finished runs")
    parser.add_argument("--results", type=Path, help="folder of the results")


def run(task: Task, options: argparse.Namespace) -> None:
    """Run what is missing, unless `--table` is given, and print the table."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.results is not None:
        task = replace(task, results=options.results)
    if not options.table:
        start = task.make_start(options.out)
        run_arms(task, options.out, start, options.arms, options.seeds, options.jobs)
    for line in table(task.results):
        print(line)


def make_start(out: Path, results: Path = RESULTS / "evidence") -> Path:
    """Train the demo's initial checkpoint until its held-out curve is flat.

    Return the best checkpoint.
    """
    few = out / "few_digits"
    train("demo_start", few, "data.val=null")
    make_scenes(out / "data", COUNTS)
    common = [f"training.seed={SEED}", f"training.effective_batch_size={START_BATCH}"]
    common += data(out / "data", "val")
    before = out / "start_falls"
    # A complete run ends immediately. A run with other settings is refused.
    train(
        "crowded_sft",
        before,
        *common,
        f"training.learning_rate={START_RATE:g}",
        "training.lr_schedule=cosine",
        f"training.min_lr_ratio={RATE / START_RATE:g}",
        f"training.max_steps={FALL_UPDATES}",
        "data.val=null",
        f"model.path={few / 'checkpoint'}",
    )
    overrides = [*common, f"model.path={before / 'checkpoint'}"]
    return train_until_flat(out, results, *overrides)


def write_start(checkpoint: Path, folder: Path) -> None:
    """Write the model and the processor of a checkpoint to a folder, with weights in bfloat16."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype="bfloat16")
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(checkpoint).save_pretrained(folder)


def train_until_flat(out: Path, results: Path, *overrides: str) -> Path:
    """Train at the constant rate `RATE` until the held-out curve is flat.

    Return the best checkpoint. Writes the curve to `start.json` in the folder `results`.
    """
    run = out / "start"
    curve: list[float] = []
    for updates in range(EVERY, MAX_FLAT_UPDATES + 1, EVERY):
        report = run / "evaluations" / f"step_{updates:06d}" / "report.json"
        if not report.exists():
            train(
                "crowded_sft",
                run,
                f"training.learning_rate={RATE:g}",
                f"training.max_steps={updates}",
                *(f"checkpoint.save_steps={EVERY}", "checkpoint.keep_last=100"),
                *overrides,
            )
        curve.append(class_aware_f1(report))
        print(f"start     {updates} updates: class-aware F1 {curve[-1]:.3f}", flush=True)
        if is_flat(curve):
            break
    best = (curve.index(max(curve)) + 1) * EVERY
    results.mkdir(parents=True, exist_ok=True)
    facts = {"val_class_aware_f1": curve, "every": EVERY, "best_update": best, "commit": commit()}
    (results / "start.json").write_text(json.dumps(facts, indent=1) + "\n")
    return run / "checkpoints" / f"step_{best:06d}"


def is_flat(curve: Sequence[float]) -> bool:
    """Return whether the last evaluations are not much better than the best before them.

    Example: 0.5, 0.6, 0.602, 0.604, 0.603 is flat.
    """
    if len(curve) <= FLAT_REPORTS:
        return False
    return max(curve[-FLAT_REPORTS:]) < max(curve[:-FLAT_REPORTS]) + FLAT_GAIN


def run_arms(
    task: Task, out: Path, start: Path, names: Sequence[str], seeds: Sequence[int], jobs: int
) -> None:
    """Run these arms from the initial checkpoint, one seed after another.

    Arms with `as_long_as` run last, because they need the wall time of other arms.
    """
    runs = [(name, seed) for seed in seeds for name in names]
    behind = [(name, seed) for name, seed in runs if ARMS[name].as_long_as is not None]
    with ThreadPoolExecutor(jobs) as pool:
        for some in ([one for one in runs if one not in behind], behind):
            list(pool.map(lambda one: run_arm(task, out, start, *one), some))


def run_arm(task: Task, out: Path, start: Path, name: str, seed: int) -> None:
    """Run one arm from the initial checkpoint, unless its result exists."""
    result = task.results / f"{name}_{seed}.json"
    if result.exists():
        return
    arm = ARMS[name]
    updates = UPDATES
    if arm.as_long_as is not None:
        mine = json.loads((task.results / f"sft_{seed}.json").read_text())
        other = json.loads((task.results / f"{arm.as_long_as}_{seed}.json").read_text())
        updates = round(UPDATES * other["wall_s"] / mine["wall_s"])
    conf = out / "conf" / "objective" / f"{name}.yaml"
    conf.parent.mkdir(parents=True, exist_ok=True)
    conf.write_text("# @package rollout_matching.pipeline\n" + yaml.safe_dump(pipeline(arm)))
    run = out / f"{name}_{seed}"
    command = train(
        "crowded_on",
        run,
        f"hydra.searchpath=[{out.resolve() / 'conf'}]",
        f"objective={name}",
        f"model.path={start}",
        "learner.cpu_threads=1",
        f"training.seed={seed}",
        f"training.max_steps={updates}",
        *task.overrides,
        *arm.overrides,
        *data(out / "data", "test"),
    )
    report = run / "evaluations" / f"step_{updates:06d}"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    numbers = json.loads((report / "report.json").read_text())
    facts = {
        "arm": name,
        "seed": seed,
        "updates": updates,
        "wall_s": sum(line["time/step_s"] for line in metrics),
        "start": sha256((start / "model.safetensors").read_bytes()).hexdigest()[:16],
        "commit": commit(),
        "command": command,
        "ap": numbers["coco"]["by_class"]["bbox"]["ap"],
        "ap50": numbers["coco"]["by_class"]["bbox"]["ap50"],
        "valid_object_rate": numbers["valid_object_rate"],
        "num_truncated": numbers["num_truncated"],
        "pictures": picture_counts(out / "data" / "test.jsonl", report / "predictions.jsonl"),
    }
    result.write_text(json.dumps(facts) + "\n")
    print(f"run       {name}, seed {seed}: {updates} updates, {facts['wall_s']:.0f} s", flush=True)


def pipeline(arm: Arm) -> dict[str, list[Entry]]:
    """Return the objectives of an arm: `objective=named_boxes` with the arm's changes."""
    entries = objectives("named_boxes")
    for entry in entries:
        if entry["name"] == "token_ce":
            entry["config"].update(arm.token_ce)
        if not arm.targets:
            entry["weight"] = 0.0
    if arm.rewards:
        entries += objectives("policy_gradient_constant")
    return {"objective": entries, "diagnostics": []}


def objectives(name: str) -> list[Entry]:
    """Return the entries of the configuration's `objective=NAME`."""
    text = (ROOT / "conf" / "objective" / f"{name}.yaml").read_text()
    entries: list[Entry] = yaml.safe_load(text)["objective"]
    return entries


def make_scenes(out: Path, counts: Mapping[str, int]) -> None:
    sizes = [argument for split, n in counts.items() for argument in (f"--{split}", str(n))]
    command = [sys.executable, "-m", "launch.tools.demo", "crowded", "--out", str(out), *sizes]
    subprocess.run(command, cwd=ROOT, check=True)


def data(folder: Path, split: str) -> list[str]:
    """Return the overrides that select the training scenes and the scenes for evaluations."""
    return [f"data.train={folder / 'train.jsonl'}", f"data.val={folder / split}.jsonl"]


def train(experiment: str, run: Path, *overrides: str) -> str:
    """Start or resume a training run, wait for its end, and return its command."""
    arguments = [f"+experiment={experiment}", "resume=auto", f"telemetry.run_dir={run}", *overrides]
    started_s = time.monotonic()
    run.parent.mkdir(parents=True, exist_ok=True)
    with (run.parent / f"{run.name}.log").open("a") as log:
        done = subprocess.run(
            [sys.executable, "-m", "launch.train", *arguments],
            cwd=ROOT,
            check=False,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    command = f"python -m launch.train {' '.join(arguments)}"
    if done.returncode:
        sys.exit(f"exit status {done.returncode} of: {command}; see {log.name}")
    print(f"          {time.monotonic() - started_s:.0f} s: {run}", flush=True)
    return command


def commit() -> str:
    """Return the commit of the sources, marked as dirty if they have changed."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip()


def class_aware_f1(report: Path) -> float:
    """Return the class-aware F1 at IoU 0.5 of a `report.json`."""
    return float(json.loads(report.read_text())["detection"][0]["class_aware"]["f1"])


FIGURES = ("ground_truth", "found", "any50", "named50", "any75", "named75", "doubled")
"""Names of the counts of each image.

They are: true objects; predictions; pairs at IoU 0.5, with any and with equal names; the same at
0.75; predictions without a pair that overlap a true object.
"""


def picture_counts(data: Path, predictions: Path) -> list[list[int]]:
    """Return the counts (`FIGURES`) of each image in a file of predictions."""
    samples = load_dataset(data, on_bad_row="error", sort_objects=True, check_images=False)
    rows = [json.loads(line) for line in predictions.open()]
    return [
        counts_of(position, sample, row["objects"])
        for position, (sample, row) in enumerate(zip(samples.samples, rows, strict=True))
    ]


def counts_of(position: int, sample: Sample, objects: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the counts (`FIGURES`) of one image and the objects predicted in it."""
    found = tuple(
        ScoredObject(GeometryKind(one["kind"]), tuple(one["bins"]), one["desc"], one["score"])
        for one in objects
    )
    scene = Scene(position, sample, found, dropped=(), truncated=False)
    at = summarise([scene], IOUS).thresholds
    pairs = pair_objects(found, sample.objects, iou_threshold=IOUS[0])
    doubled = 0
    if found and sample.objects:
        iou_PG = box_iou(
            np.array([one.bins for one in found]), np.array([one.bins for one in sample.objects])
        )
        paired = {pair.prediction for pair in pairs}
        is_on_one_P = (iou_PG >= IOUS[0]).any(axis=1)
        doubled = sum(bool(is_on_one_P[p]) for p in range(len(found)) if p not in paired)
    matched = [
        counts.num_matched
        for threshold in at
        for counts in (threshold.any_class, threshold.same_class)
    ]
    return [len(sample.objects), len(found), *matched, doubled]


def table(results: Path) -> list[str]:
    """Return the lines of a Markdown table that compares the arms.

    It has means over the seeds, and confidence intervals of class-aware F1 at IoU 0.5.
    """
    lines = [
        (
            "| arm | seeds | updates | wall, s | F1@0.5, named | 95 % | against `sft` |"
            " against `b_50` | F1@0.5 | F1@0.75, named | AP | AP50 | error of the count | doubled |"
            " valid | unfinished |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(results.glob("*_[0-9]*.json")):
        facts = json.loads(path.read_text())
        runs.setdefault(facts["arm"], {})[facts["seed"]] = facts
    starts = {facts["start"] for seeds in runs.values() for facts in seeds.values()}
    if len(starts) > 1:
        sys.exit(f"results of {len(starts)} starts, {sorted(starts)}: remove all but one start")
    for name in ARMS:
        if name not in runs:
            continue
        rng = np.random.default_rng(0)  # so a row does not depend on the other rows
        seeds = runs[name]
        counts = np.array(
            [seeds[seed]["pictures"] for seed in sorted(seeds)]
        )  # [runs, pictures, 7]
        low, high = interval(counts, None, rng)
        differences = " | ".join(difference(seeds, runs.get(base, {}), rng) for base in BASES)
        total = dict(zip(FIGURES, counts.sum(axis=(0, 1)).tolist(), strict=True))
        size = total["ground_truth"] + total["found"]
        error = np.abs(counts[:, :, 1] - counts[:, :, 0]).mean()
        of_all = list(seeds.values())
        lines.append(
            f"| {name}: {ARMS[name].what} | {len(seeds)} | {of_all[0]['updates']}"
            f" | {np.mean([one['wall_s'] for one in of_all]):.0f}"
            f" | **{f1_named(counts):.3f}** | {low:.3f} to {high:.3f} | {differences}"
            f" | {2 * total['any50'] / size:.3f} | {2 * total['named75'] / size:.3f}"
            f" | {np.mean([one['ap'] for one in of_all]):.3f}"
            # The older results have none.
            f" | {np.mean([one.get('ap50', np.nan) for one in of_all]):.3f} | {error:.2f}"
            f" | {total['doubled'] / (counts.shape[0] * counts.shape[1]):.2f}"
            f" | {np.mean([one['valid_object_rate'] for one in of_all]):.3f}"
            f" | {sum(one['num_truncated'] for one in of_all) / len(of_all):.1f} |"
        )
    return lines


def difference(
    seeds: Mapping[int, dict[str, Any]],
    base: Mapping[int, dict[str, Any]],
    rng: np.random.Generator,
) -> str:
    """Return the difference in class-aware F1 between two arms, as text with its interval.

    Only seeds that both arms have are compared.
    """
    common = sorted(set(seeds) & set(base))
    if not common or seeds is base:
        return "-"
    mine = np.array([seeds[seed]["pictures"] for seed in common])
    theirs = np.array([base[seed]["pictures"] for seed in common])
    low, high = interval(mine, theirs, rng)
    return f"{f1_named(mine) - f1_named(theirs):+.3f} ({low:+.3f} to {high:+.3f})"


def f1_named(counts: np.ndarray) -> float:
    """Return the class-aware F1 at IoU 0.5 over all runs and images: counts are [..., 7]."""
    sums = counts.reshape(-1, len(FIGURES)).sum(axis=0)
    return float(2 * sums[FIGURES.index("named50")] / (sums[0] + sums[1]))


def interval(
    counts: np.ndarray, other: np.ndarray | None, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the bootstrap 95% interval of class-aware F1, or of its difference to `other`.

    Counts are [runs, images, 7]. Seeds and images are resampled, paired in both.
    """
    values = []
    for _ in range(NUM_RESAMPLES):
        seeds = rng.integers(counts.shape[0], size=counts.shape[0])
        pictures = rng.integers(counts.shape[1], size=counts.shape[1])
        value = f1_named(counts[seeds][:, pictures])
        if other is not None:
            value -= f1_named(other[seeds][:, pictures])
        values.append(value)
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


if __name__ == "__main__":
    main()
