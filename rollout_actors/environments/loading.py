"""From the name of an environment to the environment: `load_environment("arithmetic",
num_examples=50)`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rollout_actors.environments import examples
from rollout_actors.environments.environment import Environment, full_name

ENTRY_POINTS = "rollmatch.environments"
"""The group under which an installed package names its environments: `name = "package.module"`, or
`"package.module:load_environment"`.
"""

Load = Callable[..., Environment]


def load_environment(env_id: str, **env_args: Any) -> Environment:
    """What `load_environment(**env_args)` returns, of an installed entry point, an example, a
    module, or a file that ends in `.py`.

    Modules are looked for in the working directory too. ValueError for a name that means nothing
    (it says what there is), or two things; for arguments that are not there or are missing; and for
    a module without that function. What importing or calling it raises is raised.
    """
    return make_environment(env_id, find_environment(env_id), env_args)


def make_environment(env_id: str, load: Load, env_args: Mapping[str, Any]) -> Environment:
    """The second half of `load_environment`: `load` is what `find_environment` found under this
    name. Raises as that does of arguments, and of what is made.
    """
    _check_arguments(env_id, load, env_args)
    environment = load(**env_args)
    if not isinstance(environment, Environment):
        what = "nothing" if environment is None else full_name(environment)
        raise ValueError(
            f"{env_id}: its load_environment returned {what}; return an Environment of"
            " rollout_actors.environments, such as its SingleTurnEnv or ToolEnv"
        )
    if environment.env_id is None:
        environment.env_id = Path(env_id).stem if env_id.endswith(".py") else env_id
    environment.env_args = environment.env_args or dict(env_args)
    return environment


def environment_names() -> list[str]:
    """Of the examples and of what is installed. Modules and files have their own."""
    return sorted({*_installed(), *_examples()})


def find_environment(env_id: str) -> Load:
    """The first half of `load_environment`: the function of this name. Raises as that does of
    names.
    """
    if env_id.endswith(".py"):
        return _load_of(_file_module(Path(env_id)), env_id)
    # An argument of a command may be written either way; a module's name has underscores.
    module_name = env_id.replace("-", "_")
    installed, example = _installed(), _examples()
    meanings: dict[str, Callable[[], Any]] = {}
    if env_id in installed:
        meanings[f"the installed {installed[env_id].value}"] = installed[env_id].load
    if module_name in example:
        meanings[f"the example {example[module_name]}"] = lambda: importlib.import_module(
            example[module_name]
        )
    if _can_be_imported(module_name):
        meanings[f"the module {module_name}"] = lambda: importlib.import_module(module_name)
    if len(meanings) > 1:
        raise ValueError(
            f"{env_id} is {' and '.join(meanings)}; write the module with its package, or the path"
            " of its file"
        )
    if not meanings:
        near = get_close_matches(module_name, environment_names(), n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        there = ", ".join(environment_names())
        raise ValueError(
            f"no environment {env_id!r}{meant}; there are {there}, and any module or .py file that"
            " has load_environment(**args)"
        )
    found = next(iter(meanings.values()))()
    return _load_of(found, env_id) if isinstance(found, ModuleType) else found


def _installed() -> Mapping[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _examples() -> Mapping[str, str]:
    return {
        one.name: f"{examples.__name__}.{one.name}"
        for one in pkgutil.iter_modules(examples.__path__)
    }


def _can_be_imported(name: str) -> bool:
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    _look_here()
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # of the packages around it, one is not there
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False
        raise
    # Any folder is a package without a file.
    return spec is not None and spec.origin is not None


def _look_here() -> None:
    """A console script, unlike `python -m`, does not find the modules of the working directory."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _file_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    # Under no name that another module might have.
    name, file = f"rollmatch_environment_{path.stem}", str(path.resolve())
    # It finds its neighbours, as a script does.
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, file, loader=_AsItIs(name, file))
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _AsItIs(SourceFileLoader):
    """Compiles the file each time. Python's cache takes a change within the same second that leaves
    the size for none, and keeps what a full disk left of it."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _load_of(module: ModuleType, env_id: str) -> Load:
    load: Load | None = getattr(module, "load_environment", None)
    if load is None:
        raise ValueError(
            f"{env_id}: {module.__file__} has no load_environment; define load_environment(**args)"
            " that returns an Environment"
        )
    return load


def _check_arguments(env_id: str, load: Load, given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(load).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    named = {
        name: one
        for name, one in parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    unknown = [] if takes_all else [name for name in given if name not in named]
    missing = [
        name for name, one in named.items() if one.default is one.empty and name not in given
    ]
    if not unknown and not missing:
        return
    faults = [
        *(f"there is no argument {name!r}" for name in unknown),
        *(f"{name!r} is missing" for name in missing),
    ]
    takes = ", ".join(
        name if one.default is one.empty else f"{name}={one.default!r}"
        for name, one in named.items()
    )
    raise ValueError(f"{env_id}: {'; '.join(faults)}; it takes {takes or 'none'}")
