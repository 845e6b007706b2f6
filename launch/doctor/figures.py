"""A run's figures that the doctor judges.

They are read from figures that a run computes anyway: lines of `metrics.jsonl` and
`evaluations.jsonl`, and the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import nan, prod
from pathlib import Path
from statistics import median
from typing import Any

from launch.checks.model_shape import read_headers
from shared.config import RunConfig
from shared.errors import ConfigError

Line = Mapping[str, Any]

LEAST_RISE = 0.1
"""Least change of a reward or match rate, as a share of the larger value, that counts as a rise."""
LEAST_OBJECTS = 5
"""Least number of objects in a step, or of a class in a report, whose shares are judged."""
GAP_FLOORS = {"float32": 1e-4, "bfloat16": 0.02}
"""Mean differences of log-probabilities, in nats, below which growth is not judged."""


class History:
    """A run's figures so far: one list for each figure, with an entry per step that has it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.steps: list[Line] = []
        self.reports: list[Line] = []
        self.classes: list[Mapping[str, tuple[float, int]]] = []
        """For each held-out report, by class: F1 and number of ground-truth objects."""
        self.num_parameters = _num_parameters(config)
        """None if the checkpoint cannot be read (any more)."""
        self._values: dict[str, list[float]] = {}

    def add(self, line: Line) -> None:
        self.steps.append(line)
        for name, figure in FIGURES.items():
            if (value := figure(line, self.config)) is not None:
                self._values.setdefault(name, []).append(value)

    def of(self, figure: str) -> Sequence[float]:
        return self._values.get(figure, ())

    def last(self, figure: str, window: int) -> float | None:
        """Return the figure's median in its last `window` steps; None before there are so many."""
        values = self.of(figure)
        return median(values[-window:]) if len(values) >= window else None

    def ends(self, figure: str, window: int) -> tuple[float, float]:
        """Return the figure's medians in its first and its last `window` steps.

        Both are NaN, which no comparison accepts, before there are twice as many steps.
        """
        values = self.of(figure)
        if len(values) < 2 * window:
            return nan, nan
        return median(values[:window]), median(values[-window:])

    def learns(self, window: int) -> bool:
        """Return whether the reward, or else the match rate, has risen since the first steps."""
        for figure in ("reward", "match rate"):
            if self.of(figure):
                first, last = self.ends(figure, window)
                return last - first >= LEAST_RISE * max(abs(first), abs(last), 1e-9)
        return False


def _num_parameters(config: RunConfig) -> int | None:
    try:
        return sum(map(prod, read_headers(Path(config.model.path)).values()))
    except (OSError, ConfigError):
        return None


Figure = Callable[[Line, RunConfig], float | None]


def _share(part: str, whole: str, least: int = 1) -> Figure:
    def figure(line: Line, _config: RunConfig) -> float | None:
        if part not in line or line.get(whole, 0) < least:
            return None
        return float(line[part]) / float(line[whole])

    return figure


def _metric(name: str) -> Figure:
    return lambda line, _config: line.get(name)


def has_counts(line: Line, *counts: str) -> bool:
    """Return whether a line has all these counts of rollouts, and any rollouts."""
    return line.get("rollout/num", 0) > 0 and all(f"rollout/{name}" in line for name in counts)


def _left_open(line: Line, _config: RunConfig) -> float | None:
    """Return the share of answers that opened, and that the model ended before they were closed."""
    if not has_counts(line, "num_fallback", "num_truncated", "num_length_limited"):
        return None
    open_ = line["rollout/num_truncated"] - line["rollout/num_length_limited"]
    return max(0.0, open_ - line["rollout/num_fallback"]) / float(line["rollout/num"])


def _never_opened(line: Line, _config: RunConfig) -> float | None:
    if not has_counts(line, "num_fallback", "num_truncated"):
        return None
    # An empty list is a fallback, too, but is closed.
    broken = min(line["rollout/num_fallback"], line["rollout/num_truncated"])
    return float(broken) / float(line["rollout/num"])


def _top_name(line: Line, _config: RunConfig) -> float | None:
    if not has_counts(line, "num_valid_objects", "top_name_share", "top_name_share_of_truth"):
        return None
    if line["rollout/num_valid_objects"] < LEAST_OBJECTS:
        return None
    return float(line["rollout/top_name_share"] - line["rollout/top_name_share_of_truth"])


def _length(line: Line, config: RunConfig) -> float | None:
    if "rollout/length" not in line:
        return None
    limit = config.rollout_matching.max_new_tokens * line.get("rollout/turns", 1.0)
    return float(line["rollout/length"]) / limit if limit else None


def _gap(line: Line, config: RunConfig) -> float | None:
    """Return the learner's difference from the engines, as a multiple of what is judged."""
    if (mean := line.get("policy/logprob_difference")) is not None:
        return float(mean) / GAP_FLOORS[config.model.dtype]
    largest = line.get("rollout/logprob_max_abs")
    return None if largest is None else float(largest) / (0.5 * config.logprob_tolerance)


def _no_gradient(line: Line, _config: RunConfig) -> float | None:
    # Groups without signal explain a gradient of 0; they have a rule of their own.
    if "optim/grad_norm" not in line or line.get("rollout/no_signal_share") == 1:
        return None
    return float(line["optim/grad_norm"] <= 1e-10)


FIGURES: dict[str, Figure] = {
    "answers that never open": _never_opened,
    "answers left open": _left_open,
    "answers cut by length": _metric("rollout/length_limited_rate"),
    "length / max_new_tokens": _length,
    "valid objects / ground truth": _share(
        "rollout/num_valid_objects", "rollout/num_ground_truth", LEAST_OBJECTS
    ),
    "match rate": _metric("rollout/match_rate"),
    "doubles / valid objects": _share(
        "rollout/num_doubles", "rollout/num_valid_objects", LEAST_OBJECTS
    ),
    "share of the top name, above the truth's": _top_name,
    "reward": _metric("rollout/reward"),
    "groups without signal": _metric("rollout/no_signal_share"),
    "entropy / entropy at the start": _metric("policy/entropy"),
    "difference of log-probabilities / its floor": _gap,
    "tokens with a ratio above ratio_cap": _metric("policy/capped_share"),
    "updates without gradient": _no_gradient,
    "carried segments / segments of a step": _share("packing/num_carried", "packing/num_segments"),
    "distance from coordinates (w1)": _metric("loss/coord_reg.w1"),
    "text loss": _metric("loss/token_ce"),
    "lr_warmup_steps / steps of the run": lambda _line, config: (
        config.training.lr_warmup_steps / config.training.num_steps
    ),
    "frozen language model (1: yes)": lambda _line, config: float(
        config.training.parts.language_model.frozen
    ),
    "tool calls": _metric("rollout/num_tool_calls"),
}
"""The figures that general judges read, as numbers of one step; None if a step has none."""
