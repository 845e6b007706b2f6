"""The repeat guard for transformers' `generate`: ends answers that repeat themselves.

Shape legend: B rows (sequences, or beams), L tokens so far, T generated ones, V vocabulary.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from shared.tokens.repeat_guard import RepeatGuard, RepeatRule


class HFRepeatGuard(LogitsProcessor):
    """A logits processor that forces the stop token in answers that repeat themselves.

    It is for one call of `generate`, and must come before the processor that chooses a token.
    """

    def __init__(self, rule: RepeatRule, *, prompt_length: int, stop_token_id: int) -> None:
        """`rule`: which answers are ended; `prompt_length`: number of tokens of a padded prompt."""
        self._rule = rule
        self._prompt_length = prompt_length
        self._stop_token_id = stop_token_id
        self._last_BT: torch.Tensor | None = None
        self._guards: list[RepeatGuard] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores`, [B, V], with the stop token forced in rows whose answers repeat.

        `input_ids` are the tokens so far, [B, L]. A changed result is a new tensor.
        """
        over = self._read(input_ids[:, self._prompt_length :])
        if not any(over):
            return scores
        over_B = torch.tensor(over, device=scores.device)
        # The stop token gets log-probability 0, all others minus infinity. This suits logits too.
        scores = scores.masked_fill(over_B[:, None], -torch.inf)
        scores[over_B, self._stop_token_id] = 0.0
        return scores

    def _read(self, tokens_BT: torch.Tensor) -> list[bool]:
        num_rows, num_tokens = tokens_BT.shape
        # In a beam search rows are reordered and copied. Read those rows again from the start.
        goes_on = [False] * num_rows
        if self._last_BT is not None and self._last_BT.shape == (num_rows, num_tokens - 1):
            goes_on = (tokens_BT[:, :-1] == self._last_BT).all(1).tolist()
        newest = tokens_BT[:, -1].tolist() if num_tokens else []
        over = [False] * num_rows
        self._guards = [
            self._guards[row] if goes_on[row] else self._rule.guard() for row in range(num_rows)
        ]
        for row, guard in enumerate(self._guards):
            for token_id in [newest[row]] if goes_on[row] else tokens_BT[row].tolist():
                over[row] = guard.push(token_id)
        self._last_BT = tokens_BT.clone()
        return over
