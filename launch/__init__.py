"""Commands that start, watch and inspect runs, and prepare their inputs: `rollmatch NAME`."""

import importlib.util
import sys
from pathlib import Path

# sys.argv[0] is "-m" while Python imports this package to find the command's module.
if sys.argv[:1] == ["-m"] and importlib.util.find_spec("pydantic") is None:
    _python = Path(__file__).resolve().parent.parent / ".venv/bin/python"
    _command = next(
        (word.removeprefix("-m") for word in sys.orig_argv if "launch." in word), "launch.NAME"
    )
    sys.exit(
        f"{sys.executable} does not have the project's packages; run `{_python} -m {_command} ...`"
        " (`make setup` creates it)"
    )

# `rollmatch NAME` and `python -m launch.NAME` find the commands in these folders, too.
__path__ += [f"{__path__[0]}/{_folder}" for _folder in ("inspect", "tools", "run_folder")]
