"""Changes a vision tower of transformers so that the host does not wait for a GPU in each row.

What depends on the sizes of images is computed in host memory. Results do not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from learner.model.attention import SEGMENT_ATTENTION, RowBorders
from learner.model.ranks import to_device


class PatchProjection(nn.Conv3d):
    """The patch embedding of a vision tower, computed as one matrix product.

    transformers implements it as a `Conv3d`, for which cuDNN has no usable bfloat16 backward.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [R, E, 1, 1, 1] of R image patches [R, C, T, H, W]."""
        projected_RE = F.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return projected_RE[:, :, None, None, None]


def prepare_vision_tower(model: nn.Module) -> None:
    """Change the vision tower of `model` in place, if it has one, without changing its results.

    The patch embedding becomes one matrix product (`PatchProjection`). In Qwen-VL models, positions
    and borders of images are computed in host memory, and the features of images are added to the
    hidden states without waiting for a GPU.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Conv3d:
            # Its input consists of patches of the kernel's size, so it must not cut patches itself.
            assert module.stride == module.kernel_size, "a patch embedding's patches do not overlap"
            # Exchange the class instead of the attribute `forward`: copies of the model keep it.
            module.__class__ = PatchProjection
        if name.rpartition(".")[2] == "visual":
            module.register_forward_pre_hook(_place_images, with_kwargs=True)
        if "_deepstack_process" in dir(module):
            module._deepstack_process = add_image_features


def _place_images(
    tower: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass what follows from the images' grids as arguments, which the tower would else compute."""
    grid_I3 = options["grid_thw"].cpu()
    merge = tower.spatial_merge_size
    on_device = {"position_ids": get_vision_position_ids(grid_I3, merge)}
    borders = {"cu_seqlens": get_vision_cu_seqlens(grid_I3)}
    longest = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}
    if "window_size" in vars(tower):  # Qwen2.5-VL
        on_device["window_index"], borders["cu_window_seqlens"] = get_vision_window_index(
            grid_I3, merge, tower.window_size, tower.patch_size
        )
    if "num_grid_per_side" in vars(tower):  # learned positions, such as Qwen3-VL's
        on_device["interp_indices"], on_device["interp_weights"] = (
            get_vision_interpolation_indices_and_weights(
                grid_I3,
                tower.num_grid_per_side,
                tower.interpolation_mode,
                tower.interpolation_align_corners,
                merge,
            )
        )
    device = arguments[0].device
    placed: dict[str, Any] = {key: to_device(one, device) for key, one in on_device.items()}
    is_by_segments = tower.config._attn_implementation == SEGMENT_ATTENTION
    for key, starts in borders.items():
        lengths = starts.diff().tolist()
        # Other attention only reads the lengths, which stay in host memory.
        placed[key] = RowBorders.of(lengths, device) if is_by_segments else starts
        placed[longest[key]] = max(lengths)
    return arguments, {**options, **placed}


def add_image_features(
    hidden_BTE: torch.Tensor, is_image_BT: torch.Tensor, features_VE: torch.Tensor
) -> torch.Tensor:
    """Return hidden states with features added at the tokens of images (Qwen3-VL's deepstack).

    It is transformers' `_deepstack_process`, whose index is a mask, for which the host waits.

    Args:
        is_image_BT: whether a token belongs to an image.
        features_VE: the features of all these tokens, in order.
    """
    # The number of tokens is known, so nothing waits for the GPU to count them. transformers'
    # `get_placeholder_mask` has raised if it is not the number of features.
    at_V = torch.nonzero_static(is_image_BT.flatten(), size=len(features_VE))[:, 0]
    hidden_NE = hidden_BTE.flatten(0, 1)
    with_features_VE = hidden_NE[at_V] + features_VE.to(hidden_NE.dtype)
    return hidden_NE.index_put((at_V,), with_features_VE).view_as(hidden_BTE)
