"""Run `benchmarks.learner_step` with realistic sizes: 4B, rows of 12,000 tokens, bfloat16.

On a GPU that is too small for a whole step it measures only the rows.
"""

from __future__ import annotations

import sys

import torch

from benchmarks import learner_step
from benchmarks.gpu.probe import options

ON_A_CARD = "--size 4b --dtype bfloat16 --repeats 3 --rows 2"
TOY = "--size small --tokens 600 --segment 300 --repeats 1 --rows 1"
UPDATE_BYTES = 90e9
"""A whole step at 4B needs this much: only the rows are measured on a smaller GPU."""


def main() -> None:
    arguments = options(__doc__)
    sizes = TOY if arguments.toy else ON_A_CARD
    sys.argv = ["learner_step", "--device", str(arguments.device), *sizes.split()]
    if (
        arguments.device.type == "cuda"
        and torch.cuda.get_device_properties(arguments.device).total_memory < UPDATE_BYTES
    ):
        sys.argv.append("--no-update")
    learner_step.main()


if __name__ == "__main__":
    main()
