"""docs/requirements.md names modules and tests that exist, and tests by their quoted scenarios."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "requirements.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| requirement")
]
TESTS = [(row[0], test) for row in ROWS for test in re.findall(r"`(tests/[^`]+)`", row[2])]


def test_the_tables_were_found_and_their_rows_were_read():
    assert len(ROWS) > 250
    assert len(TESTS) > 500


@pytest.mark.parametrize(
    ("section", "quoted"),
    [("Rollout matching", 50), ("Trajectories", 8), ("Rollout orchestration", 13)],
)
def test_each_specification_is_quoted(section, quoted):
    # Orchestration has nine points in its testing plan, and four acceptance criteria.
    (table,) = (part for part in PAGE.split("\n## ") if part.startswith(f"{section}\n"))
    assert len(re.findall(r'^\| "', table, flags=re.MULTILINE)) >= quoted


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_the_modules_exist(row):
    modules = re.findall(r"`([^`]+)`", row[1])
    assert modules
    assert [module for module in modules if not (ROOT / module).is_file()] == []


@cache
def functions_of(file):
    """Return the names of a file's functions, which many rows name."""
    return {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requirement", "test"), TESTS, ids=lambda value: value.split("::")[-1][:60]
)
def test_the_tests_exist_and_carry_their_scenarios_title(requirement, test):
    file, name = test.split("::")
    assert name in functions_of(file)
    scenario = re.fullmatch(r'"(.+)"', requirement)
    if scenario is not None:
        title = re.sub(r"[^a-z0-9]+", "_", scenario[1].lower()).strip("_")
        assert title in name


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_every_line_but_headings_has_a_test(row):
    assert row[0].startswith("**") == (not row[2])
