"""First embeddings of the coord tokens: near bins get near rows.

With 1,000 independent rows a model first has to learn that 499 lies beside 500, bin by bin. Here, with the commands that make checkpoints: no run needs it,
so it is no part of a learner.
Shape legend: C the 1,000 bins, D hidden size, W waves, V rows of an embedding.
"""

from __future__ import annotations

from typing import Literal

import torch

from shared.tokens.vocabulary import NUM_BINS

NUM_FREQUENCIES = 32
NUM_WAVES = 2 * NUM_FREQUENCIES

CoordInit = Literal["spread", "mean"]


def mixed_waves(mixture_DW: torch.Tensor) -> torch.Tensor:
    """[C, D]: mixtures of cosines and sines over the axis, low frequencies strongest."""
    position_C = torch.arange(NUM_BINS) / (NUM_BINS - 1)
    frequency_F = torch.arange(1, NUM_FREQUENCIES + 1)
    angle_FC = torch.pi * frequency_F[:, None] * position_C
    waves_WC = torch.cat([torch.cos(angle_FC), torch.sin(angle_FC)]) / frequency_F.sqrt().repeat(2)[:, None]
    return (mixture_DW @ waves_WC).T


def coord_rows(rows_VD: torch.Tensor, digit_ids: list[int], init: CoordInit, generator: torch.Generator) -> torch.Tensor:
    """float32 [C, D], for an embedding or a head whose rows of real tokens are `rows_VD`.

    spread: the digits' mean plus waves, as far from it as the digits are: a coord token is at first a number like any other, beside its neighbours.
    mean: the mean of all tokens, the same for every bin.
    """
    if init == "mean":
        return rows_VD.float().mean(dim=0).expand(NUM_BINS, -1)
    digits = rows_VD[digit_ids].float()
    centre_D = digits.mean(dim=0)
    waves_CD = mixed_waves(torch.randn(rows_VD.shape[1], NUM_WAVES, generator=generator))
    return centre_D + waves_CD * ((digits - centre_D).square().mean() / waves_CD.square().mean()).sqrt()
