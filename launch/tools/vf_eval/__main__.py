"""Evaluates a model in an environment. `rollmatch vf-eval` is the same command.

    vf-eval ENVIRONMENT -m MODEL [-b URL] [-n EXAMPLES] [-r ROLLOUTS] ...

Scores and datasets are computed from `rollouts.jsonl` in the evaluation's folder, so resumed
evaluations give the same results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch.cli import explained
from launch.run_folder.console import make_console
from launch.tools.vf_eval.arguments import read_options


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        options = read_options(sys.argv[1:] if arguments is None else arguments)
        # Imported here, so that `--help` does not wait for openai.
        from launch.tools.vf_eval.session import evaluate

        if status := evaluate(options):
            sys.exit(status)


if __name__ == "__main__":
    main()
