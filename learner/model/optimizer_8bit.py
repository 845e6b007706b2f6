"""AdamW with moments of 8 bits: that of bitsandbytes, with a state that is saved as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit as BitsAndBytesAdamW8bit

_MAPS = ("qmap1", "qmap2")
"""What the 256 codes stand for: the same for all, and made with the state."""


class AdamW8bit(BitsAndBytesAdamW8bit):
    """Moments as codes of 8 bits, and a float32 scale for every 256 of them.

    Tensors under 4,096 values have moments of 32 bits, and so has a group with `optim_bits: 32`.
    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2021).
    """

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return what holds for a tensor; called by the base class for each."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        return config | {"optim_bits": group["optim_bits"]}

    def saved_state(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments of a tensor, none where it has had no gradient yet."""
        return {
            kind: torch.as_tensor(value)
            for kind, value in self.state.get(master, {}).items()
            if kind not in _MAPS
        }

    @torch.no_grad()
    def restore_state(self, master: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Put the moments of a tensor back to what `saved_state` returned."""
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
