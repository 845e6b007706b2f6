"""Problems quote the schema, and every value at every key has an answer."""

from __future__ import annotations

import random

import pytest
from config_changes import (
    BBOX_GEO,
    COORD_DIAG,
    DIAGNOSTICS,
    MATCHING,
    OBJECTIVE,
    changed,
    problems,
)

from shared.config import load_config
from shared.errors import ConfigError


def test_a_problem_quotes_what_a_key_means_its_default_and_the_keys_of_a_section():
    """The table of cases leaves these out."""
    (line,) = problems({"timeouts.learn_s": 0})
    assert "(Seconds for learning one round" in line
    assert line.endswith("; without the key it is 600.0)")
    assert "`seed: 17` (Seed of the run" in problems({"training.seed": ...})[0]
    assert "(seed, num_epochs, max_steps, " in problems({"training": []})[0]
    assert " pipeline, rollout_backend, " in problems({f"{MATCHING}.abc": 1})[0]


def overlaps(a: str, b: str) -> bool:
    """Tell whether one dotted path lies in the other."""
    return a == b or a.startswith((f"{b}.", f"{b}[")) or b.startswith((f"{a}.", f"{a}["))


def paths_in(node, above=""):
    if isinstance(node, dict):
        items = [(f"{above}.{key}".removeprefix("."), item) for key, item in node.items()]
    else:
        items = [(f"{above}[{index}]", item) for index, item in enumerate(node)]
    for path, item in items:
        yield path
        if isinstance(item, (dict, list)):
            yield from paths_in(item, path)


ALL_MODULES = {
    "custom.trainer_variant": "stage2_rollout_aligned",
    "stage2_ab.schedule": {},
    "evaluation": {"iou_thresholds": [0.5], "score": "constant"},
    f"{OBJECTIVE}[2]": BBOX_GEO,
    f"{DIAGNOSTICS}[0]": COORD_DIAG,
}
NAN = float("nan")
VALUES = [None, "x", "a\nb", 0, -1, 1.5, NAN, True, [], {}, ["A"], [[1]], {"a": {"b": 1}}, ...]


@pytest.mark.slow
@pytest.mark.parametrize("base", [{}, ALL_MODULES], ids=["minimal", "all modules"])
def test_whatever_stands_at_a_key_the_answer_is_a_configuration_or_lines_of_problems(base):
    sound = changed(base)
    paths = list(paths_in(sound))
    choice = random.Random(0)
    for number in range(500):
        apart: list[str] = []
        for path in choice.sample(paths, 1 + number % 4):
            if not any(overlaps(path, other) for other in apart):
                apart.append(path)
        # From the back, so that a deleted entry does not move one that is still to be changed.
        changes = {path: choice.choice(VALUES) for path in sorted(apart, reverse=True)}
        try:
            load_config(changed(changes, sound))
        except ConfigError as error:
            lines = str(error).splitlines()
            assert all(": " in line and "; " in line for line in lines), lines
