"""The shape of the source: its folders, its class names and its README stay small."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for package in ("launch", "learner", "rollout_actors", "shared")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def test_no_folder_holds_more_than_14_modules():
    modules = defaultdict(list)
    for path in SOURCES:
        if path.name != "__init__.py":
            modules[str(path.parent.relative_to(ROOT))].append(path.stem)
    assert {folder: names for folder, names in modules.items() if len(names) > 14} == {}


def test_no_public_class_name_stands_in_two_files():
    files = defaultdict(list)
    for path in SOURCES:
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                files[statement.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_the_readme_is_read_on_a_page_or_two():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 100] == []


UNPICKLING = re.compile(
    r"pickle\.loads?\(|(?<!safetensors\.)torch\.load\(|(allow_pickle|trust_remote_code)=True"
    r"|\bimport (cloudpickle|dill|joblib|marshal|shelve)|yaml\.(unsafe_|full_)?load\((?!.*BaseLoader)"
)


def test_nothing_unpickles_a_file_or_runs_code_that_one_names():
    """Run folders, checkpoints and data may be a stranger's (docs/explanation/trust.md)."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if UNPICKLING.search(line)
    ]
    assert found == []
