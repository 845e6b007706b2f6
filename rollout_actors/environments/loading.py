"""Loading of environments by name: `load_environment("arithmetic", num_examples=50)`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from zlib import crc32

from rollout_actors.environment_names import (
    environment_names,
    example_environments,
    installed_environments,
)
from rollout_actors.environments import foreign
from rollout_actors.environments.environment import Environment, full_name
from rollout_actors.environments.types import Fields
from shared.config.secrets import hide

FOREIGN = {"gym": "NAME", "openenv": "URL", "verifiers": "NAME"}
"""Prefixes of names of other libraries' environments, and what follows: `gym:NAME`."""

Load = Callable[..., Environment]


def load_environment(env_id: str, **env_args: object) -> Environment:
    """Load an environment by entry point, example, module, `.py` file, or, with a prefix, from
    another library (`gym:FrozenLake-v1`).

    Modules are searched in the working directory too. Errors of importing and loading are raised.

    Raises ValueError if the name is unknown or ambiguous, an argument is unknown or missing, the
    module has no `load_environment`, or that returned no Environment.
    """
    return make_environment(env_id, find_environment(env_id), env_args)


def make_environment(env_id: str, load: Load, env_args: Fields) -> Environment:
    """Make an environment by the function `load`, which `find_environment` returned.

    Raises ValueError for wrong arguments.
    """
    # First of all, because anything logged or raised from here on may repeat an argument.
    hide(env_args)
    _check_arguments(env_id, load, env_args)
    environment = load(**env_args)
    if not isinstance(environment, Environment):
        what = "nothing" if environment is None else full_name(environment)
        raise ValueError(
            f"{env_id}: its load_environment returned {what}; return an Environment of"
            " rollout_actors.environments"
        )
    if environment.env_id is None:
        environment.env_id = Path(env_id).stem if env_id.endswith(".py") else env_id
    environment.env_args = environment.env_args or dict(env_args)
    return environment


def find_environment(env_id: str) -> Load:
    """Return the function that makes the environment of this name, for `make_environment`.

    Raises ValueError if the name is unknown or ambiguous.
    """
    library, colon, name = env_id.partition(":")
    if colon and library in FOREIGN:
        _look_into_working_directory()
        module = importlib.import_module(f"{foreign.__name__}.{library}")
        return partial(_load_function(module, env_id), name)
    if env_id.endswith(".py"):
        return _load_function(_file_module(Path(env_id)), env_id)
    # Commands may write "-" or "_"; module names have underscores.
    module_name = env_id.replace("-", "_")
    installed = installed_environments()
    example = example_environments().get(module_name)
    meanings: dict[str, Callable[[], ModuleType | Load]] = {}
    # All meanings are looked up, so that an ambiguous name is refused and not guessed.
    if env_id in installed:
        meanings[f"the installed {installed[env_id].value}"] = installed[env_id].load
    if example is not None:
        meanings[f"the example {example}"] = partial(importlib.import_module, example)
    if _can_be_imported(module_name):
        meanings[f"the module {module_name}"] = partial(importlib.import_module, module_name)
    if len(meanings) > 1:
        raise ValueError(
            f"{env_id} is ambiguous: {' and '.join(meanings)}; write the module with its package,"
            " or the path of its file"
        )
    if not meanings:
        names = environment_names()
        near = get_close_matches(module_name, names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"no environment {env_id!r}{hint}; use {', '.join(names)}, a module or .py file that"
            " has load_environment(**args), or an environment of another library by its prefix:"
            f" {', '.join(f'{library}:{rest}' for library, rest in FOREIGN.items())}"
        )
    (load,) = meanings.values()
    found = load()
    return _load_function(found, env_id) if isinstance(found, ModuleType) else found


def _can_be_imported(name: str) -> bool:
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    _look_into_working_directory()
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # one of the packages around it is missing
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False
        raise
    # Any folder can be imported as a package, but without an `__init__.py` it has no file.
    return spec is not None and spec.origin is not None


def _look_into_working_directory() -> None:
    # A console script, unlike `python -m`, does not search the working directory.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _file_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    path = path.resolve()
    # So that it can import modules next to it, as a script can.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # The name is unlike every installed module's, and differs for files of the same name.
    module = ModuleType(f"rollmatch_environment_{path.stem}_{crc32(bytes(path)):08x}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    # Compiled anew, because Python's cache misses a second edit within one second.
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    return module


def _load_function(module: ModuleType, env_id: str) -> Load:
    load: Load | None = getattr(module, "load_environment", None)
    if load is None:
        raise ValueError(
            f"{env_id}: {module.__file__} has no load_environment; define load_environment(**args)"
            " that returns an Environment"
        )
    return load


def _check_arguments(env_id: str, load: Load, env_args: Fields) -> None:
    signature = inspect.signature(load)
    try:
        signature.bind(**env_args)
    except TypeError as error:
        raise ValueError(f"{env_id}: {error}; load_environment takes {signature}") from error
