"""Losses over logits, and all numeric clamps of the project (decision 37).

Training, diagnostics and evaluation call these functions, so NaN, infinities, temperature and
clamps are treated the same everywhere. Parts: whole vocabulary, coord vocabulary, boxes.

Shape legend: N positions, P positions whose coord logits are read, M positions at which K tokens
are picked, S coord slots, T text tokens, B boxes, C the 1,000 coord bins, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from shared.tokens.vocabulary import NUM_BINS

# Logits of 1e4 do not overflow in a float32 log-softmax, and trained logits are far smaller.
_LOGIT_LIMIT = 1.0e4
_TEMPERATURE_FLOOR = 1.0e-3
_PROBABILITY_FLOOR = 1.0e-6
_SIGMA_FLOOR = 1.0e-3
# A tenth of a bin, for coordinates in [0, 1]. float32 cannot represent the overlap and the aspect
# ratio of thinner boxes.
_SIDE_FLOOR = 1.0e-4
_TOP = 5


def _fenced(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Copy the logits to float32, clamp them and divide them by a floored temperature.

    NaN becomes 0, infinities and outliers become the limit. Replaced logits get no gradient.
    """
    # In place on the copy, because temporaries over a whole vocabulary are large.
    finite = (
        logits.to(torch.float32, copy=True)
        .nan_to_num_(nan=0.0, posinf=_LOGIT_LIMIT, neginf=-_LOGIT_LIMIT)
        .clamp_(-_LOGIT_LIMIT, _LOGIT_LIMIT)
    )
    divisor = max(temperature, _TEMPERATURE_FLOOR)
    return finite if divisor == 1.0 else finite.div_(divisor)


# The whole vocabulary


@dataclass(frozen=True, slots=True)
class Normalizer:
    """The temperature and the excluded tokens of a softmax over the vocabulary.

    Example: `Normalizer(0.9, (151655,))`: sampled at temperature 0.9 without image placeholders.
    """

    temperature: float = 1.0
    excluded_ids: tuple[int, ...] = ()
    """Token ids that cannot be sampled: they have probability 0."""

    @property
    def divisor(self) -> float:
        """The divisor of the logits: the temperature, raised to a lower limit if it is smaller."""
        return max(self.temperature, _TEMPERATURE_FLOOR)


class PickedTokens(NamedTuple):
    """Further tokens whose logits `read_logits` reads: K tokens at each of M positions."""

    at_M: torch.Tensor
    """int64: the positions, each once."""
    ids_MK: torch.Tensor
    """int64: the token ids at each position, each once, without `normalizer`'s excluded tokens."""
    normalizer: Normalizer
    """The softmax in which the probability of all other tokens is summed."""


class LogitReading(NamedTuple):
    """The values that losses read from logits over the whole vocabulary: float32 and finite."""

    token_logits_N: torch.Tensor
    """The logit of the token (of `token_ids_N`) at each position."""
    coord_logits_PC: torch.Tensor
    log_normalizers_N: tuple[torch.Tensor, ...]
    """`logsumexp(logits / T)` at each position without the excluded ids, for each normalizer."""
    picked_logits_MJ: torch.Tensor | None
    """J = K + 1: the logits of the picked tokens, then one logit for all other tokens together."""
    mean_logits_N: torch.Tensor | None = None
    """The mean over the vocabulary of the logits at each position."""


class OverVocabulary(NamedTuple):
    """The values of a `LogitReading` that need passes over the whole vocabulary."""

    log_normalizers_N: tuple[torch.Tensor, ...]
    mean_N: torch.Tensor | None
    others_M: torch.Tensor | None
    """`logsumexp(logits / T)` of the tokens that are not picked."""


def read_logits(
    logits_NV: torch.Tensor,
    token_ids_N: torch.Tensor,
    coord_at_P: torch.Tensor,
    coord_ids_C: torch.Tensor,
    normalizers: tuple[Normalizer, ...],
    picked: PickedTokens | None = None,
    *,
    mean: bool = False,
    first: list[OverVocabulary] | None = None,
) -> LogitReading:
    """Read all values that losses need from logits over the whole vocabulary.

    Memory in addition to the logits: one float32 copy of them in the forward pass; in the backward
    pass also a mask (a byte per logit) and the gradient in the logits' type. With `picked`, there
    are two more copies of the logits at the positions of the picked tokens: one in the logits'
    type, one in float32 (benchmarks/logit_memory.py).

    Args:
        logits_NV: any float type.
        token_ids_N: int64, one token per position.
        coord_at_P: int64, positions whose logits of coordinate tokens are read, each once.
        coord_ids_C: int64, the token id of each coordinate bin.
        normalizers: the softmaxes whose log-normalizers are returned.
        picked: further tokens whose logits are read, or None.
        mean: whether the mean of all logits is read.
        first: an empty list, to which the call adds a result. A second call with the list and the
            same arguments, such as a checkpoint's in the backward pass, uses that result instead of
            reading the vocabulary again.
    """
    tokens_N, coord_PC, picked_MJ, mean_N, *log_normalizers = _ReadLogits.apply(
        logits_NV, token_ids_N, coord_at_P, coord_ids_C, normalizers, picked, mean, first
    )
    return LogitReading(tokens_N, coord_PC, tuple(log_normalizers), picked_MJ, mean_N)


