"""What `benchmarks.hostile` names is there: pytest runs nothing at all where one path is wrong."""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_is_named_exists(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    tries = importlib.import_module("benchmarks.hostile").TRIES
    for name in (name for names in tries.values() for name in names):
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert f"def {test}" in (ROOT / path).read_text(), name
