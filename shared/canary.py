"""The probe that tells whether a rollout engine computes what the learner computes (DESIGN 9.3).

Where the engine is sent an adapter, agreement alone proves little: in bfloat16 two sound implementations differ by more than a young adapter changes, so
an engine that holds the adapter and does not apply it agrees as well. Therefore both sides also score the probe without the adapter, and the adapter's
*effect*, the difference of the two, has to be the same. With one number per token,

    effect   e = learner's with the adapter - learner's without
    served   s = engine's with the adapter - engine's without
    noise    q = engine's without the adapter - learner's without: rounding, and nothing else

the slope `(e . s) / (e . e)` is 1 for the learner's adapter, 0 for one that is not applied, and c for one that is scaled by c. It differs from 1 by at most
`|s - e| / |e|`; `s - e` is the noise with the adapter less the noise without, so at most `2 |q|` as long as the adapter brings no more noise than the base
model has by itself. Hence the rule: where `|e| >= EFFECT_OVER_NOISE |q|`, the slope has to be within `2 / EFFECT_OVER_NOISE` of 1. That is the worst case;
noise of random signs, over the hundred tokens of a probe, moves the slope by a tenth of it. A smaller effect (there is none before the first step) proves
nothing, and nothing is asked of it: what differs then is what the tolerance allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shared.errors import WeightSyncError
from shared.records import ImageRef
from shared.weight_sync import SyncPhase

EFFECT_OVER_NOISE = 5.0
SMALLEST_EFFECT = 1e-4
"""Root mean square in nats: in float32 the noise may be next to nothing, and the adapter's own rounding must not be taken for its effect."""

Scores = tuple[Sequence[int], Sequence[float]]
"""An engine's answer to a probe: the expanded token ids, and the log-probability of each but the first."""


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
    expected_logprobs: tuple[float, ...] | None
    """None: the learner computes them while the engines load, and they come behind the weights (`shared.weight_terms.CANARY`). Else one per expanded token
    but the first, image placeholders included: `expected_logprobs[i]` is of `expanded_token_ids[i + 1]`."""
    tolerance: float
    """Largest absolute difference that is still agreement: 1e-4 in fp32, where two sound engines differ by 3e-6."""
    base_logprobs: tuple[float, ...] | None = None
    """What the learner thinks of the same tokens without its adapter, as `expected_logprobs`; None where no adapter is synced by itself."""

    def __post_init__(self) -> None:
        for logprobs in (self.expected_logprobs, self.base_logprobs):
            if logprobs is not None and len(logprobs) != len(self.expanded_token_ids) - 1:
                raise ValueError(f"{len(self.expanded_token_ids)} canary tokens need one log-probability less, not {len(logprobs)}")

    @property
    def num_logprobs(self) -> int:
        return len(self.expanded_token_ids) - 1

    def with_logprobs(self, logprobs: Iterable[float]) -> CanaryProbe:
        """The same probe with what has come behind the weights."""
        return replace(self, expected_logprobs=tuple(logprobs))

    def check(self, actor: str, expanded_token_ids: Sequence[int], logprobs: Sequence[float]) -> float:
        """The largest absolute difference of a log-probability. Raises WeightSyncError(phase="canary") naming the first token that differs."""
        assert self.expected_logprobs is not None, "with_logprobs comes first"
        return self._largest_difference(actor, (expanded_token_ids, logprobs), self.expected_logprobs, "weights are not the learner's")

    def check_adapter(self, actor: str, adapted: Scores, base: Scores) -> float | None:
        """Of an engine that was sent an adapter, after `check`: its answers with and without it. The slope of the adapter's effect (see the module), or None
        where the learner's own is too small to prove anything. Raises WeightSyncError(phase="canary") where the adapter is not applied as it should be.
        """
        assert self.base_logprobs is not None, "an offer of an adapter brings both"
        assert self.expected_logprobs is not None, "an offer of an adapter brings both"
        self._largest_difference(actor, base, self.base_logprobs, "weights without the adapter are not the learner's")
        effect = [with_it - without for with_it, without in zip(self.expected_logprobs, self.base_logprobs, strict=True)]
        served = [with_it - without for with_it, without in zip(adapted[1], base[1], strict=True)]
        noise = [engine - learner for engine, learner in zip(base[1], self.base_logprobs, strict=True)]
        if _norm(effect) < max(EFFECT_OVER_NOISE * _norm(noise), SMALLEST_EFFECT * math.sqrt(len(effect))):
            return None
        slope = math.fsum(e * s for e, s in zip(effect, served, strict=True)) / math.fsum(e * e for e in effect)
        if not abs(slope - 1) <= 2 / EFFECT_OVER_NOISE:
            raise WeightSyncError(
                f"the adapter's effect on the log-probabilities is {slope:.2f} times the learner's (0: the engine holds it and does not apply it); "
                f"the engine does not serve the learner's adapter",
                actor=actor,
                phase=SyncPhase.CANARY,
                quantity="effect of the adapter",
                size=abs(slope - 1),
            )
        return slope

    def _largest_difference(self, actor: str, scores: Scores, learners: Sequence[float], what: str) -> float:
        expanded_token_ids, logprobs = scores
        self._check_tokens(actor, expanded_token_ids)
        differences = [abs(got - expected) for got, expected in zip(logprobs, learners, strict=True)]
        # Written so that NaN on either side counts as a difference.
        wrong = [i for i, difference in enumerate(differences) if not difference <= self.tolerance]
        if wrong:
            first = wrong[0]
            raise WeightSyncError(
                f"{len(wrong)} of {len(differences)} log-probabilities differ by more than {self.tolerance:g}, first at token {first + 1} "
                f"(id {self.expanded_token_ids[first + 1]}): learner {learners[first]:.6f}, engine {logprobs[first]:.6f}; "
                f"the engine's {what}",
                actor=actor,
                phase=SyncPhase.CANARY,
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
            phase=SyncPhase.CANARY,
            quantity="canary token ids",
            size=float(abs(len(expanded_token_ids) - len(self.expanded_token_ids)) + sum(got != expected for got, expected in pairs)),
        )


def _norm(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))
