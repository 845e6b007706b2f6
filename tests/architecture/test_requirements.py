"""docs/project/requirements.md names modules, tests and scenarios that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "project" / "requirements.md").read_text()
SECTIONS = PAGE.split("\n### ")[1:]
SCENARIOS = re.findall(r"^- `(tests/[^`]+)`$", PAGE, flags=re.MULTILINE)


def test_every_specification_is_quoted():
    # 67 scenarios of rollout matching and its step mode. Of trajectories eight points; of
    # orchestration nine of its testing plan and four criteria.
    environments = PAGE.split("\n## Environments")[1]
    quoted = [scenario for scenario in SCENARIOS if scenario in environments]
    assert len(quoted) >= 22
    assert len(SCENARIOS) - len(quoted) >= 67


def test_every_section_names_modules_and_tests_that_exist():
    for section in SECTIONS:
        (code,) = re.findall(r"^Code: (.+)$", section, flags=re.MULTILINE)
        paths = re.findall(r"`([^`]+)`", code)
        files = re.findall(r"`(tests/[^`:]+)", section)
        assert paths and files, section[:40]
        assert [path for path in paths + files if not (ROOT / path).is_file()] == []


@cache
def functions_of(file):
    """Return the names of a file's functions, which many scenarios name."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_the_scenarios_tests_exist():
    tests = [scenario.split("::") for scenario in SCENARIOS]
    assert [name for file, name in tests if name not in functions_of(file)] == []
