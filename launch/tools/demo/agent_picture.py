"""Draws a run in an environment: mean held-out reward by step, and answers before and after it.

::

    curve of the held-out reward
    question | answer before | answer after        one row for each question
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from launch.run_folder.held_out import read_evaluations
from shared.errors import ConfigError

WIDTH, CURVE_HEIGHT = 960, 300
MARGIN = 56
COLUMNS = (MARGIN, 340, 660)
"""Left edges of the table's columns, in pixels."""
CHARACTERS = 34
"""Characters in a line of a table's cell."""
LINE = 20
GREEN, RED, BLUE, GREY = (0, 130, 50), (200, 0, 40), (20, 105, 245), (205, 205, 205)


def draw_environment_run(run: Path, *, num_questions: int) -> Path:
    """Write `demo.png` to the run folder, and return its path.

    The table has held-out questions whose reward rose the most, in the order of the dataset.

    Raises ConfigError if the run has fewer than two held-out reports, or a report without a score.
    """
    reports = sorted((run / "evaluations").glob("step_*/rollouts.jsonl"))
    if len(reports) < 2:
        raise ConfigError(f"{run}: has {len(reports)} held-out reports of rollouts; two are needed")
    points = [(report.step or 0, report.score) for report in read_evaluations(run)]
    scored = [(step, score) for step, score in points if score is not None]
    if len(scored) < len(points):
        raise ConfigError(f"{run}: a held-out report has no score, because its rollouts failed")
    before, after = (
        {one["position"]: one for one in map(json.loads, lines) if one["error"] is None}
        for lines in (reports[index].read_text().splitlines() for index in (0, -1))
    )
    gain = {one: after[one]["reward"] - before[one]["reward"] for one in before if one in after}
    chosen = sorted(sorted(gain, key=lambda one: -gain[one])[:num_questions])
    rows = [(_text(before[one], "prompt"), before[one], after[one]) for one in chosen]
    font = ImageFont.load_default(15)
    image = Image.new("RGB", (WIDTH, CURVE_HEIGHT + LINE * (3 + 4 * len(rows))), "white")
    draw = ImageDraw.Draw(image)
    _draw_curve(draw, scored, font)
    top = CURVE_HEIGHT + LINE
    titles = ("held-out question", "before", f"after {scored[-1][0]} updates")
    for left, title in zip(COLUMNS, titles, strict=True):
        draw.text((left, top), title, "black", font)
    for number, (question, first, last) in enumerate(rows):
        y = top + LINE * (2 + 4 * number)
        draw.line((MARGIN, y - 8, WIDTH - MARGIN, y - 8), GREY)
        draw.text((COLUMNS[0], y), _cell(question), "black", font)
        for left, rollout in zip(COLUMNS[1:], (first, last), strict=True):
            colour = GREEN if rollout["reward"] > 0 else RED
            draw.text((left, y), _cell(_text(rollout, "completion")), colour, font)
    out = run / "demo.png"
    image.save(out, optimize=True)
    return out


def _draw_curve(
    draw: ImageDraw.ImageDraw,
    points: Sequence[tuple[int, float]],
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    """Draw the held-out reward by optimizer step; the axis goes from 0 to at least 1."""
    last_step = max(step for step, _ in points)
    highest = max(1.0, *(score for _, score in points))
    left, right, top, bottom = MARGIN, WIDTH - MARGIN, 60, CURVE_HEIGHT - 30

    def place(step: int, score: float) -> tuple[float, float]:
        return (
            left + (right - left) * step / max(last_step, 1),
            bottom - (bottom - top) * max(score, 0.0) / highest,
        )

    draw.text((left, 10), "mean reward on held-out questions, by optimizer step", "black", font)
    for part in range(5):
        score = highest * part / 4
        y = place(0, score)[1]
        draw.line((left, y, right, y), GREY)
        draw.text((left - 8, y), f"{score:.2f}", "black", font, anchor="rm")
    draw.line([place(*point) for point in points], BLUE, 3)
    for step, score in points:
        x, y = place(step, score)
        draw.ellipse((x - 4, y - 4, x + 4, y + 4), BLUE)
        # To the side that faces the middle, so that the first value does not cover the axis.
        anchor = "rb" if step == last_step else "lb"
        draw.text((x, y - 8), f"{score:.2f}", "black", font, anchor=anchor)
        draw.text((x, bottom + 6), str(step), "black", font, anchor="ma")


def _text(rollout: dict[str, Any], field: str) -> str:
    """Return the text of the last message of the prompt or of the completion."""
    messages = rollout[field]
    content = messages if isinstance(messages, str) else messages[-1]["content"] if messages else ""
    return content if isinstance(content, str) else json.dumps(content)


def _cell(text: str) -> str:
    """Return the beginning of a text in at most three lines, with a mark if it is cut."""
    lines = textwrap.wrap(text or "(empty)", CHARACTERS)
    return "\n".join(
        lines if len(lines) <= 3 else [*lines[:2], lines[2][: CHARACTERS - 4] + " ..."]
    )
