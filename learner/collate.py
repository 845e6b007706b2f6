"""Segments into one packed row: positions restart per segment, supervision is offset and weighted
once (DESIGN 5.6, FACTS 4).

Shape legend: T row tokens, L target tokens, N positions whose logits are needed, K sampled tokens
to compare, M sampled tokens to learn, I images, R image patches, D patch values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from learner.objectives.base import (
    BoxSupervision,
    CoordSupervision,
    SampledSupervision,
    Supervision,
    TextSupervision,
)
from learner.segments import Segment
from learner.targets import Target, TextWeights, TokenRole

Columns = TypeVar(
    "Columns",
    "ModelInputs",
    TextSupervision,
    CoordSupervision,
    BoxSupervision,
    SampledSupervision,
    "SampledTokens",
)


class RopeIndex(Protocol):
    """`get_rope_index` of transformers' Qwen-VL models: M-RoPE positions of one unpacked
    sequence."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        *,
        mm_token_type_ids: torch.Tensor,
        image_grid_thw: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class ModelInputs(NamedTuple):
    """Arguments of the model's forward; the attention mask stays None (FACTS 4)."""

    input_ids: torch.Tensor
    """int64 [1, T]"""
    position_ids: torch.Tensor
    """int64: positions that restart per segment, from which transformers reads the segment borders:
    [1, T] of a text model; of a model with a vision tower [4, 1, T], the other three being its
    M-RoPE rows."""
    pixel_values: torch.Tensor
    """float32 [R, D]; D is 0 in a row without images."""
    image_grid_thw: torch.Tensor
    """int64 [I, 3]"""

    def image_arguments(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Of the model's forward; a text model has none, and no vision tower takes none of no
        images.
        """
        return (
            {"pixel_values": self.pixel_values.to(dtype), "image_grid_thw": self.image_grid_thw}
            if len(self.image_grid_thw)
            else {}
        )


class SampledTokens(NamedTuple):
    """Tokens that an engine sampled, with the log-probability it gave them; a column per field."""

    at: torch.Tensor
    """int64 [K], into the N positions, ascending."""
    logprobs: torch.Tensor
    """float32 [K]"""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One forward and everything that is asked of its logits."""

    segments: tuple[Segment, ...]
    inputs: ModelInputs
    positions_N: torch.Tensor
    """int64, ascending: the row positions whose logits are needed."""
    token_ids_N: torch.Tensor
    """int64: the token that each of them predicts, the row's next."""
    supervision: Supervision
    sampled: SampledTokens

    @property
    def num_tokens(self) -> int:
        return self.inputs.input_ids.shape[1]

    def to(self, device: torch.device) -> PackedRow:
        text, coord, boxes, learned = self.supervision
        return PackedRow(
            self.segments,
            _to(self.inputs, device),
            self.positions_N.to(device),
            self.token_ids_N.to(device),
            Supervision(
                _to(text, device), _to(coord, device), _to(boxes, device), _to(learned, device)
            ),
            _to(self.sampled, device),
        )


def collate(
    segments: Sequence[Segment], *, text_weights: TextWeights, rope_index: RopeIndex | None
) -> PackedRow:
    """One row of `segments`, in order. `rope_index` is None of a text model.

    Weights are means within a segment, so a row's loss is a sum over its segments, and the losses
    of a step's rows add; what they are divided by is for the step's end (DESIGN 5, decisions 6 and
    7).
    """
    # A token is predicted one position before its own: a target's first token by the last of its
    # prompt.
    ends = np.cumsum([len(segment) for segment in segments])
    predictors = [
        end - len(segment.target.token_ids) - 1 for segment, end in zip(segments, ends, strict=True)
    ]
    targets = [segment.target for segment in segments]
    text = [_text_supervision(target, text_weights) for target in targets]
    text_at = _concat(at + part.positions for at, part in zip(predictors, text, strict=True))
    coord_at = _concat(
        at + np.array(target.coord_positions, dtype=np.int64)
        for at, target in zip(predictors, targets, strict=True)
    )
    sampled_at = _concat(
        at + np.array(target.sampled_positions, dtype=np.int64)
        for at, target in zip(predictors, targets, strict=True)
    )
    credited = [target.credit for target in targets]
    learned_at = _concat(
        at + np.array(credit.positions, dtype=np.int64)
        for at, credit in zip(predictors, credited, strict=True)
    )
    needed = np.unique(np.concatenate([text_at, coord_at, sampled_at, learned_at]))

    def index(row_positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.searchsorted(needed, row_positions))

    inputs, positions_N = _model_inputs(segments, rope_index), torch.from_numpy(needed)
    return PackedRow(
        tuple(segments),
        inputs,
        positions_N,
        inputs.input_ids[0, positions_N + 1],
        Supervision(
            TextSupervision(
                index(text_at),
                torch.from_numpy(_concat((part.weights for part in text), np.float32)),
                torch.from_numpy(_concat((part.gate_weights for part in text), np.float32)),
            ),
            CoordSupervision(
                index(coord_at),
                torch.from_numpy(
                    _concat(
                        (np.array(target.coord_targets, dtype=np.float32) for target in targets),
                        np.float32,
                    )
                ),
                torch.from_numpy(
                    _concat(
                        (_equal_weights(len(target.coord_positions)) for target in targets),
                        np.float32,
                    )
                ),
            ),
            _box_supervision(targets),
            SampledSupervision(
                index(learned_at),
                torch.from_numpy(
                    _concat(
                        (np.array(credit.engine_logprobs, dtype=np.float32) for credit in credited),
                        np.float32,
                    )
                ),
                torch.from_numpy(
                    _concat(
                        (np.array(credit.advantages, dtype=np.float32) for credit in credited),
                        np.float32,
                    )
                ),
                torch.from_numpy(
                    _concat(
                        (np.array(one.weights, dtype=np.float32) for one in credited), np.float32
                    )
                ),
            ),
        ),
        SampledTokens(
            index(sampled_at),
            torch.from_numpy(
                _concat(
                    (np.array(target.sampled_logprobs, dtype=np.float32) for target in targets),
                    np.float32,
                )
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class _TextColumns:
    positions: np.ndarray
    weights: np.ndarray
    gate_weights: np.ndarray


def _text_supervision(target: Target, text_weights: TextWeights) -> _TextColumns:
    weights_L = text_weights.of(target.roles)
    gate_L = np.where(target.roles == TokenRole.CLOSING, np.float32(0), weights_L)
    positions = np.flatnonzero(weights_L)
    return _TextColumns(
        positions, _mean_weights(weights_L)[positions], _mean_weights(gate_L)[positions]
    )


def _mean_weights(weights_L: np.ndarray) -> np.ndarray:
    """Weights that make a sum the weighted mean within the segment. All zero stays zero."""
    total = weights_L.sum(dtype=np.float64)
    return (weights_L / total if total else weights_L).astype(np.float32)


def _box_supervision(targets: Sequence[Target]) -> BoxSupervision:
    first_slots = np.cumsum([0, *(len(target.coord_positions) for target in targets)])
    first_B = _concat(
        first + np.array(target.box_slots, dtype=np.int64)
        for first, target in zip(first_slots, targets, strict=False)
    )
    weights = (_equal_weights(len(target.box_slots)) for target in targets)
    return BoxSupervision(
        torch.from_numpy(first_B[:, None] + np.arange(4)),
        torch.from_numpy(_concat(weights, np.float32)),
    )


def _equal_weights(count: int) -> np.ndarray:
    """The mean over the slots or boxes of a segment."""
    return np.full(count, 1.0 / count if count else 0.0, dtype=np.float32)


def _model_inputs(segments: Sequence[Segment], rope_index: RopeIndex | None) -> ModelInputs:
    input_ids, position_ids, with_images = (
        [],
        [],
        [segment.prompt for segment in segments if len(segment.prompt.image_grid_I3)],
    )
    for segment in segments:
        prompt = segment.prompt
        ids_1L = torch.tensor([[*prompt.token_ids, *segment.target.token_ids]])
        input_ids.append(ids_1L)
        positions_1L = torch.arange(ids_1L.shape[1])[None]
        if rope_index is None:
            position_ids.append(positions_1L)
            continue
        grid = prompt.image_grid_I3 if len(prompt.image_grid_I3) else None
        mrope_31L, _ = rope_index(
            ids_1L, mm_token_type_ids=segment.modality[None], image_grid_thw=grid
        )
        position_ids.append(torch.cat([positions_1L[None], mrope_31L]))
    return ModelInputs(
        torch.cat(input_ids, dim=1),
        torch.cat(position_ids, dim=-1),
        # The width of a row without images is nobody's.
        torch.cat([prompt.pixel_values_RD for prompt in with_images] or [torch.empty(0, 0)]),
        torch.cat([segment.prompt.image_grid_I3 for segment in segments]),
    )


def _concat(parts: Iterable[np.ndarray], dtype: Any = np.int64) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)


def _to(columns: Columns, device: torch.device) -> Columns:
    """The same named tuple of tensors on another device."""
    return type(columns)(*(column.to(device) for column in columns))
