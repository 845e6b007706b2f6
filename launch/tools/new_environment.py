"""Writes files for a new environment: `rollmatch new-environment NAME [--out FOLDER]`.

There are three files: `NAME.py`, a working environment; its test; and an experiment that trains it.
"""

from __future__ import annotations

import argparse
import json
import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cli import explained
from launch.run_folder.console import make_console
from rollout_actors.environment_names import environment_names
from shared.errors import ConfigError

TEMPLATES = Path(__file__).parents[1] / "templates"
FILES = {
    "environment.py.txt": "NAME.py",
    "environment_test.py.txt": "test_NAME.py",
    "environment.yaml.txt": "experiment/NAME.yaml",
}
"""Template files of a new environment, with the path of each result in its folder."""


def write_environment(name: str, folder: Path) -> list[Path]:
    """Write the files of a new environment, and return their paths.

    Raises ConfigError if the name is not a module name or is taken, or a file exists.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"NAME: {name!r} is not a module name; use letters, digits and _")
    if name in sys.stdlib_module_names:
        raise ConfigError(
            f"NAME: {name} would hide the Python module of this name; choose another name"
        )
    if name in environment_names():
        raise ConfigError(f"NAME: an environment {name} already exists; choose another name")
    # Absolute, so that training finds the file from any folder.
    paths = [folder.resolve() / path.replace("NAME", name) for path in FILES.values()]
    if there := [str(path) for path in paths if path.exists()]:
        raise ConfigError(f"--out: {', '.join(there)} already exists; give another folder")
    values = {"NAME": name, "PATH": json.dumps(str(paths[0]))}
    for template, path in zip(FILES, paths, strict=True):
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        # One pass, because a name may contain PATH.
        text = re.sub("NAME|PATH", lambda found: values[found[0]], text)
        path.write_text(text, encoding="utf-8")
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("rollmatch new-environment", description=__doc__)
    parser.add_argument("name", metavar="NAME", help="name of the environment and its module")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    options = parser.parse_args(arguments)
    with explained(make_console(stderr=True)):
        environment, test, experiment = write_environment(options.name, options.out)
    file, of_test, folder = (
        shlex.quote(str(path)) for path in (environment, test, experiment.parents[1])
    )
    print(f"environment  {environment}: `vf-eval {file}` evaluates a model in it")
    print(f"test         {test}: `python -m pytest {of_test}`")
    train = f"python -m launch.train --config-dir {folder} +experiment={options.name}"
    print(f"experiment   {experiment}: `{train}`")


if __name__ == "__main__":
    main()