class _ReadLogits(torch.autograd.Function):
    """`read_logits` with a hand-written gradient.

    Autograd would hold one copy per operation, and would sum a bfloat16 gradient in bfloat16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        token_ids_N: torch.Tensor,
        coord_at_P: torch.Tensor,
        coord_ids_C: torch.Tensor,
        normalizers: tuple[Normalizer, ...],
        picked: PickedTokens | None,
        mean: bool,
        first: list[OverVocabulary] | None,
    ) -> tuple[torch.Tensor | None, ...]:
        over = first[0] if first else _over_vocabulary(logits_NV, normalizers, picked, mean)
        if first == []:
            first.append(over)
        # Not the tensors of `first`: torch gives the results a graph, which `first` would hold.
        log_normalizers = tuple(one_N.clone() for one_N in over.log_normalizers_N)
        mean_N = None if over.mean_N is None else over.mean_N.clone()
        ctx.normalizers = normalizers
        ctx.picked = picked
        ctx.set_materialize_grads(False)
        tokens_N = logits_NV.gather(1, token_ids_N[:, None])[:, 0]
        coord_PC = logits_NV[coord_at_P[:, None], coord_ids_C]
        picked_MJ = None
        others_M1 = None
        if picked is not None:
            assert over.others_M is not None
            picked_MK = _fenced(logits_NV[picked.at_M[:, None], picked.ids_MK])
            others_M1 = over.others_M[:, None]
            picked_MJ = torch.cat([picked_MK, others_M1 * picked.normalizer.divisor], dim=1)
        ctx.save_for_backward(
            *(logits_NV, token_ids_N, coord_at_P, coord_ids_C, others_M1), *log_normalizers
        )
        return _fenced(tokens_N), _fenced(coord_PC), picked_MJ, mean_N, *log_normalizers

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        tokens_N: torch.Tensor | None,
        coord_PC: torch.Tensor | None,
        picked_MJ: torch.Tensor | None,
        mean_N: torch.Tensor | None,
        *normalizers_N: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        logits_NV, token_ids_N, coord_at_P, coord_ids_C, others_M1, *log_normalizers = (
            ctx.saved_tensors
        )
        total_NV: torch.Tensor | None = None
        for normalizer, log_normalizer_N, gradient_N in zip(
            ctx.normalizers, log_normalizers, normalizers_N, strict=True
        ):
            if gradient_N is not None:
                share_NV = _logits_under(logits_NV, normalizer)
                share_NV.sub_(log_normalizer_N[:, None]).exp_()
                share_NV.mul_((gradient_N / normalizer.divisor)[:, None])
                total_NV = share_NV if total_NV is None else total_NV.add_(share_NV)
                del share_NV
        if total_NV is None:
            total_NV = torch.zeros_like(logits_NV, dtype=torch.float32)
        if tokens_N is not None:
            total_NV[torch.arange(len(tokens_N), device=tokens_N.device), token_ids_N] += tokens_N
        if mean_N is not None:
            total_NV += (mean_N / total_NV.shape[1])[:, None]
        if coord_PC is not None:
            total_NV[coord_at_P[:, None], coord_ids_C] += coord_PC
        if picked_MJ is not None:
            picked = ctx.picked
            total_NV[picked.at_M[:, None], picked.ids_MK] += picked_MJ[:, :-1]
            share_MV = _others(logits_NV, picked).sub_(others_M1).exp_()
            # `+=` would copy the rows first. No position occurs twice.
            total_NV.index_add_(0, picked.at_M, share_MV.mul_(picked_MJ[:, -1:]))
            del share_MV
        # Clamped logits get no gradient.
        within_NV = logits_NV <= _LOGIT_LIMIT
        within_NV &= logits_NV >= -_LOGIT_LIMIT
        total_NV.masked_fill_(within_NV.logical_not_(), 0.0)
        return total_NV.to(logits_NV.dtype), None, None, None, None, None, None, None


def _over_vocabulary(
    logits_NV: torch.Tensor,
    normalizers: tuple[Normalizer, ...],
    picked: PickedTokens | None,
    mean: bool,
) -> OverVocabulary:
    found: dict[Normalizer, torch.Tensor] = {}
    for normalizer in normalizers:
        if normalizer not in found:
            peers = [one for one in normalizers if one.divisor == normalizer.divisor]
            found |= zip(peers, _log_normalizers(logits_NV, peers), strict=True)
    return OverVocabulary(
        tuple(found[normalizer] for normalizer in normalizers),
        _fenced(logits_NV).mean(-1) if mean else None,
        None if picked is None else _logsumexp_(_others(logits_NV, picked)),
    )


def _logits_under(logits_NV: torch.Tensor, normalizer: Normalizer) -> torch.Tensor:
    scaled_NV = _fenced(logits_NV, normalizer.temperature)
    # One by one: a tensor of the ids would be copied to the GPU, and the host would wait.
    for token_id in normalizer.excluded_ids:
        scaled_NV[:, token_id] = -math.inf
    return scaled_NV


def _others(logits_NV: torch.Tensor, picked: PickedTokens) -> torch.Tensor:
    """Return the logits of the tokens that are not picked, divided by the temperature: [M, V]."""
    scaled_MV = _logits_under(logits_NV[picked.at_M], picked.normalizer)
    # Finite instead of -inf, because there may be no other tokens. Its probability is still 0.
    return scaled_MV.scatter_(1, picked.ids_MK, -2 * _LOGIT_LIMIT / picked.normalizer.divisor)


def _log_normalizers(
    logits_NV: torch.Tensor, normalizers: Sequence[Normalizer]
) -> Iterator[torch.Tensor]:
    """Yield the log-normalizers of softmaxes of one temperature, from one pass: [N] each."""
    scaled_NV = _fenced(logits_NV, normalizers[0].temperature)
    excluded = sorted({token_id for one in normalizers for token_id in one.excluded_ids})
    columns = {token_id: scaled_NV[:, token_id].clone() for token_id in excluded}
    for token_id in excluded:
        scaled_NV[:, token_id] = -math.inf
    common_N = _logsumexp_(scaled_NV)
    for normalizer in normalizers:
        # Tokens that only others exclude are added; subtracting them would lose precision.
        added = [columns[one] for one in excluded if one not in normalizer.excluded_ids]
        yield torch.stack([common_N, *added]).logsumexp(0) if added else common_N


def _logsumexp_(scaled_NV: torch.Tensor) -> torch.Tensor:
    """Compute `torch.logsumexp` without its two temporaries: [N]. Overwrites the argument."""
    largest_N = scaled_NV.amax(-1)
    return scaled_NV.sub_(largest_N[:, None]).exp_().sum(-1).log_().add_(largest_N)


def most_probable(logits_MV: torch.Tensor, normalizer: Normalizer, count: int) -> torch.Tensor:
    """Return the ids of each position's `count` most probable tokens: int64 [M, K].

    K is smaller than `count` if fewer tokens exist.
    """
    count = min(count, logits_MV.shape[1] - len(normalizer.excluded_ids))
    return _logits_under(logits_MV, normalizer).topk(count).indices


def token_logprobs(
    token_logits_N: torch.Tensor, log_normalizer_N: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probability of each position's token: [N].

    The tensors are values of a `LogitReading`, whose normalizer has the same `temperature`. The
    negative result is the cross-entropy.
    """
    return _fenced(token_logits_N, temperature) - log_normalizer_N


