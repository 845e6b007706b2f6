"""The learner's device: a GPU does its work later than it is told to, a CPU at once.

What has to be done for that reason is here, so that a test can watch it without a GPU.
"""

from __future__ import annotations

import torch


class LearnerDevice:
    """The device of one learner rank. Not run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def use_full_float32(self) -> None:
        """Have this process multiply float32 in float32 on a GPU.

        By default cuDNN's convolutions use TF32, whose 10 bits are too few for the tolerances at
        which learner and engine are compared; another library may ask for it in products.
        """
        if self.device.type == "cuda":
            # Not `fp32_precision` of each operation: `cudnn.allow_tf32`, which others read, then
            # raises.
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False

    def wait(self) -> None:
        """Return when all that the calling thread has queued on the device is done.

        An optimizer update is only queued when `Updater.update` returns. Another stream or
        another process that reads the weights then may find those of the step before.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
