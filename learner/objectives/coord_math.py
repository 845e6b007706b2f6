"""Losses over coord logits, and every numeric fence of the project (DESIGN 8).

Training, diagnostics and evaluation call these functions, so that NaN, infinities, temperature and clamps mean the same everywhere.

Shape legend: S coord slots, T text tokens, C the 1,000 coord bins, V the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shared.tokens.vocabulary import NUM_BINS

# exp(1e4) overflows nowhere after a log-softmax in float32, and no trained logit comes near it.
_LOGIT_LIMIT = 1.0e4
_TEMPERATURE_FLOOR = 1.0e-3
_PROBABILITY_FLOOR = 1.0e-6


def _fenced(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """float32 logits over a floored temperature; NaN becomes 0, infinities and outliers the limit."""
    finite = torch.nan_to_num(logits.float(), nan=0.0, posinf=_LOGIT_LIMIT, neginf=-_LOGIT_LIMIT)
    return finite.clamp(-_LOGIT_LIMIT, _LOGIT_LIMIT) / max(temperature, _TEMPERATURE_FLOOR)


def soft_targets(bins_S: torch.Tensor, *, sigma: float, truncate: int | None) -> torch.Tensor:
    """Gaussian-like targets `q_k ~ exp(-((k - t) / sigma)^2 / 2)`, zero where `|k - t| > truncate`, each row summing to 1.

    Args:
        bins_S: the bins aimed at; integers or, from optimal transport, fractions.
        sigma: width in bins, above 0.
        truncate: half-width in bins; None: no truncation.

    Returns:
        float32 [S, 1000].
    """
    distance_SC = torch.arange(NUM_BINS, device=bins_S.device, dtype=torch.float32)[None, :] - bins_S.float()[:, None]
    weight_SC = torch.exp(-0.5 * (distance_SC / sigma) ** 2)
    if truncate is not None:
        weight_SC = weight_SC.masked_fill(distance_SC.abs() > truncate, 0.0)
    return weight_SC / weight_SC.sum(-1, keepdim=True)


def nearest_bins(targets_S: torch.Tensor) -> torch.Tensor:
    """int64 [S], 0..999; a half goes up."""
    return torch.floor(targets_S + 0.5).long().clamp(0, NUM_BINS - 1)


def coord_cross_entropy(coord_logits_SC: torch.Tensor, bins_S: torch.Tensor) -> torch.Tensor:
    """Plain cross-entropy within the coord vocabulary: [S]."""
    return F.cross_entropy(_fenced(coord_logits_SC), bins_S, reduction="none")


def soft_cross_entropy(coord_logits_SC: torch.Tensor, targets_SC: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """`-sum_k q_k log softmax(z / T)_k`: [S]."""
    return -(targets_SC * torch.log_softmax(_fenced(coord_logits_SC, temperature), dim=-1)).sum(-1)


def wasserstein1(coord_logits_SC: torch.Tensor, targets_SC: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """`sum_k |CDF_p(k) - CDF_q(k)| / 999`: [S], the mean distance moved as a fraction of the axis."""
    p_SC = torch.softmax(_fenced(coord_logits_SC, temperature), dim=-1)
    return (p_SC - targets_SC).cumsum(-1).abs().sum(-1) / (NUM_BINS - 1)


def gate_mass_leak(logits_SV: torch.Tensor, coord_ids_C: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """`logsumexp(all / T) - logsumexp(coord / T)`, minus log of the probability on the coord vocabulary: [S], at least 0."""
    scaled_SV = _fenced(logits_SV, temperature)
    return torch.logsumexp(scaled_SV, dim=-1) - torch.logsumexp(scaled_SV[:, coord_ids_C], dim=-1)


def text_gate(logits_TV: torch.Tensor, coord_ids_C: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """`-log(1 - p_coord)` with `1 - p_coord` not under 1e-6: [T], what coord tokens take from text positions."""
    log_p_coord_T = -gate_mass_leak(logits_TV, coord_ids_C, temperature=temperature)
    return -torch.log((-torch.expm1(log_p_coord_T)).clamp_min(_PROBABILITY_FLOOR))


def token_cross_entropy(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the whole vocabulary: [T]."""
    return F.cross_entropy(_fenced(logits_TV), labels_T, reduction="none")


def sampled_logprobs(logits_TV: torch.Tensor, token_ids_T: torch.Tensor, *, temperature: float, banned_ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each sampled token as the engine computes it: temperature (0 counts as 1), banned ids taken out: [T]."""
    scaled_TV = _fenced(logits_TV, temperature if temperature > 0 else 1.0)
    scaled_TV = scaled_TV.index_fill(1, banned_ids, -_LOGIT_LIMIT / _TEMPERATURE_FLOOR)
    return torch.log_softmax(scaled_TV, dim=-1).gather(1, token_ids_T[:, None])[:, 0]
