"""Linear attention for packed rows (Qwen3.5): each segment is computed separately.

transformers' gated delta net reads a row as one sequence, so its convolution and state silently
leak from one segment into the next. Here each segment starts with an empty state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet


class SegmentedDeltaNet(Qwen3_5GatedDeltaNet):
    """Qwen3.5's linear attention (gated delta net), computed separately for each segment."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        segment_lengths: list[int] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Compute a packed row [1, T, E] segment by segment.

        `segment_lengths` are in tokens. If None, compute [B, T, E] as B whole sequences.
        """
        forward = super().forward
        if segment_lengths is None:
            whole: torch.Tensor = forward(hidden_states, **options)
            return whole
        segments = hidden_states.split(segment_lengths, dim=1)
        return torch.cat([forward(segment, **options) for segment in segments], dim=1)


def keep_segments_apart(model: PreTrainedModel) -> None:
    """Make the linear attention of `model` compute each segment of a packed row separately.

    All its gated delta nets are changed in place.
    """
    for module in model.modules():
        if type(module) is Qwen3_5GatedDeltaNet:
            # Exchange the class instead of the attribute `forward`: copies of the model keep it.
            module.__class__ = SegmentedDeltaNet
    # The language model passes additional keyword arguments to its layers.
    model.get_decoder().register_forward_pre_hook(_tell_segments, with_kwargs=True)


def _tell_segments(
    module: nn.Module,  # noqa: ARG001 (torch's signature of a hook)
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions: torch.Tensor | None = options.get("position_ids")
    # The same conditions under which transformers' attention looks for segments.
    is_whole = options.get("attention_mask") is None and options.get("past_key_values") is None
    if positions is None or positions.shape[-2] != 1 or not is_whole:
        return arguments, options
    if positions.ndim == 3 and len(positions) == 3:
        # The three M-RoPE rows do not show segments. With four rows, the first row shows them.
        return arguments, options
    text_T = positions.reshape(-1, positions.shape[-1])[0]
    begins = (text_T.diff() != 1).nonzero()[:, 0] + 1
    ends = begins.new_tensor([len(text_T)])
    lengths = torch.cat([begins.new_zeros(1), begins, ends]).diff().tolist()
    return arguments, {**options, "segment_lengths": lengths}
