"""Packs segments into one row: the tensors of one forward pass, and the supervision of its logits.

Position ids restart in each segment, or continue the prompt that it shares. Only this module turns
positions in a target into positions in the row, and weights of tokens and slots into means within a
segment (decision 6).

Shape legend: T row tokens, L target tokens, N positions whose logits are needed, K tokens to
compare, M tokens learned by their advantage, I images, R image patches or tiles, D values of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from learner.algorithms.advantages import TokenAdvantages
from learner.model.ranks import to_device
from learner.objectives.base import (
    BoxSupervision,
    CoordSupervision,
    LearnedSupervision,
    Supervision,
    TeacherSupervision,
    TextSupervision,
)
from learner.segments import Segment, shared_tokens
from learner.targets import AdvantageTarget, Target, TextWeights, TokenRole
from shared.tokens.pictures import EncodedImages

RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`get_rope_index` of transformers' Qwen-VL models: the M-RoPE positions of one segment."""


class ModelInputs(NamedTuple):
    """Tensor arguments of the model's forward for one packed row. There is no attention mask."""

    input_ids: torch.Tensor
    """int64 [1, T]: the token ids of the row."""
    position_ids: torch.Tensor
    """int64 [1, T]: positions that restart in each segment, at 0 or after the tokens that it
    shares; transformers finds the segments by the restarts. With M-RoPE [4, 1, T]: the same
    positions, then the three M-RoPE rows."""
    pixel_values: torch.Tensor
    """[R, D]: R patches or tiles of images, D values each; [0, 0] without images. Any float type.
    """
    image_grid_thw: torch.Tensor
    """int64 [I, 3]: the number of patches of each image (`EncodedPrompt.image_grid_I3`). Always in
    host memory, because shapes of other tensors depend on it."""

    def image_arguments(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return pixels and image grids as keyword arguments of the model's forward.

        `dtype` is the number type of the pixels. The result is empty for a row without images.
        """
        return EncodedImages(self.pixel_values.to(dtype), self.image_grid_thw).arguments()


class ComparedTokens(NamedTuple):
    """A row's sampled tokens whose log-probabilities are compared between engine and learner."""

    at: torch.Tensor
    """int64 [K], ascending indices into `PackedRow.positions_N`."""
    engine_logprobs: torch.Tensor
    """float32 [K]: the engine's log-probability of each token."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One or more segments as the inputs of one forward, and the supervision of its logits.

    Example (one segment: prompt of 3 tokens, target of 2, both supervised): T = 5, `positions_N`
    [2, 3], `token_ids_N` the target's two ids, `supervision.text.at` [0, 1].
    """

    segments: tuple[Segment, ...]
    inputs: ModelInputs
    positions_N: torch.Tensor
    """int64, ascending: the row positions whose logits are computed. A position occurs twice if one
    token is taught there, and another (the row's next token) is compared with the engine."""
    token_ids_N: torch.Tensor
    """int64: the token that each position predicts (the row's next token, or a label override)."""
    supervision: Supervision
    compared: ComparedTokens
    lengths: tuple[int, ...] = ()
    """The number of tokens in the row of each segment, including the segment without supervision.
    """
    num_shared: tuple[int, ...] = ()
    """For each segment in the row, the number of its first tokens that are in an earlier segment
    instead (`shared_tokens`)."""
    has_beside: bool = False
    """Whether the row ends with a segment without supervision (argument `beside` of `collate`)."""
    _on_host: PackedRow | None = None
    """The row that this row is a copy of, on another device."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the supervised segments in the row."""
        return sum(self.lengths[: len(self.segments)])

    @property
    def on_host(self) -> PackedRow:
        """The row in host memory, whose values can be read without waiting for a GPU."""
        return self if self._on_host is None else self._on_host

    def to(self, device: torch.device) -> PackedRow:
        inputs = self.inputs
        return replace(
            self,
            inputs=inputs._replace(
                input_ids=to_device(inputs.input_ids, device),
                position_ids=to_device(inputs.position_ids, device),
                pixel_values=to_device(inputs.pixel_values, device),
            ),
            positions_N=to_device(self.positions_N, device),
            token_ids_N=to_device(self.token_ids_N, device),
            supervision=_to(self.supervision, device),
            compared=_to(self.compared, device),
            _on_host=self.on_host,
        )


def _to(columns: Any, device: torch.device) -> Any:
    """Copy a named tuple of tensors, of None, numbers and of such tuples to another device."""
    if isinstance(columns, torch.Tensor):
        return to_device(columns, device)
    if isinstance(columns, tuple):
        return type(columns)(*(_to(column, device) for column in columns))
    return columns


def collate(
    segments: Sequence[Segment],
    *,
    text_weights: TextWeights,
    rope_index: RopeIndex | None,
    beside: Segment | None = None,
    pixel_dtype: torch.dtype = torch.float32,
    share_prompts: bool = False,
) -> PackedRow:
    """Pack `segments` into one row, in order.

    Args:
        text_weights: the weights of text tokens by their role.
        rope_index: computes M-RoPE positions; None for a model without M-RoPE.
        beside: segment with images that is appended without supervision, so that a row without
            images runs the vision tower too.
        pixel_dtype: the type of the row's pixel values.
        share_prompts: put equal prompts of successive segments into the row once
            (`training.share_prompts`).

    Example: two segments of 100 and 60 tokens, whose targets are the last 10 of each: target
    position 0 of the second is predicted at row position 100 + 60 - 10 - 1 = 149.
    """
    # Weights form means within a segment, so a row's loss is a sum over its segments, and a step's
    # loss is a sum over its rows. The optimizer divides at the step's end (decisions 6 and 7).
    # A token is predicted one position earlier: a target's first token by the prompt's last.
    in_row = [*segments, *([] if beside is None else [beside])]
    num_shared = shared_tokens(in_row) if share_prompts else (0,) * len(in_row)
    pairs = list(zip(in_row, num_shared, strict=True))
    lengths = tuple(len(segment) - num for segment, num in pairs)
    starts = [
        end - len(segment.target.token_ids) - 1
        for segment, end in zip(segments, np.cumsum(lengths), strict=False)
    ]
    placed = list(zip(starts, (segment.target for segment in segments), strict=True))
    taught = [(start, target) for start, target in placed if isinstance(target, Target)]
    credited = [(start, target) for start, target in placed if isinstance(target, AdvantageTarget)]
    targets = [target for _, target in taught]
    credits_ = [target.credit for _, target in credited]
    calls_M = _calls(credits_)
    # Each target's positions, weights and gate weights.
    text = [(start, *_text_supervision(target, text_weights)) for start, target in taught]
    text_at = _row_positions((start, positions) for start, positions, _, _ in text)
    coord_at = _row_positions((start, target.coord_positions) for start, target in taught)
    compared_at = _row_positions((start, target.compared_positions) for start, target in placed)
    learned_at = _row_positions((start, target.credit.positions) for start, target in credited)
    overridden_at = _row_positions(
        (start, [one.position for one in target.label_overrides]) for start, target in taught
    )
    # Logits are computed only at these positions; everything below indexes into them. 2 * p stands
    # for position p with the row's next token, 2 * p + 1 for position p with a label override.
    text_needed = 2 * text_at + np.isin(text_at, overridden_at)
    needed = np.unique(np.concatenate([text_needed, 2 * coord_at, 2 * compared_at, 2 * learned_at]))

    def index(needed_positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.searchsorted(needed, needed_positions))

    inputs = _model_inputs(pairs, rope_index, pixel_dtype)
    positions_N = torch.from_numpy(needed // 2)
    token_ids_N = inputs.input_ids[0, positions_N + 1]
    labels = [one.token_id for target in targets for one in target.label_overrides]
    for at, label in zip(overridden_at, labels, strict=True):
        token_ids_N[torch.from_numpy(needed == 2 * at + 1)] = label
    return PackedRow(
        tuple(segments),
        inputs,
        positions_N,
        token_ids_N,
        Supervision(
            TextSupervision(
                index(text_needed),
                _floats(weights for _, _, weights, _ in text),
                _floats(gate_weights for _, _, _, gate_weights in text),
            ),
            CoordSupervision(
                index(2 * coord_at),
                _floats(target.coord_targets for target in targets),
                _floats(_equal_weights(len(target.coord_positions)) for target in targets),
            ),
            _box_supervision(targets),
            LearnedSupervision(
                index(2 * learned_at),
                _floats(credit.engine_logprobs for credit in credits_),
                _floats(credit.advantages for credit in credits_),
                _floats(credit.weights for credit in credits_),
                torch.from_numpy(calls_M),
                int(calls_M[-1]) + 1 if len(calls_M) else 0,
                _teacher_supervision(credits_),
            ),
        ),
        ComparedTokens(
            index(2 * compared_at), _floats(target.compared_logprobs for _, target in placed)
        ),
        lengths=lengths,
        num_shared=num_shared,
        has_beside=beside is not None,
    )


def _row_positions(placed: Iterable[tuple[int, Sequence[int] | np.ndarray]]) -> np.ndarray:
    """Offset each target's positions by its start in the row, and concatenate them (int64)."""
    return _concat(np.int64, (start + np.array(part, np.int64) for start, part in placed))


def _teacher_supervision(credits_: Sequence[TokenAdvantages]) -> TeacherSupervision | None:
    scored = [credit for credit in credits_ if credit.teacher_logprobs is not None]
    if not scored:
        return None
    assert all(credit in scored or not credit.positions for credit in credits_), (
        "either all rollouts of a run have teacher log-probabilities, or none has them"
    )
    return TeacherSupervision(
        _floats(credit.teacher_logprobs or () for credit in scored),
        _floats([credit.teacher_weight] * len(credit.positions) for credit in scored),
    )


def _text_supervision(
    target: Target, text_weights: TextWeights
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the positions, `token_ce` weights and `text_gate` weights of the supervised text."""
    weights_L = text_weights.of(target)
    gate_L = np.where(target.roles == TokenRole.CLOSING, np.float32(0), weights_L)
    at = np.flatnonzero(weights_L)
    return at, _mean_weights(weights_L)[at], _mean_weights(gate_L)[at]


def _mean_weights(weights_L: np.ndarray) -> np.ndarray:
    """Divide the weights by their sum. If all weights are 0, return them unchanged."""
    # In float64, because the rounding of the sum would affect every weight.
    total = weights_L.sum(dtype=np.float64)
    return (weights_L / total if total else weights_L).astype(np.float32)


def _calls(credits_: Sequence[TokenAdvantages]) -> np.ndarray:
    """Return each learned token's model call, numbered from 0 over the row."""
    first = 0
    parts = []
    for credit in credits_:
        parts.append(first + np.array(credit.calls, np.int64))
        first += credit.calls[-1] + 1 if credit.calls else 0
    return _concat(np.int64, parts)


def _box_supervision(targets: Sequence[Target]) -> BoxSupervision:
    first_slots = np.cumsum([0, *(len(target.coord_positions) for target in targets)])
    pairs = zip(first_slots, targets, strict=False)
    first_B = _concat(
        np.int64, (first + np.array(target.box_slots, np.int64) for first, target in pairs)
    )
    weights = _floats(_equal_weights(len(target.box_slots)) for target in targets)
    return BoxSupervision(torch.from_numpy(first_B[:, None] + np.arange(4)), weights)


def _equal_weights(count: int) -> np.ndarray:
    """Return the weights of a mean over a segment's slots or boxes."""
    return np.full(count, 1.0 / count if count else 0.0, dtype=np.float32)


def _model_inputs(
    segments: Sequence[tuple[Segment, int]], rope_index: RopeIndex | None, pixel_dtype: torch.dtype
) -> ModelInputs:
    """Return the inputs of a row's segments, each without its number of shared tokens."""
    input_ids = []
    position_ids = []
    for segment, num_shared in segments:
        prompt = segment.prompt
        ids_1L = torch.tensor([[*prompt.token_ids, *segment.target.token_ids]])
        input_ids.append(ids_1L[:, num_shared:])
        # From 0 in every segment: the attention finds the segments by the restarts.
        positions_1L = torch.arange(ids_1L.shape[1])[None]
        if rope_index is None:
            position_ids.append(positions_1L[:, num_shared:])
            continue
        grid = prompt.image_grid_I3 if len(prompt.image_grid_I3) else None
        modality_1L = segment.modality[None]
        mrope_31L, _ = rope_index(ids_1L, mm_token_type_ids=modality_1L, image_grid_thw=grid)
        position_ids.append(torch.cat([positions_1L[None], mrope_31L])[..., num_shared:])
    # A shared prompt is there once, with its images.
    prompts = [segment.prompt for segment, num_shared in segments if not num_shared]
    with_images = [prompt for prompt in prompts if len(prompt.image_grid_I3)]
    pixels = [prompt.pixel_values_RD.to(pixel_dtype) for prompt in with_images]
    return ModelInputs(
        torch.cat(input_ids, dim=1),
        torch.cat(position_ids, dim=-1),
        # No code reads the width if the row has no images.
        torch.cat(pixels or [torch.empty(0, 0)]),
        torch.cat([prompt.image_grid_I3 for prompt in prompts]),
    )


def _concat(dtype: Any, parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)


def _floats(parts: Iterable[Any]) -> torch.Tensor:
    columns = (np.array(part, dtype=np.float32) for part in parts)
    return torch.from_numpy(_concat(np.float32, columns))
