"""What packed rows need of transformers' models: images, logits of chosen positions, and a check.

A vision tower is changed so that the host does not wait for a GPU in each row: what depends on the
sizes of images is computed in host memory.

Any text model of transformers may be trained. Some do not separate the segments of a packed row
(position embeddings of their own, layers with a state), or change logits after the head. A check at
a run's start detects both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from learner.model.attention import (
    SEGMENT_ATTENTION,
    RowBorders,
    packed_row,
)
from learner.model.ranks import to_device
from shared.errors import ConfigError

_REMEDY = (
    "try model.attention=eager or model.attention=sdpa; if both fail, choose another model type,"
    " such as llama or qwen3"
)
_LENGTHS = (7, 19, 12)
_NUM_SHARED = 11
_SEED = 20261129
# Of a log-probability, in nats. Right models differ by 1e-6 in float32; a model whose segments see
# each other by 0.01 and more.
_LARGEST_FLOAT32 = 1e-3
# Mean over the most probable tokens; logits between 16 and 32 are rounded to an eighth.
_MEAN_BFLOAT16 = 0.1

Forward = Callable[[Callable[[], torch.Tensor]], torch.Tensor]
"""Calls a function that runs one forward of the model (`Parallel.forward`).

If the model is sharded, the call is a collective.
"""


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
        if "_deepstack_process" in vars(type(module)):
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


def logits_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from hidden states [N, D] to logits [N, V] of a model of transformers.

    It is the model's head, with the scale or the cap that some families apply to logits. Another
    family may change logits in another way, which `check_packed_rows` detects.
    """
    config = model.config.get_text_config()
    divisor = getattr(config, "logits_scaling", None)  # Granite
    factor = getattr(config, "logit_scale", None)  # Cohere
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later
    if divisor is None and factor is None and cap is None:
        head: Callable[[torch.Tensor], torch.Tensor] = model.lm_head
        return head

    def logits(hidden_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = model.lm_head(hidden_ND)
        if divisor is not None:
            logits_NV = logits_NV / divisor
        if factor is not None:
            logits_NV = logits_NV * factor
        if cap is not None:
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV

    return logits


class Float32Head(nn.Linear):
    """The head of a model in bfloat16 with logits in float32, like vLLM's `head_dtype: float32`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of hidden states [..., D]."""
        logits: torch.Tensor = _Float32Product.apply(input, self.weight)
        return logits if self.bias is None else logits + self.bias


class _Float32Product(torch.autograd.Function):
    """A product whose result is not rounded. Its gradients are rounded once, as without it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight_VD)
        if not hidden.is_cuda:
            return F.linear(hidden.float(), weight_VD.float())
        # Without a float32 copy of the weights.
        flat_ND = hidden.reshape(-1, hidden.shape[-1])
        logits_NV = torch.mm(flat_ND, weight_VD.t(), out_dtype=torch.float32)
        return logits_NV.reshape(*hidden.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight_VD = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        of_hidden, of_weight = None, None
        if ctx.needs_input_grad[0]:
            of_hidden = gradient @ weight_VD
        if ctx.needs_input_grad[1]:
            of_weight = gradient.flatten(0, -2).t() @ hidden.flatten(0, -2)
        return of_hidden, of_weight


def use_float32_head(model: Any, path: Path) -> None:
    """Make the head of `model` compute logits in float32 (`model.head_dtype`).

    Raises ConfigError for a head that is not an ordinary linear layer. `path` is its checkpoint.
    """
    head = model.lm_head
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"model.head_dtype: float32 needs a linear head, but with this configuration the head"
            f" of {path} is a {type(head).__name__}, such as an adapter's for new tokens; set it to"
            " model"
        )
    # Exchange the class instead of the attribute `forward`: copies of the model keep it.
    head.__class__ = Float32Head


def check_packed_rows(
    model: Any, path: str, dtype: str, forward: Forward, *, shares_prompts: bool = False
) -> float:
    """Compare a packed row's log-probabilities with those of its segments, computed one by one.

    The segments run through the model's own forward, without packing. Return the largest difference
    of a log-probability, in nats. Weights do not change.

    Args:
        model: a text model of transformers, as the run has loaded it.
        path: the model's checkpoint, for the message.
        dtype: number type of the forward pass (`model.dtype`). A sharded model computes in it too,
            although its shards are float32.
        shares_prompts: let the last segment begin with tokens of the one before it.

    Raises:
        ConfigError: the model computes NaN, or cannot compute packed rows, or not with the run's
            `model.attention` or `training.share_prompts`.
    """
    remedy = _REMEDY
    if shares_prompts:
        remedy = f"set training.share_prompts: false; if that fails too, {_REMEDY}"
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(_SEED)
    ids_T = torch.randint(vocabulary, (sum(_LENGTHS),), generator=generator).to(model.device)
    num_shared = (0, 0, _NUM_SHARED if shares_prompts else 0)
    places = zip(_LENGTHS, num_shared, strict=True)
    positions = [torch.arange(first, first + length) for length, first in places]
    positions_T = torch.cat(positions).to(model.device)

    def packed() -> torch.Tensor:
        with packed_row(_LENGTHS, num_shared):
            body = model.base_model(
                input_ids=ids_T[None],
                position_ids=positions_T[None],
                attention_mask=None,
                use_cache=False,
            )
        return logits_of(model)(body.last_hidden_state[0])

    def alone(part_L: torch.Tensor) -> torch.Tensor:
        logits_LV: torch.Tensor = model(input_ids=part_L[None], use_cache=False).logits[0]
        return logits_LV

    with torch.no_grad():
        try:
            row_TV = forward(packed).float().log_softmax(-1)
        except (AttributeError, TypeError) as error:
            kind = model.config.model_type
            wrong = f"model.path: {path} is a {kind} model, which cannot compute packed rows"
            raise ConfigError(f"{wrong} ({error}); {remedy}") from error
        *others, last_L = ids_T.split(_LENGTHS)
        segments = [*others, torch.cat([others[-1][: num_shared[-1]], last_L])]
        parts = [forward(partial(alone, segment_L)) for segment_L in segments]
        pairs = zip(parts, num_shared, strict=True)
        alone_TV = torch.cat([part_LV[first:] for part_LV, first in pairs]).float().log_softmax(-1)
    if alone_TV.isnan().any():
        raise ConfigError(
            f"model.path: the model in {path} computes NaN for a test prompt in {dtype}: its files"
            " hold NaN or infinite weights, or values that are too large for this type; fetch the"
            " checkpoint again, or set model.dtype to the type that it was trained in"
        )
    difference_TV = (row_TV - alone_TV).abs()
    largest = float(difference_TV.max())
    if dtype == "float32":
        is_right = largest <= _LARGEST_FLOAT32
    else:
        of_best_T1 = difference_TV.gather(1, alone_TV.argmax(-1, keepdim=True))
        is_right = float(of_best_T1.mean()) <= _MEAN_BFLOAT16
    if not is_right:  # also for NaN
        token = int(difference_TV.amax(-1).nan_to_num(torch.inf).argmax())
        raise ConfigError(
            f"model.path: {path} is a {model.config.model_type} model, and a packed row of three"
            f" segments gives other results than the segments one by one: at token {token} of"
            f" {sum(_LENGTHS)} a log-probability differs by {largest:.2g}; {remedy}"
        )
    return largest
