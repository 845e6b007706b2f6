"""docs/explanation/architecture.md names files, folders and functions that exist, and all folders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shared.config import RunConfig
from shared.config.explain import sections_in

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
TEXT = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
PACKAGES = ("launch", "learner", "rollout_actors", "shared")
STEPS = [
    step
    for walk in re.findall(r"^## Walk .*?(?=^## )", PAGE, flags=re.DOTALL | re.MULTILINE)
    for step in re.findall(r"^\d+\. .*?(?=^\d+\. |\Z)", walk, flags=re.DOTALL | re.MULTILINE)
]


@cache
def names_of(file: Path) -> set[str]:
    """Return the names of a module: functions, classes with their members, constants."""

    def defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for statement in body:
            match statement:
                case ast.ClassDef(name=name):
                    yield prefix + name
                    yield from defined(statement.body, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield prefix + name
                case ast.Assign(targets=[ast.Name(id=name)]):
                    yield prefix + name
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield prefix + name

    return set(defined(ast.parse(file.read_text()).body))


def is_key(path: str) -> bool:
    """Tell whether the configuration has this key."""
    section = RunConfig
    *parents, key = path.split(".")
    for parent in parents:
        field = section.model_fields.get(parent)
        if field is None or not (inside := sections_in(field.annotation)):
            return False
        section = inside[0]
    return key in section.model_fields


def quoted_like(pattern: str) -> list[str]:
    return [quoted for quoted in QUOTED if re.fullmatch(pattern, quoted)]


def test_every_path_exists():
    paths = [ROOT / path for path in quoted_like(r"[\w.]*/[\w./]*") if not path.endswith("/")]
    folders = [ROOT / path for path in quoted_like(r"[\w.]*/[\w./]*/")]
    assert paths and folders
    assert [path for path in paths if not path.is_file()] == []
    assert [path for path in folders if not path.is_dir()] == []


def test_every_dotted_name_is_a_module_or_defined_in_one():
    for name in quoted_like(rf"({'|'.join(PACKAGES)})(\.\w+)+"):
        module, _, member = name.replace(".", "/").rpartition("/")
        if not (ROOT / module / f"{member}.py").is_file():
            assert member in names_of(ROOT / f"{module}.py")


def test_every_step_of_a_walk_names_what_its_files_define():
    assert len(STEPS) > 50
    for step in STEPS:
        quoted = re.findall(r"`([^`]+)`", step)
        modules = [path for path in quoted if path.endswith(".py")]
        assert modules or any(path.endswith(".yaml") for path in quoted), step
        defined = {name for path in modules for name in names_of(ROOT / path)}
        names = [name for name in quoted if "/" not in name]
        assert [name for name in names if name not in defined and not is_key(name)] == [], step


def test_every_folder_of_the_source_is_listed():
    listed = re.findall(r"^\| `([\w/]+)/` \|", PAGE.partition("\n## Folders\n")[2], re.MULTILINE)
    folders = {
        str(file.parent.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    }
    assert listed == sorted(folders)


def test_links_lead_to_pages():
    links = re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / "explanation" / link).is_file()] == []


def test_the_page_stays_short():
    assert PAGE.count("\n") <= 300
