"""Run `benchmarks.learner_step` with realistic sizes: 4B, rows of 12,000 tokens, bfloat16."""

from __future__ import annotations

import sys

from benchmarks import learner_step
from benchmarks.gpu.probe import options

ON_A_CARD = "--size 4b --tokens 12000 --segment 1700 --dtype bfloat16 --repeats 3 --rows 2"
TOY = "--size small --tokens 600 --segment 300 --repeats 1 --rows 1"


def main() -> None:
    arguments = options(__doc__)
    sizes = TOY if arguments.toy else ON_A_CARD
    sys.argv = ["learner_step", "--device", str(arguments.device), *sizes.split()]
    learner_step.main()


if __name__ == "__main__":
    main()
