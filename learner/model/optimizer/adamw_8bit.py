"""AdamW with 8-bit moments: bitsandbytes' optimizer, with a state that can be saved as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit as BitsAndBytesAdamW8bit

_MAPS = ("qmap1", "qmap2")
"""Keys of the optimizer state that hold the values of the 256 codes.

They are not saved, because they are the same for all tensors and created with the state.
"""


class AdamW8bit(BitsAndBytesAdamW8bit):
    """AdamW whose moments are 8-bit codes, with a float32 scale for every 256 codes.

    Tensors under 4,096 values and groups with `optim_bits: 32` have 32-bit moments.
    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2021).
    """

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer settings of one tensor. The base class calls it for each tensor."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        return config | {"optim_bits": group["optim_bits"]}

    def saved_state(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments of a master weight; empty if it has had no gradient yet."""
        return {
            kind: torch.as_tensor(value)
            for kind, value in self.state.get(master, {}).items()
            if kind not in _MAPS
        }

    @torch.no_grad()
    def restore_state(self, master: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Restore the moments of a master weight from the result of `saved_state`."""
        for gindex, group in enumerate(self.param_groups):
            for pindex, tensor in enumerate(group["params"]):
                if tensor is master:
                    self.init_state(group, master, gindex, pindex)
        state = self.state[master]
        for kind, value in values.items():
            if kind == "step":
                state[kind] = int(value)
            else:
                state[kind].copy_(value)
