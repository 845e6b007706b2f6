"""docs/requirements.md names modules and tests that exist, and scenario titles are the names of their tests."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "requirements.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| requirement")
]
TESTS = [(row[0], test) for row in ROWS for test in re.findall(r"`(tests/[^`]+)`", row[2])]


def test_the_table_was_found_and_its_rows_were_read():
    assert len(ROWS) > 50
    assert len(TESTS) > 50


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_the_modules_exist(row):
    modules = re.findall(r"`([^`]+)`", row[1])
    assert modules
    assert [module for module in modules if not (ROOT / module).is_file()] == []


@pytest.mark.parametrize(("requirement", "test"), TESTS, ids=lambda value: value.split("::")[-1][:60])
def test_the_tests_exist_and_carry_their_scenarios_title(requirement, test):
    file, name = test.split("::")
    functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert name in functions
    scenario = re.fullmatch(r'"(.+)"', requirement)
    if scenario is not None:
        title = re.sub(r"[^a-z0-9]+", "_", scenario[1].lower()).strip("_")
        assert title in name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_every_line_but_headings_has_a_test(row):
    assert row[0].startswith("**") == (not row[2])
