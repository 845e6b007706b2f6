"""Starts, watches and inspects runs, and makes what they need: `rollmatch NAME`."""

import importlib.util
import sys
from pathlib import Path

# Python has put "-m" there while it imports this package to find the command's module.
if sys.argv[:1] == ["-m"] and importlib.util.find_spec("pydantic") is None:
    _python = Path(__file__).resolve().parent.parent / ".venv/bin/python"
    _command = next(
        (word.removeprefix("-m") for word in sys.orig_argv if "launch." in word), "launch.NAME"
    )
    sys.exit(
        f"{sys.executable} does not have the project's packages; run `{_python} -m {_command} ...`"
        " (`make setup` makes it)"
    )

# `rollmatch NAME` and `python -m launch.NAME` find the commands in these folders, too.
__path__ += [f"{__path__[0]}/{_folder}" for _folder in ("inspect", "tools", "run_folder")]
