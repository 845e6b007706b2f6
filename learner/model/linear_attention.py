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

from learner.model.attention import lengths_of_row


class SegmentedDeltaNet(Qwen3_5GatedDeltaNet):
    """Qwen3.5's linear attention (gated delta net), computed separately for each segment."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        segment_lengths: tuple[int, ...] | None = None,
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

    All its gated delta nets are changed in place. Packed rows must run inside of `packed_row`.
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
    # An argument, because a layer is computed again in the backward, outside of `packed_row`.
    lengths = lengths_of_row(options["inputs_embeds"].shape[1])
    positions = options.get("position_ids")
    if lengths is None and positions is not None and options.get("attention_mask") is None:
        # The first are the text's, or those of time. Without padding they only fall between
        # segments, whose states would be mixed.
        first = positions[0] if positions.ndim == 3 else positions
        assert (first.diff(dim=-1) >= 0).all(), "a packed row outside of `packed_row`"
    return arguments, {**options, "segment_lengths": lengths}
