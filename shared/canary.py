"""The probe that tells whether a rollout engine computes what the learner computes (DESIGN 9.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import WeightSyncError
from shared.records import ImageRef


@dataclass(frozen=True, slots=True)
class CanaryProbe:
    """A fixed sequence (a prompt, with an image where the model has a vision tower, and a short response) and what the learner thinks of it.

    The log-probabilities are plain `log_softmax(logits)` over the whole vocabulary: temperature 1 and no banned ids, because an engine
    scores a prompt without any sampling rule. So `DecodeSettings.banned_token_ids` has no part in this comparison.
    """

    token_ids: tuple[int, ...]
    """Prompt and response, unexpanded: one image placeholder per image."""
    images: tuple[ImageRef, ...]
    """Each with `data`."""
    expanded_token_ids: tuple[int, ...]
    """What `token_ids` becomes: image placeholders expanded by the learner's processor."""
    expected_logprobs: tuple[float, ...]
    """One per expanded token but the first, image placeholders included: `expected_logprobs[i]` is of `expanded_token_ids[i + 1]`."""
    tolerance: float
    """Largest absolute difference that is still agreement: 1e-4 in fp32, where two sound engines differ by 3e-6."""

    def __post_init__(self) -> None:
        if len(self.expected_logprobs) != len(self.expanded_token_ids) - 1:
            raise ValueError(f"{len(self.expanded_token_ids)} canary tokens need one log-probability less, not {len(self.expected_logprobs)}")

    def check(self, actor: str, expanded_token_ids: Sequence[int], logprobs: Sequence[float]) -> float:
        """The largest absolute difference of a log-probability. Raises WeightSyncError(phase="canary") naming the first token that differs."""
        self._check_tokens(actor, expanded_token_ids)
        differences = [abs(got - expected) for got, expected in zip(logprobs, self.expected_logprobs, strict=True)]
        # Written so that NaN on either side counts as a difference.
        wrong = [i for i, difference in enumerate(differences) if not difference <= self.tolerance]
        if wrong:
            first = wrong[0]
            raise WeightSyncError(
                f"{len(wrong)} of {len(differences)} log-probabilities differ by more than {self.tolerance:g}, first at token {first + 1} "
                f"(id {self.expanded_token_ids[first + 1]}): learner {self.expected_logprobs[first]:.6f}, engine {logprobs[first]:.6f}; "
                f"the engine's weights are not the learner's",
                actor=actor,
                phase="canary",
                quantity="canary log-probability",
                size=math.nan if any(math.isnan(difference) for difference in differences) else max(differences),
            )
        return max(differences, default=0.0)

    def _check_tokens(self, actor: str, expanded_token_ids: Sequence[int]) -> None:
        if tuple(expanded_token_ids) == self.expanded_token_ids:
            return
        pairs = list(zip(expanded_token_ids, self.expanded_token_ids, strict=False))
        first = next((i for i, (got, expected) in enumerate(pairs) if got != expected), len(pairs))
        raise WeightSyncError(
            f"the engine expanded the canary prompt to {len(expanded_token_ids)} tokens, the learner to {len(self.expanded_token_ids)}, "
            f"first difference at token {first}; check that both read the same processor files (image size limits above all)",
            actor=actor,
            phase="canary",
            quantity="canary token ids",
            size=float(abs(len(expanded_token_ids) - len(self.expanded_token_ids)) + sum(got != expected for got, expected in pairs)),
        )
