"""Tables of a Hydra sweep: its trials, and the mean over seeds for each setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import mean, stdev
from typing import Any

SEED = "training.seed"
LOSS = "loss"
OF_A_START = ("resume.", "cluster.trials_at_once", "telemetry.run_dir")
"""Prefixes of configuration keys that may change when a sweep is started again."""

Line = Mapping[str, Any]
"""The line of one trial in `trials.jsonl`."""


def settings_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return the configuration keys and values of a trial's overrides, except `OF_A_START`."""
    settings = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    return {key: value for key, value in settings.items() if not key.startswith(OF_A_START)}


def tables(trials: Sequence[Line]) -> list[str]:
    """Return the lines of tables with the results of trials, and the keys in which trials differ.

    A result is the main metric (`headline`) of a trial's last held-out report, or the loss of a
    trial without a report. If some finished trials differ only in their seed, a second table has
    the mean over seeds and the standard deviation (n - 1). The best result of the last table is
    marked, unless another result is shown with the same digits.
    """
    names = list(dict.fromkeys(trial["headline"] for trial in trials if "headline" in trial))
    if any("headline" not in trial and LOSS in trial for trial in trials):
        names.append(LOSS)
    if not names:
        return []
    settings = [settings_of(trial["overrides"]) for trial in trials]
    keys = [
        key
        for key in dict.fromkeys(chain(*settings))
        if len({setting.get(key) for setting in settings}) > 1
    ]
    groups: dict[tuple[str, ...], list[Line]] = {}
    others = [key for key in keys if key != SEED]
    for trial, setting in zip(trials, settings, strict=True):
        if trial["exit_code"] == 0:
            group = tuple(setting.get(key, "-") for key in others)
            groups.setdefault(group, []).append(trial)
    has_seeds = any(len(group) > 1 for group in groups.values())

    rows = [
        [str(trial["trial"]), *(one.get(key, "-") for key in keys), str(trial.get("step", "-"))]
        for trial, one in zip(trials, settings, strict=True)
    ]
    results = {name: [_results([trial], name) for trial in trials] for name in names}
    lines = _table(["trial", *keys, "steps"], rows, results, marks_best=not has_seeds)
    if has_seeds:
        rows = [[*group, str(len(members))] for group, members in groups.items()]
        results = {name: [_results(group, name) for group in groups.values()] for name in names}
        lines += _table([*others, "seeds"], rows, results, marks_best=True)
    return lines


def _results(trials: Sequence[Line], name: str) -> list[float]:
    if name == LOSS:
        return [trial[LOSS] for trial in trials if LOSS in trial]
    scores = [trial["score"] for trial in trials if trial.get("headline") == name]
    return [score for score in scores if score is not None]


def _table(
    head: list[str],
    rows: list[list[str]],
    results: Mapping[str, list[list[float]]],
    *,
    marks_best: bool,
) -> list[str]:
    table = [[*head, *results]] + [list(row) for row in rows]
    for name, of_rows in results.items():
        best = _best([mean(values) if values else None for values in of_rows], name)
        for index, values in enumerate(of_rows):
            cell = _digits(mean(values), name) if values else "-"
            if len(values) > 1:
                cell += f" ± {_digits(stdev(values), name)}"
            table[index + 1].append(cell + (" (best)" if marks_best and index == best else ""))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _best(values: Sequence[float | None], name: str) -> int | None:
    """Return the index of the best value.

    Returns None if there are fewer than two values, or if another value has the same shown digits.
    """
    known = [value for value in values if value is not None]
    choose: Callable[[list[float]], float] = min if name == LOSS else max
    if len(known) < 2:
        return None
    best = choose(known)
    shown = [_digits(value, name) for value in known]
    return values.index(best) if shown.count(_digits(best, name)) == 1 else None


def _digits(value: float, name: str) -> str:
    return f"{value:.4f}" if name == LOSS else f"{value:.3f}"
