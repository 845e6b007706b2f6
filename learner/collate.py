"""Segments into one packed row: positions restart per segment, supervision is offset and weighted once (DESIGN 5.6, FACTS 4).

Shape legend: T row tokens, N positions whose logits are needed, X supervised text tokens, S coord slots, K sampled tokens to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from learner.segments import Segment
from learner.targets import TextWeights, TokenRole


class RopeIndex(Protocol):
    """`get_rope_index` of transformers' Qwen-VL models: M-RoPE positions of one unpacked sequence."""

    def __call__(self, input_ids: torch.Tensor, *, mm_token_type_ids: torch.Tensor, image_grid_thw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One forward. Every index is into the row's N logit positions, themselves row positions; `logits[n]` predicts token `positions_N[n] + 1`."""

    segments: tuple[Segment, ...]
    input_ids_1T: torch.Tensor
    position_ids_41T: torch.Tensor
    """Text positions that restart per segment, then the three M-RoPE rows. With no attention mask, transformers reads segment borders off the first."""
    pixel_values_RD: torch.Tensor
    image_grid_I3: torch.Tensor
    positions_N: torch.Tensor
    text_index_X: torch.Tensor
    text_labels_X: torch.Tensor
    text_weight_X: torch.Tensor
    gate_weight_X: torch.Tensor
    coord_index_S: torch.Tensor
    coord_bins_S: torch.Tensor
    coord_weight_S: torch.Tensor
    sampled_index_K: torch.Tensor
    sampled_ids_K: torch.Tensor
    sampled_logprobs_K: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids_1T.shape[1]

    def to(self, device: torch.device) -> PackedRow:
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "segments"}


def collate(segments: Sequence[Segment], *, text_weights: TextWeights, num_samples: int, rope_index: RopeIndex) -> PackedRow:
    """One row of `segments`, in order.

    `num_samples` is the number of samples of the whole step: with it in every weight, the losses of the step's rows simply add.
    """
    positions, starts = _position_ids(segments, rope_index), np.cumsum([0, *(len(segment) for segment in segments)])
    text = [_text_supervision(segment, text_weights, num_samples) for segment in segments]
    # A token is predicted one position before its own; the first target token, by the prompt's last.
    predictors = [start + len(segment.prompt.token_ids) - 1 for segment, start in zip(segments, starts, strict=False)]
    text_at = _concat(predictor + part.positions for predictor, part in zip(predictors, text, strict=True))
    coord_at = _concat(predictor + np.array(segment.target.coord_positions, dtype=np.int64) for predictor, segment in zip(predictors, segments, strict=True))
    sampled_at = _concat(predictor + np.arange(len(segment.target.sampled_logprobs)) for predictor, segment in zip(predictors, segments, strict=True))
    needed = np.unique(np.concatenate([text_at, coord_at, sampled_at])).astype(np.int64)

    def index(row_positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.searchsorted(needed, row_positions))

    input_ids = [token for segment in segments for token in (*segment.prompt.token_ids, *segment.target.token_ids)]
    return PackedRow(
        segments=tuple(segments),
        input_ids_1T=torch.tensor([input_ids]),
        position_ids_41T=positions,
        pixel_values_RD=torch.cat([segment.prompt.pixel_values_RD for segment in segments]),
        image_grid_I3=torch.cat([segment.prompt.image_grid_I3 for segment in segments]),
        positions_N=torch.from_numpy(needed),
        text_index_X=index(text_at),
        text_labels_X=torch.from_numpy(_concat(part.labels for part in text)),
        text_weight_X=torch.from_numpy(_concat((part.weights for part in text), np.float32)),
        gate_weight_X=torch.from_numpy(_concat((part.gate_weights for part in text), np.float32)),
        coord_index_S=index(coord_at),
        coord_bins_S=torch.tensor([bin_ for segment in segments for bin_ in segment.target.coord_bins], dtype=torch.long),
        coord_weight_S=torch.from_numpy(_concat((_coord_weights(segment, num_samples) for segment in segments), np.float32)),
        sampled_index_K=index(sampled_at),
        sampled_ids_K=torch.tensor(
            [token for segment in segments for token in segment.target.token_ids[: len(segment.target.sampled_logprobs)]], dtype=torch.long
        ),
        sampled_logprobs_K=torch.tensor([logprob for segment in segments for logprob in segment.target.sampled_logprobs], dtype=torch.float32),
    )


@dataclass(frozen=True, slots=True)
class _TextSupervision:
    positions: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    gate_weights: np.ndarray


def _text_supervision(segment: Segment, text_weights: TextWeights, num_samples: int) -> _TextSupervision:
    roles_L = segment.target.roles
    weights_L = text_weights.of(roles_L)
    gate_L = np.where(roles_L == TokenRole.CLOSING, np.float32(0), weights_L)
    positions = np.flatnonzero(weights_L)
    labels = np.array(segment.target.token_ids, dtype=np.int64)[positions]
    return _TextSupervision(positions, labels, _mean_weights(weights_L, num_samples)[positions], _mean_weights(gate_L, num_samples)[positions])


def _mean_weights(weights_L: np.ndarray, num_samples: int) -> np.ndarray:
    """Weights that make a sum the weighted mean within the segment, divided by the samples of the step. All zero stays zero."""
    total = weights_L.sum(dtype=np.float64)
    return (weights_L / (total * num_samples) if total else weights_L).astype(np.float32)


def _coord_weights(segment: Segment, num_samples: int) -> np.ndarray:
    num_slots = len(segment.target.coord_positions)
    return np.full(num_slots, 1.0 / (num_slots * num_samples) if num_slots else 0.0, dtype=np.float32)


def _position_ids(segments: Sequence[Segment], rope_index: RopeIndex) -> torch.Tensor:
    """int64 [4, 1, T]."""
    parts = []
    for segment in segments:
        ids_1L = torch.tensor([[*segment.prompt.token_ids, *segment.target.token_ids]])
        modality_1L = torch.cat([segment.prompt.modality_P, segment.prompt.modality_P.new_zeros(len(segment.target.token_ids))])[None]
        mrope_31L, _ = rope_index(ids_1L, mm_token_type_ids=modality_1L, image_grid_thw=segment.prompt.image_grid_I3)
        parts.append(torch.cat([torch.arange(ids_1L.shape[1])[None, None], mrope_31L]))
    return torch.cat(parts, dim=2)


def _concat(parts: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)
