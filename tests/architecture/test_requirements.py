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


def test_the_modules_exist():
    for requirement, modules, _ in ROWS:
        paths = re.findall(r"`([^`]+)`", modules)
        assert paths, requirement
        assert [path for path in paths if not (ROOT / path).is_file()] == [], requirement


@cache
def functions_of(file):
    """Return the names of a file's functions, which many rows name."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_the_tests_exist_and_carry_their_scenarios_title():
    for requirement, test in TESTS:
        file, name = test.split("::")
        assert name in functions_of(file), test
        scenario = re.fullmatch(r'"(.+)"', requirement)
        if scenario is not None:
            title = re.sub(r"[^a-z0-9]+", "_", scenario[1].lower()).strip("_")
            assert title in name, requirement


def test_every_line_but_headings_has_a_test():
    assert [row[0] for row in ROWS if row[0].startswith("**") != (not row[2])] == []
