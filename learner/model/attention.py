"""Attention for packed rows, segment by segment (`model.attention: auto`).

transformers gives a packed row a full attention mask, which the flash kernels do not support. Time
and memory then grow with the square of the row's length instead of the segments' lengths. Here the
layers get the segments' borders instead of the mask. Other inputs, such as padding and cache in
`generate`, use transformers' sdpa.

The caller knows the lengths of the segments (`packed_row`). transformers finds them in the position
ids, which on a GPU makes the host wait.

With `training.share_prompts` a segment may begin with tokens that the row has already, in an
earlier segment. Its queries are then only its other tokens, its keys and values those of all of
its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from learner.model.ranks import to_device
from shared.errors import ConfigError

SEGMENT_ATTENTION = "rollmatch_flash"
"""The name under which this attention is registered in transformers.

The word "flash" in it makes vision towers pass all images in one call with their borders.
"""

FLASH_ATTENTION_3 = "flash_attn_interface"
"""The package of FlashAttention 3."""


class SharedKeys(NamedTuple):
    """The keys of a packed row whose segments share tokens: those of each segment, in order."""

    at: torch.Tensor
    """int64 [K]: the row position of each key."""
    lengths: tuple[int, ...]
    """Number of keys of each segment: its shared tokens, then its own."""
    starts: torch.Tensor
    """int32 [S + 1]: the start of each segment's keys, then K."""


@dataclass(frozen=True, slots=True)
class RowBorders:
    """The borders of a packed row's segments. The attention layers get them instead of a mask.

    Example: `RowBorders.of((3, 2), device)` stands for a segment of 3 tokens and one of 2. Its
    `starts` are [0, 3, 5]. With `num_shared` (0, 1) the second segment has 3 tokens: the first of
    the row, then its own two. Its keys are at the row positions 0, 3 and 4.
    """

    lengths: tuple[int, ...]
    """Number of tokens of each segment in the row."""
    starts: torch.Tensor
    """int32 [S + 1] on the row's device: the start of each segment, then the row's length."""
    keys: SharedKeys | None = None
    """None if no segment shares tokens: keys and queries are then at the same positions."""
    window: int | None = None
    """Number of tokens that a query sees, itself included; None: all before it."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        num_shared: Sequence[int] = (),
        window: int | None = None,
    ) -> RowBorders:
        """Return the borders of a row; `packed_row` describes `lengths` and `num_shared`."""

        def starts_of(sizes: Sequence[int]) -> torch.Tensor:
            return to_device(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), device)

        keys = None
        if any(num_shared):
            at: list[int] = []
            first = end = 0
            for length, shared in zip(lengths, num_shared, strict=True):
                first = first if shared else end
                at += [*range(first, first + shared), *range(end, end + length)]
                end += length
            num_keys = tuple(map(sum, zip(lengths, num_shared, strict=True)))
            keys = SharedKeys(to_device(torch.tensor(at), device), num_keys, starts_of(num_keys))
        return cls(tuple(lengths), starts_of(lengths), keys, window)


class _Row(NamedTuple):
    lengths: tuple[int, ...]
    num_shared: tuple[int, ...]


_row: ContextVar[_Row | None] = ContextVar("row", default=None)


@contextmanager
def packed_row(lengths: Sequence[int], num_shared: Sequence[int] = ()) -> Iterator[None]:
    """Run a model's forward on a packed row inside the block.

    Outside of such a block, attention by segments is transformers' masked attention.

    Args:
        lengths: the numbers of tokens of its segments in the row.
        num_shared: for each segment, the number of tokens before these. They are the first tokens
            of the last segment that has 0 here. Empty if no segment shares tokens.
    """
    token = _row.set(_Row(tuple(lengths), tuple(num_shared)))
    try:
        yield
    finally:
        _row.reset(token)


def _row_of(num_tokens: int) -> _Row | None:
    row = _row.get()
    return row if row is not None and sum(row.lengths) == num_tokens else None


def lengths_of_row(num_tokens: int) -> tuple[int, ...] | None:
    """Return the lengths of the segments of the packed row in the running forward.

    None outside of `packed_row`, and for inputs of another number of tokens than the row has.
    """
    row = _row_of(num_tokens)
    return None if row is None else row.lengths


def register_segment_attention() -> None:
    """Register this module's attention in transformers. It can be called more than once."""
    AttentionInterface.register(SEGMENT_ATTENTION, segment_attention)
    AttentionMaskInterface.register(SEGMENT_ATTENTION, segments_or_mask)


def attend_by_segments(model: PreTrainedModel) -> None:
    """Make `model` and its vision tower compute attention in each segment of a row separately.

    A Qwen-VL vision tower must be changed by `prepare_vision_tower` too.
    """
    register_segment_attention()
    config = model.config
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        # `set_attn_implementation` is not used: it would treat the name as a package to load.
        part._attn_implementation = SEGMENT_ATTENTION