def mass_leak(
    log_normalizer_S: torch.Tensor, coord_logits_SC: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return `-log p` of the total probability `p` of all coordinate tokens: [S], at least 0.

    This "leak" is `logsumexp(all / T) - logsumexp(coord / T)` from a `LogitReading`; T is the
    `temperature`.
    """
    return (
        log_normalizer_S - torch.logsumexp(_fenced(coord_logits_SC, temperature), dim=-1)
    ).clamp_min(0.0)


def gate_of_leak(leak_T: torch.Tensor) -> torch.Tensor:
    """Return the loss `-log(1 - p)` at text tokens: [T].

    `p = exp(-leak)` is the probability of all coordinate tokens together, of which a text token
    should have none. `1 - p` is clamped to at least 1e-6. There this loss has no gradient, and only
    the loss `token_ce` trains the token (decision 37).
    """
    # Each form is exact on its side of log 2. The clamps keep the gradient of the unused form
    # finite, because `torch.where` multiplies it by 0.
    rest_T = (-torch.expm1(-leak_T)).clamp_min(_PROBABILITY_FLOOR)
    return torch.where(
        leak_T < math.log(2.0), -torch.log(rest_T), -torch.log1p(-torch.exp(-leak_T).clamp_max(0.5))
    )


def coord_mass(leak_S: torch.Tensor) -> torch.Tensor:
    """Return the total probability of all coordinate tokens, from its `mass_leak`: [S], 0..1."""
    return torch.exp(-leak_S)


# The coord vocabulary


def soft_targets(bins_S: torch.Tensor, *, sigma: float, truncate: int | None) -> torch.Tensor:
    """Return soft target distributions over the bins, bell-shaped around the target bins.

    Each row sums to 1.

    `q_k ~ exp(-((k - t) / sigma)^2 / 2)`, and 0 if `|k - t| > truncate`.

    Args:
        bins_S: the target bins: integers or, from optimal transport, fractions.
        sigma: width in bins, above 0.
        truncate: half-width in bins; None: no truncation. The bin nearest to the target always
            stays, so a `truncate` of 0 is possible with a fractional target.

    Returns float32 [S, 1000].
    """
    bins_C = torch.arange(NUM_BINS, device=bins_S.device, dtype=torch.float32)
    distance_SC = bins_C[None, :] - bins_S.float()[:, None]
    log_weight_SC = -0.5 * (distance_SC / max(sigma, _SIGMA_FLOOR)) ** 2
    if truncate is not None:
        outside_SC = distance_SC.abs() > truncate
        outside_SC.scatter_(1, nearest_bins(bins_S)[:, None], False)
        log_weight_SC = log_weight_SC.masked_fill_(outside_SC, -math.inf)
    # A softmax does not underflow to 0 / 0 for a small sigma between two bins.
    return torch.softmax(log_weight_SC, dim=-1)


def nearest_bins(targets_S: torch.Tensor) -> torch.Tensor:
    """Round fractional target bins to whole bins: int64 [S], 0..999. Halves are rounded up."""
    return torch.floor(targets_S + 0.5).long().clamp(0, NUM_BINS - 1)


def coord_cross_entropy(coord_logits_SC: torch.Tensor, bins_S: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the target bins among coordinate tokens only: [S]."""
    return F.cross_entropy(_fenced(coord_logits_SC), bins_S.long(), reduction="none")


def soft_cross_entropy(
    coord_logits_SC: torch.Tensor, targets_SC: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the cross-entropy with soft targets q, `-sum_k q_k log softmax(z / T)_k`: [S].

    T is the `temperature`.
    """
    return -(targets_SC * torch.log_softmax(_fenced(coord_logits_SC, temperature), dim=-1)).sum(-1)


def wasserstein1(
    coord_logits_SC: torch.Tensor, targets_SC: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the Wasserstein-1 distance of predicted from target bins: [S], as a share of the axis.

    It is `sum_k |CDF_p(k) - CDF_q(k)| / 999`, with p the prediction and q the target.
    """
    p_SC = torch.softmax(_fenced(coord_logits_SC, temperature), dim=-1)
    difference_SC = p_SC - targets_SC
    if difference_SC.is_cuda and torch.are_deterministic_algorithms_enabled():
        # torch refuses a cumulative sum then. A product with a triangle of ones is the same sum.
        bins = difference_SC.shape[-1]
        cdf_SC = difference_SC @ torch.ones(bins, bins, device=difference_SC.device).triu()
    else:
        cdf_SC = difference_SC.cumsum(-1)
    return cdf_SC.abs().sum(-1) / (NUM_BINS - 1)


def expected_coordinate(coord_logits_SC: torch.Tensor) -> torch.Tensor:
    """Return the mean coordinate of each slot, `sum_k p_k k / 999` at temperature 1: [S], 0..1."""
    bins_C = torch.arange(NUM_BINS, device=coord_logits_SC.device, dtype=torch.float32)
    p_SC = torch.softmax(_fenced(coord_logits_SC), dim=-1)
    return (p_SC * (bins_C / (NUM_BINS - 1))).sum(-1).clamp(0.0, 1.0)


def expected_bin_error(coord_logits_SC: torch.Tensor, targets_S: torch.Tensor) -> torch.Tensor:
    """Return the distance in bins of each slot's mean from its target, `|E[k] - target|`: [S]."""
    return (expected_coordinate(coord_logits_SC) * (NUM_BINS - 1) - targets_S).abs()


def top5_hits(coord_logits_SC: torch.Tensor, targets_S: torch.Tensor) -> torch.Tensor:
    """Return whether the bin nearest to the target is among the 5 most probable: bool [S].

    Equal logits are ordered by bin, lowest first.
    """
    logits_SC = _fenced(coord_logits_SC)
    aim_S1 = nearest_bins(targets_S)[:, None]
    at_aim_S1 = logits_SC.gather(1, aim_S1)
    lower_SC = torch.arange(NUM_BINS, device=logits_SC.device)[None, :] < aim_S1
    return ((logits_SC > at_aim_S1) | ((logits_SC == at_aim_S1) & lower_SC)).sum(-1) < _TOP


# Boxes, x1 y1 x2 y2 in [0, 1]


def canonical_boxes(boxes_B4: torch.Tensor) -> torch.Tensor:
    """Return the boxes with corners swapped where needed, so that x1 <= x2 and y1 <= y2."""
    first_B2 = boxes_B4[:, :2]
    second_B2 = boxes_B4[:, 2:]
    corners = [torch.minimum(first_B2, second_B2), torch.maximum(first_B2, second_B2)]
    return torch.cat(corners, dim=1)


def smooth_l1(boxes_B4: torch.Tensor, targets_B4: torch.Tensor) -> torch.Tensor:
    """Return each box's smooth-L1 loss (beta 1), the mean over its four coordinates: [B]."""
    return F.smooth_l1_loss(boxes_B4, targets_B4, beta=1.0, reduction="none").mean(-1)


def ciou(boxes_B4: torch.Tensor, targets_B4: torch.Tensor) -> torch.Tensor:
    """Return the complete IoU of each box with its target: [B], at most 1.

    It is `IoU - d^2 / c^2 - alpha v`. Corners must be ordered (`canonical_boxes`).

    Source: Zheng et al. 2020, Distance-IoU Loss, AAAI. `d` is the distance of the centres, `c` the
    diagonal of the enclosing box, `v = 4 / pi^2 (atan(w_t / h_t) - atan(w / h))^2`, and `alpha =
    v / (1 - IoU + v)` has no gradient, as in the paper. A side under 1e-4 is widened to 1e-4 about
    its centre. So degenerate boxes have finite values and gradients, and identical boxes a CIoU
    of 1.
    """
    a_low_B2, a_high_B2 = _thickened(boxes_B4)
    b_low_B2, b_high_B2 = _thickened(targets_B4)
    a_sides_B2 = a_high_B2 - a_low_B2
    b_sides_B2 = b_high_B2 - b_low_B2
    overlap_B2 = (
        torch.minimum(a_high_B2, b_high_B2) - torch.maximum(a_low_B2, b_low_B2)
    ).clamp_min(0.0)
    overlap_B = overlap_B2[:, 0] * overlap_B2[:, 1]
    iou_B = overlap_B / (
        a_sides_B2[:, 0] * a_sides_B2[:, 1] + b_sides_B2[:, 0] * b_sides_B2[:, 1] - overlap_B
    )
    enclosing_B2 = torch.maximum(a_high_B2, b_high_B2) - torch.minimum(a_low_B2, b_low_B2)
    between_B2 = (a_low_B2 + a_high_B2 - b_low_B2 - b_high_B2) / 2
    distance_B = (between_B2**2).sum(-1) / (enclosing_B2**2).sum(-1)
    b_angle_B = torch.atan(b_sides_B2[:, 0] / b_sides_B2[:, 1])
    a_angle_B = torch.atan(a_sides_B2[:, 0] / a_sides_B2[:, 1])
    v_B = 4 / math.pi**2 * (b_angle_B - a_angle_B) ** 2
    with torch.no_grad():
        alpha_B = v_B / (1 - iou_B + v_B).clamp_min(_PROBABILITY_FLOOR)
    return iou_B - distance_B - alpha_B * v_B


def _thickened(boxes_B4: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Widen sides to at least the floor; return the low and the high corners, [B, 2] each."""
    low_B2 = boxes_B4[:, :2]
    high_B2 = boxes_B4[:, 2:]
    thin_B2 = high_B2 - low_B2 < _SIDE_FLOOR
    centre_B2 = (low_B2 + high_B2) / 2
    return (
        torch.where(thin_B2, centre_B2 - _SIDE_FLOOR / 2, low_B2),
        torch.where(thin_B2, centre_B2 + _SIDE_FLOOR / 2, high_B2),
    )
