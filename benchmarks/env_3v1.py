"""Check that `experiment=env_3v1` learns on every seed, and plot the rewards.

    python -m benchmarks.env_3v1 --seeds 1 2 3 --out docs/env_3v1.svg

The mean reward of the greedy rollouts on the held-out prompts has to rise from under 0.35 to over
0.70 within ten minutes of the command's start (issue 5, "Learning"). Exit status 1 if a seed does
not reach this.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FROM = 0.35
TO = 0.70
WITHIN_S = 600.0
WIDTH = 560
HEIGHT = 280
LEFT = 50
BOTTOM = 40
TOP = 20
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


class Curve(NamedTuple):
    seed: int
    points: list[tuple[int, float]]
    """Pairs of a number of updates and the mean reward on the held-out prompts after them."""
    wall_s: float
    """Wall time of the whole command."""

    @property
    def passes(self) -> bool:
        return self.points[0][1] < FROM and self.points[-1][1] > TO and self.wall_s < WITHIN_S


def run(seed: int, folder: Path, overrides: Sequence[str]) -> Curve:
    """Run the whole experiment with one seed in a separate process, and return its rewards."""
    command = [
        sys.executable,
        "-m",
        "launch.train",
        "+experiment=env_3v1",
        f"training.seed={seed}",
        f"telemetry.run_dir={folder}",
        *overrides,
    ]
    started_s = time.monotonic()
    subprocess.run(command, check=True)
    return read(seed, folder, time.monotonic() - started_s)


def read(seed: int, folder: Path, wall_s: float) -> Curve:
    reports = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    return Curve(seed, [(report["step"], report["val/reward"]) for report in reports], wall_s)


def table(curves: Sequence[Curve]) -> str:
    """Return a Markdown table of the rewards, with one row per seed."""
    steps = [step for step, _ in curves[0].points]
    lines = [
        f"| seed | {' | '.join(map(str, steps))} | wall |",
        f"|---|{'---|' * (len(steps) + 1)}",
    ]
    for curve in curves:
        lines.append(
            f"| {curve.seed} | {' | '.join(f'{reward:.2f}' for _, reward in curve.points)} |"
            f" {curve.wall_s:.0f} s |"
        )
    return "\n".join(lines)


def picture(curves: Sequence[Curve]) -> str:
    """Return an SVG plot of the mean reward over updates, one line per seed."""
    last = max(step for curve in curves for step, _ in curve.points)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * step / last

    def y(reward: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * reward

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for reward in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(reward):.1f}" y2="{y(reward):.1f}"'
            ' stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(reward) + 4:.1f}" text-anchor="end">{reward:g}</text>'
        )
    for step, _ in curves[0].points:
        parts.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">updates</text>'
    )
    parts.append(
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14'
        f' {HEIGHT / 2})">mean reward, held out</text>'
    )
    for number, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        points = " ".join(f"{x(step):.1f},{y(reward):.1f}" for step, reward in curve.points)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{LEFT + 12}" y="{TOP + 14 + 16 * number}" fill="{colour}">seed'
            f" {curve.seed}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.env_3v1",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], choices=range(1, 1000), metavar="SEED"
    )
    parser.add_argument("--out", type=Path, help="SVG file for the plot")
    parser.add_argument("overrides", nargs="*", help="further keys of the run")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="env_3v1_") as folder:
        curves = [
            run(seed, Path(folder) / f"seed_{seed}", options.overrides) for seed in options.seeds
        ]
    print(table(curves))
    if options.out is not None:
        options.out.write_text(picture(curves), encoding="utf-8")
    failed = [curve.seed for curve in curves if not curve.passes]
    print(
        f"from under {FROM} to over {TO} within {WITHIN_S:g} s: "
        + (f"NOT on seeds {failed}" if failed else "on every seed")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