def segments_or_mask(
    *,
    q_length: int,
    device: torch.device | str = "cpu",
    **options: Any,
) -> RowBorders | torch.Tensor | None:
    """Return what all attention layers get as the mask: for a packed row its segments' borders.

    For other inputs, return the mask of transformers' sdpa. transformers calls this once per
    forward and kind of layer.

    Raises ConfigError for a row whose segments share tokens, if the model has a mask of its own.
    """
    # If transformers has detected a packed row, it passes `allow_is_causal_skip=False` and no
    # padding mask.
    is_packed = (
        not options.get("allow_is_causal_skip", True)
        and options.get("attention_mask") is None
        and q_length == options["kv_length"]
    )
    row = _row_of(q_length)
    shares = row is not None and any(row.num_shared)
    window = options.get("local_size")
    # Borders cannot represent a custom mask.
    has_borders = is_packed and not options.get("use_vmap", False) and options["batch_size"] == 1
    if shares and not has_borders:
        raise ConfigError(
            "training.share_prompts: true is not possible with this model, which has an attention"
            " mask of its own; set it to false"
        )
    # transformers' mask represents a sliding window, but not shared tokens.
    if row is None or not has_borders or (window is not None and not shares):
        mask: torch.Tensor | None = sdpa_mask(q_length=q_length, device=device, **options)
        return mask
    return RowBorders.of(row.lengths, torch.device(device), row.num_shared, window)


def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RowBorders | torch.Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: RowBorders | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer, for a packed row in each segment separately.

    transformers calls it (`transformers.AttentionInterface`).

    Args:
        query: [B, H, T, D]; `key` and `value` are [B, G, T, D], and G divides H.
        cu_seq_lens_q: the borders of the images, which only a vision tower passes
            (`learner.model.packed_rows`).

    Returns:
        [B, T, H, D], and None instead of attention weights.
    """
    if cu_seq_lens_q is not None:
        segments = cu_seq_lens_q
    elif isinstance(attention_mask, RowBorders):
        segments = attention_mask
    else:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            is_causal=is_causal,
            **options,
        )
        return result
    causal = bool(module.is_causal) if is_causal is None else is_causal
    key_lengths = segments.lengths
    if segments.keys is not None:
        key, value = (tensor.index_select(2, segments.keys.at) for tensor in (key, value))
        key_lengths = segments.keys.lengths
    # The flash kernel supports only 16-bit types.
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        attended = attend_in_one_call(query, key, value, segments, scaling=scaling, causal=causal)
        return attended, None
    queries = query.split(segments.lengths, dim=2)
    keys, values = (tensor.split(key_lengths, dim=2) for tensor in (key, value))
    outputs = []
    for segment in zip(queries, keys, values, strict=True):
        mask = None if segments.keys is None else _late_queries(segments, *segment[:2])
        if mask is None:
            output, _ = sdpa_attention_forward(
                module, *segment, None, scaling=scaling, is_causal=causal
            )
        else:
            # With a mask, transformers would copy keys and values for each head of the queries.
            output = F.scaled_dot_product_attention(
                *segment, attn_mask=mask, scale=scaling, enable_gqa=True
            ).transpose(1, 2)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _late_queries(
    segments: RowBorders, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Return the mask of a segment whose queries are the last of its tokens: bool [1, 1, Q, K].

    None if a causal mask suffices.
    """
    num_keys = key.shape[2]
    num_before = num_keys - query.shape[2]
    window = segments.window or num_keys
    if num_before == 0 and num_keys <= window:
        return None
    mask = query.new_ones(query.shape[2], num_keys, dtype=torch.bool).tril(num_before)
    return mask.triu(num_before - window + 1)[None, None]


def attend_in_one_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: RowBorders,
    *,
    scaling: float | None,
    causal: bool,
) -> torch.Tensor:
    """Compute the attention of a row's segments with one call of the flash kernel.

    `key` and `value` are those of each segment (`RowBorders.keys`), in order. Not tested on a GPU.
    """
    options: dict[str, Any] = {}
    group_size = query.shape[1] // key.shape[1]
    if group_size > 1 and _takes_groups(varlen_attn):
        options["enable_gqa"] = True
    elif group_size > 1:
        key, value = (tensor.repeat_interleave(group_size, dim=1) for tensor in (key, value))
    keys = segments.keys
    # If a segment has more keys than queries, its queries are the last of its tokens.
    before = -1 if segments.window is None else segments.window - 1
    attended = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        segments.starts,
        segments.starts if keys is None else keys.starts,
        max(segments.lengths),
        max(segments.lengths if keys is None else keys.lengths),
        scale=scaling,
        window_size=(before, 0) if causal else (-1, -1),
        **options,
    )
    assert isinstance(attended, torch.Tensor), "the log-sum-exp was not requested"
    return attended[None]


def use_flash_attention_3(device: torch.device) -> bool:
    """Let torch's flash kernels in this process be FlashAttention 3, if `device` supports it.

    It needs a GPU of compute capability 9, the package `flash_attn_interface`, and a torch that
    accepts it. Return whether it is used. Raises ConfigError if the package is there, but cannot be
    loaded. Not tested on a GPU.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    # torch 2.11 may lack it.
    activate = vars(torch.nn.attention).get("activate_flash_attention_impl")
    if activate is None or find_spec(FLASH_ATTENTION_3) is None:
        return False
    try:
        activate("FA3")
    except Exception as error:  # importing a package may raise any
        raise ConfigError(
            f"model.attention: {FLASH_ATTENTION_3}, which auto uses on this GPU, cannot be loaded"
            f" ({type(error).__name__}: {error}); install its version for torch"
            f" {torch.__version__}, or uninstall it: torch's own kernel is then used"
        ) from error
    return True


@cache
def _takes_groups(attention: Callable[..., Any]) -> bool:
    """Return whether torch's `varlen_attn` lets several queries share keys (torch 2.12 or later).

    The benchmarks for a GPU run with torch 2.11 too.
    """
    return "enable_gqa" in signature(attention).parameters
