"""How a token is chosen inside transformers' `generate`: the rules of `DecodeSettings`, as vLLM applies them.

Shape legend: B rows (sequences, or beams), L tokens so far, V vocabulary, T response tokens, K candidates.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch
from transformers import LogitsProcessor

from rollout_actors.sampling import BAN
from shared.rollouts import DecodeMode, DecodeSettings


class LeavesOff(LogitsProcessor):
    """Leaves `generate` before its next token where the run is being ended."""

    def __init__(self, require_going_on: Callable[[], None]) -> None:
        """`require_going_on` raises then."""
        self._require_going_on = require_going_on

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._require_going_on()
        return scores


class SeenTokens:
    """Which ids occur in each row, its prompt included: what the repetition penalty is for."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prompts without their padding."""
        self._prompts = prompts
        self._prompt_length = max(len(prompt) for prompt in prompts)

    def mask(self, ids_BL: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """bool [B, V]. B is a multiple of the number of prompts where each has several beams."""
        mask_BV = torch.zeros(len(ids_BL), vocabulary, dtype=torch.bool, device=ids_BL.device)
        rows_per_prompt = len(ids_BL) // len(self._prompts)
        for row in range(len(ids_BL)):
            mask_BV[row, list(self._prompts[row // rows_per_prompt])] = True
        return mask_BV.scatter_(1, ids_BL[:, self._prompt_length :], True)


def processed_logits(logits_BV: torch.Tensor, decode: DecodeSettings, seen_BV: torch.Tensor | None) -> torch.Tensor:
    """The logits a token is drawn from, in fp32: bans, repetition penalty, temperature, top-k, top-p, in vLLM's order.

    `seen_BV` is None where there is no repetition penalty. Not in place.
    """
    logits_BV = logits_BV.float().clone()
    if decode.banned_token_ids:
        logits_BV[:, list(decode.banned_token_ids)] += BAN
    if seen_BV is not None:
        penalised_BV = torch.where(logits_BV > 0, logits_BV / decode.repetition_penalty, logits_BV * decode.repetition_penalty)
        logits_BV = torch.where(seen_BV, penalised_BV, logits_BV)
    if decode.mode is not DecodeMode.SAMPLE:
        return logits_BV
    logits_BV /= decode.temperature
    if 0 < decode.top_k < logits_BV.shape[1]:
        smallest_B1 = logits_BV.topk(decode.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    if decode.top_p < 1.0:
        logits_BV = _most_probable(logits_BV, decode.top_p)
    return logits_BV


def _most_probable(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """All but the smallest set with at least probability `top_p` is removed; the most probable token never is."""
    ascending_BV, order_BV = logits_BV.sort(dim=-1)
    removed_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p
    removed_BV[:, -1] = False
    return logits_BV.masked_fill(removed_BV.scatter(1, order_BV, removed_BV), -torch.inf)


def draw(logprobs_BV: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """int64 [B]: per row the first token at which the cumulated probability exceeds the row's number in [0, 1).

    A row's token is a function of its log-probabilities and its number alone; in fp64, so that the sum over a large vocabulary is exact enough.
    """
    cumulated_BV = logprobs_BV.double().exp().cumsum(-1)
    total_B1 = cumulated_BV[:, -1:].contiguous()
    uniforms_B1 = torch.tensor(uniforms, dtype=torch.float64, device=logprobs_BV.device)[:, None]
    drawn_B1 = torch.searchsorted(cumulated_BV, uniforms_B1 * total_B1, right=True)
    # The product may round up to the total: then it is the last token that has any probability.
    last_B1 = torch.searchsorted(cumulated_BV, total_B1)
    return torch.minimum(drawn_B1, last_B1)[:, 0]


class Chooser(LogitsProcessor):
    """Chooses every row's next token, greedily or by the row's own seed, and notes its log-probability.

    To be the last processor of a greedy `generate`, to which it leaves one token per row: its results depend neither on the neighbours of
    a row nor on any global random state.
    """

    def __init__(self, decode: DecodeSettings, seeds: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._decode = decode
        self._generators = [random.Random(seed) for seed in seeds]
        self._seen = None if decode.repetition_penalty == 1.0 else SeenTokens(prompts)
        self._logprobs: list[torch.Tensor] = []
        self.times: list[float] = []
        """`time.perf_counter` when each step's tokens were chosen; on a GPU, which runs behind the host, up to a step before."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen_BV = None if self._seen is None else self._seen.mask(input_ids, scores.shape[1])
        logprobs_BV = processed_logits(scores, self._decode, seen_BV).log_softmax(-1)
        if self._decode.mode is DecodeMode.SAMPLE:
            chosen_B = draw(logprobs_BV, [generator.random() for generator in self._generators])
        else:
            chosen_B = logprobs_BV.argmax(-1)
        self._logprobs.append(logprobs_BV.gather(1, chosen_B[:, None])[:, 0])
        self.times.append(time.perf_counter())
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen_B[:, None], 0.0)

    def logprobs(self) -> list[list[float]]:
        """[B][T]: of what was chosen, also behind a row's end."""
        rows: list[list[float]] = torch.stack(self._logprobs, dim=1).tolist()
        return rows


class BeamScores(LogitsProcessor):
    """Applies the same rules to the scores of a beam search, and remembers those of its candidates, which are all that a beam can go on with.

    transformers hands over log-probabilities, so a repetition penalty multiplies every seen token's (vLLM's divides a positive logit instead).
    """

    def __init__(self, decode: DecodeSettings, prompts: Sequence[Sequence[int]]) -> None:
        self._decode = decode
        self._seen = None if decode.repetition_penalty == 1.0 else SeenTokens(prompts)
        self._num_candidates = max(2, 1 + len(decode.stop_token_ids)) * decode.num_beams
        self._candidates: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen_BV = None if self._seen is None else self._seen.mask(input_ids, scores.shape[1])
        logprobs_BV = processed_logits(scores, self._decode, seen_BV).log_softmax(-1)
        logprobs_BK, ids_BK = logprobs_BV.topk(min(self._num_candidates, scores.shape[1]))
        self._candidates.append((ids_BK, logprobs_BK))
        return logprobs_BV

    def logprobs(self, beams: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """One per token, given the row (`beam_indices`) that each was added to."""
        values = []
        for (ids_BK, logprobs_BK), beam, token_id in zip(self._candidates, beams, token_ids, strict=False):
            (place,) = (ids_BK[beam] == token_id).nonzero()[0].tolist()
            values.append(float(logprobs_BK[beam, place]))
        return values
