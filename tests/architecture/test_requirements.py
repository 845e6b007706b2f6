"""The pages of docs/project/requirements name modules and tests that exist, within their length."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "project" / "requirements"
PAGES = {page.stem: page.read_text() for page in FOLDER.glob("*.md") if page.stem != "index"}
LINES = [line for page in PAGES.values() for line in page.splitlines() if line.startswith("- ")]
TESTS = {test for line in LINES for test in re.findall(r"`(tests/[^`]+)`", line)}


def scenarios(page):
    """Return the lines of a page that are a test only: its name quotes a specification."""
    return re.findall(r"^- `tests/[^`]+`$", PAGES[page], flags=re.MULTILINE)


def test_the_lists_were_found_and_their_lines_were_read():
    assert len(LINES) > 500
    assert len(TESTS) > 1000


@pytest.mark.parametrize(
    ("pages", "quoted"),
    [
        (["configuration_and_data", "answers", "engines", "weights_and_learner"], 67),
        (["environments"], 22),
    ],
)
def test_each_specification_is_quoted(pages, quoted):
    # Of trajectories eight points, of orchestration nine of its testing plan and four criteria.
    assert sum(len(scenarios(page)) for page in pages) >= quoted


def test_every_line_has_a_test():
    assert [line for line in LINES if "`tests/" not in line] == []


def test_a_promise_has_at_most_twelve_words():
    promises = [re.sub(r"`tests/.*", "", line.removeprefix("- ")) for line in LINES]
    assert [promise for promise in promises if len(promise.split()) > 12] == []


def test_every_section_names_modules_that_exist():
    for page in PAGES.values():
        for section in page.split("\n## ")[1:]:
            (code,) = re.findall(r"^Code: (.+)$", section, flags=re.MULTILINE)
            paths = re.findall(r"`([^`]+)`", code)
            assert paths, section[:40]
            assert [path for path in paths if not (ROOT / path).is_file()] == []


@cache
def functions_of(file):
    """Return the names of a file's functions, which many lines name."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_the_tests_exist():
    absent = []
    for test in sorted(TESTS):
        file, name = test.split("::")
        if not (ROOT / file).is_file() or name not in functions_of(file):
            absent.append(test)
    assert absent == []
