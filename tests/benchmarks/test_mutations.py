"""The faults of `benchmarks.mutations` fit the code; trying the tests on them takes an hour."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture
def mutations(monkeypatch):
    """`benchmarks` is no installed package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.mutations")


def test_every_fault_fits_the_code_that_it_is_to_be_put_into(mutations):
    """A line that is rewritten needs its fault anew: `old` and `new` of the mutant named here."""
    assert mutations.problems() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old": "no such line"}, "'no such line' is 0 times in"),
        ({"old": "import "}, "times in"),
        ({"new": "def"}, "invalid syntax"),
        ({"path": "learner/no_such_file.py"}, "No such file"),
        ({"tests": ("tests/no_such_file.py",)}, "no tests/no_such_file.py"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_one_that_does_not_fit_is_named(mutations, monkeypatch, changes, message):
    spoiled = replace(mutations.MUTANTS[1], **changes)
    monkeypatch.setattr(mutations, "MUTANTS", (mutations.MUTANTS[0], spoiled))
    (problem,) = mutations.problems()
    assert problem.startswith(f"{spoiled.name}: ")
    assert message in problem


def test_two_of_the_same_name_are_named(mutations, monkeypatch):
    mutant = mutations.MUTANTS[0]
    monkeypatch.setattr(mutations, "MUTANTS", (mutant, mutant))
    assert mutations.problems() == [f"{mutant.name}: is the name of several mutants"] * 2


def test_what_fails_wherever_a_fault_is_put_in_is_no_test_of_it(mutations):
    """Leave this file out: in a tree with a fault, that fault fits no more."""
    assert (mutations.ROOT / mutations.ABOUT_MUTANTS).samefile(__file__)
    (stage,) = (stage for stage in mutations.STAGES if stage.on_all_files)
    assert f"--ignore={mutations.ABOUT_MUTANTS}" in stage.arguments(mutations.MUTANTS)
    assert not any(mutations.ABOUT_MUTANTS in mutant.tests for mutant in mutations.MUTANTS)
