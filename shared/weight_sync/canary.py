"""The canary: a test prompt that checks an engine's weights after a sync (decision 38).

Learner and engine compute the log-probabilities of the prompt's tokens, which must agree.

In float32, with correct weights, the log-probabilities of a token differ by 3e-6 in small models,
and by more in larger models. No token may differ by more than 1e-4 or, if that is larger,
`BOUND_OVER_NOISE` times the noise (explained below). In bfloat16 both sides round every logit, and
a few of many tokens differ by much. There the *mean* difference has a bound, and so has the *share*
of tokens that differ by more than a second bound. The effect of rounding for this model and
hardware is measured: at version 0 both sides hold the checkpoint, so their difference is noise.
Later syncs may differ by `BOUND_OVER_NOISE` times the noise, but never by more than the usual
bounds. The usual bounds catch a fault that already existed when the noise was measured, and made
the noise larger.

In bfloat16 this detects faults that move log-probabilities by several times the noise: exchanged
layers, a stale head, a missing share of an engine, weights fifty steps old (all in
tests/learner/weight_sync/test_canary.py; with the noise of trl issue 6789, from a mean difference
of about 0.1). Weights *one* step old are prevented by names, checksums and versions, and because a
sync starts only when the update before it is complete.

An engine that receives an adapter could hold it without applying it, and still agree: a young
adapter changes less than bfloat16 rounds. So both sides also score the probe without the adapter.
The adapter's *effect*, the difference of the two scores, must be the same on both sides. With one
number per token,

    effect   e = learner with the adapter - learner without
    served   s = engine with the adapter - engine without
    noise    q = engine without the adapter - learner without: only rounding

the slope `(e . s) / (e . e)` is 1 for the learner's adapter, 0 for an adapter that is not applied,
and c for one scaled by c. It differs from 1 by at most `|s - e| / |e|`. `s - e` is the noise with
the adapter minus the noise without, so at most `2 |q|` if the adapter adds no more noise than the
base model has. Hence the rule: if `|e| >= EFFECT_OVER_NOISE |q|`, the slope must be within `2 /
EFFECT_OVER_NOISE` of 1, which is the worst case. A smaller effect (it is 0 before the first step)
proves nothing and is not checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, with_config

from shared.errors import WeightSyncError
from shared.records import ImageRef, read_record
from shared.weight_sync.phases import SyncPhase

NOISE_FILE = "canary_noise.json"

EFFECT_OVER_NOISE = 5.0
# Root mean square in nats: in float32 the adapter's rounding exceeds the noise.
SMALLEST_EFFECT = 1e-4

# Allowed difference in units of the noise: of its mean for the mean, of its maximum for a token.
BOUND_OVER_NOISE = 3.0
# Minimum bounds in nats: other weights and other tokens have other noise.
SMALLEST_MEAN = 0.01
SMALLEST_BEYOND = 0.1
# Maximum bounds in nats, also used if no noise was measured. For real models, reports give means up
# to 0.064, and 0.32 for the worst of 25 tokens (verl-omni#637, vllm#18352).
USUAL_MEAN = 0.1
USUAL_BEYOND = 0.5
# Largest noise of a token that raises the bound in float32. SmolLM2 135M has 9e-5.
LARGEST_NOISE_FLOAT32 = 1e-3
# Share of the tokens that may exceed the bound, and their allowed number in a short probe. With the
# figures of trl issue 6789, an allowance of two in a probe of 39 tokens would stop one sound run of
# a hundred.
SHARE_BEYOND = 0.02
FEWEST_BEYOND = 3

Logprobs = tuple[float, ...]
"""Log-probabilities of a canary's tokens, one per token except the first."""
Scores = tuple[Sequence[int], Sequence[float]]
"""An engine's result for a canary: expanded token ids, log-probabilities of all but the first."""

# `Differences.from_values` may return NaN, which is never noise: no record or message may contain
# it.
Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True, slots=True)
class Differences:
    """Mean and largest difference of a canary's log-probabilities between learner and engine.

    The differences are absolute, in nats.

    Example: 0.01, 0.03 and 0.02 give `Differences(mean=0.02, largest=0.03)`.
    """

    mean: Nats
    largest: Nats

    @classmethod
    def from_values(cls, differences: Sequence[float]) -> Differences:
        """Return the mean and the largest value: NaN if a value is NaN, 0 if there are none."""
        if not differences:
            return cls(0.0, 0.0)
        # max() ignores a NaN that is not the first value.
        is_finite = all(map(math.isfinite, differences))
        largest = max(differences) if is_finite else math.fsum(differences)
        return cls(math.fsum(differences) / len(differences), largest)

    @classmethod
    def worst(cls, several: Sequence[Differences]) -> Differences:
        """Return the largest mean and the largest difference among those of several engines."""
        return cls(max(one.mean for one in several), max(one.largest for one in several))

    @classmethod
    def load(cls, run_dir: Path) -> Differences | None:
        """Return the differences at weight version 0 that a run folder records, or None.

        Raises ConfigError if the file is invalid.
        """
        return read_record(
            run_dir / NOISE_FILE, cls, key="telemetry.run_dir", remedy="restore it, or remove it"
        )

    def as_json(self) -> str:
        """Return the text that `load` reads."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True, slots=True)
class CanaryProbe:
    """The canary of a weight sync: a fixed prompt and answer, with the learner's log-probabilities.

    If the model has a vision tower, the prompt has an image. Log-probabilities are plain
    `log_softmax(logits)`: an engine scores a prompt without temperature or banned ids.

    Example: 3 tokens, `CanaryProbe((5, 6, 7), (), (5, 6, 7), (-0.3, -1.2), tolerance=1e-4)`; -0.3
    is the log-probability of token 6 after 5.
    """

    token_ids: tuple[int, ...]
    """Prompt and answer, with one placeholder token per image."""
    images: tuple[ImageRef, ...]
    """The images of the prompt, with their bytes in `data`."""
    expanded_token_ids: tuple[int, ...]
    """`token_ids` with placeholders expanded by the learner's processor."""
    expected_logprobs: tuple[float, ...] | None
    """The learner's log-probabilities, one per expanded token except the first.

    None: the learner computes them while the engines load the weights, and sends them after the
    weights (`shared.weight_sync.offer.CANARY`).
    """
    tolerance: float | None
    """Maximum difference of each token's log-probability, for float32.

    None: only the mean, and the share of large differences, have bounds.
    """
    base_logprobs: tuple[float, ...] | None = None
    """The learner's log-probabilities without its adapter; None if no adapter is sent."""
    placeholder_ids: tuple[int, ...] = ()
    """Ids of the tokens that stand for parts of images; their log-probabilities are not compared.

    These tokens are never sampled. Their log-probabilities are the farthest from 0, and so differ
    most by rounding.
    """
    noise: Differences | None = None
    """Differences at weight version 0, caused by rounding; None: not measured, or not needed."""
    is_raised_by_noise: bool = False
    """Whether `noise` may raise `tolerance`. False if the user has set the tolerance."""

    def __post_init__(self) -> None:
        for logprobs in (self.expected_logprobs, self.base_logprobs):
            if logprobs is not None and len(logprobs) != self.num_logprobs:
                raise ValueError(
                    f"{len(self.expanded_token_ids)} canary tokens need {self.num_logprobs}"
                    f" log-probabilities (none for the first token), not {len(logprobs)}"
                )

    @property
    def num_logprobs(self) -> int:
        return len(self.expanded_token_ids) - 1

    @property
    def needs_noise(self) -> bool:
        """True if the noise is measured at version 0; it bounds the differences of later syncs."""
        return self.noise is None and (self.tolerance is None or self.is_raised_by_noise)

    def with_logprobs(self, logprobs: Iterable[float]) -> CanaryProbe:
        """Return the canary with the learner's log-probabilities, received after the weights."""
        return replace(self, expected_logprobs=tuple(logprobs))

    def measure(self, actor: str, scores: Scores) -> Differences | None:
        """Return the differences of an engine with the same checkpoint: the noise of rounding.

        `actor` names the engine. Returns None if the differences are larger than rounding can
        explain: then the engine has a fault or other weights. Raises WeightSyncError if the engine
        expanded the prompt differently.
        """
        expanded_token_ids, logprobs = scores
        self._check_tokens(actor, expanded_token_ids)
        noise = Differences.from_values(self._distances(logprobs, self._expected))
        if self.tolerance is not None:
            return noise if noise.largest <= LARGEST_NOISE_FLOAT32 else None
        return noise if noise.mean <= USUAL_MEAN else None

    def check(
        self, actor: str, expanded_token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> Differences:
        """Compare an engine's log-probabilities with the learner's, and return the differences.

        Raises WeightSyncError about `actor`, with the first token that differs by too much.
        """
        scores = (expanded_token_ids, logprobs)
        return self._check_agreement(actor, scores, self._expected, "weights are not the learner's")

    def check_adapter(self, actor: str, adapted: Scores, base: Scores) -> float | None:
        """Check, after `check`, that an engine applies the adapter that it has received.

        `adapted` and `base` are the engine's results with and without the adapter. Return the
        slope: the adapter's effect in the engine divided by its effect in the learner. Return None
        if the adapter's effect is too small to measure. Raises WeightSyncError if the slope is too
        far from 1.
        """
        assert self.base_logprobs is not None, "an adapter's probe needs base_logprobs"
        self._check_agreement(
            actor, base, self.base_logprobs, "weights without the adapter are not the learner's"
        )
        effect = self._differences(self._expected, self.base_logprobs)
        served = self._differences(adapted[1], base[1])
        noise = self._differences(base[1], self.base_logprobs)
        smallest = SMALLEST_EFFECT * math.sqrt(len(effect))
        if math.hypot(*effect) < max(EFFECT_OVER_NOISE * math.hypot(*noise), smallest):
            return None
        projection = math.fsum(e * s for e, s in zip(effect, served, strict=True))
        slope = projection / math.fsum(e * e for e in effect)
        # Written so that NaN counts as a difference.
        if not abs(slope - 1) <= 2 / EFFECT_OVER_NOISE:
            raise WeightSyncError(
                f"the adapter's effect on the log-probabilities is {slope:.2f} times the learner's"
                " (0: the engine has the adapter but does not apply it); the engine does not serve"
                " the learner's adapter",
                actor=actor,
                phase=SyncPhase.CANARY,
                quantity="effect of the adapter",
                size=abs(slope - 1),
            )
        return slope

    def _check_agreement(
        self, actor: str, scores: Scores, learners: Sequence[float], what: str
    ) -> Differences:
        expanded_token_ids, logprobs = scores
        self._check_tokens(actor, expanded_token_ids)
        distances = self._distances(logprobs, learners)
        found = Differences.from_values(distances)
        allowed_mean, beyond = self._bounds()
        # Written so that NaN on either side counts as a difference.
        wrong = [i for i, one in zip(self._compared(), distances, strict=True) if not one <= beyond]
        num_allowed = 0.0
        if self.tolerance is None:
            num_allowed = max(SHARE_BEYOND * len(distances), FEWEST_BEYOND)
        if found.mean <= allowed_mean and len(wrong) <= num_allowed:
            return found
        message = (
            f"{len(wrong)} of {len(distances)} log-probabilities differ by more than {beyond:g}"
        )
        if wrong:
            first = wrong[0]
            message += (
                f", first at token {first + 1} (id {self.expanded_token_ids[first + 1]}): learner"
                f" {learners[first]:.6f}, engine {logprobs[first]:.6f}"
            )
        if self.tolerance is None:
            message += f"; the mean difference is {found.mean:.4f} ({allowed_mean:.4f} is allowed)"
        raise WeightSyncError(
            f"{message}; the engine's {what}",
            actor=actor,
            phase=SyncPhase.CANARY,
            quantity="canary log-probability",
            size=found.largest,
        )

    @property
    def _expected(self) -> tuple[float, ...]:
        assert self.expected_logprobs is not None, "call `with_logprobs` first"
        return self.expected_logprobs

    def _bounds(self) -> tuple[float, float]:
        """Return the maximum mean difference, and the difference above which a token is counted."""
        if self.tolerance is not None:
            noise = 0.0 if self.noise is None else self.noise.largest
            return math.inf, max(self.tolerance, BOUND_OVER_NOISE * noise)
        if self.noise is None:
            return USUAL_MEAN, USUAL_BEYOND
        mean = max(BOUND_OVER_NOISE * self.noise.mean, SMALLEST_MEAN)
        beyond = max(BOUND_OVER_NOISE * self.noise.largest, SMALLEST_BEYOND)
        # An engine that is faulty from the start has measured its fault as noise.
        return min(mean, USUAL_MEAN), min(beyond, USUAL_BEYOND)

    def _compared(self) -> list[int]:
        """Return the indices of the log-probabilities that are compared."""
        token_ids = self.expanded_token_ids[1:]
        return [i for i, token_id in enumerate(token_ids) if token_id not in self.placeholder_ids]

    def _differences(self, ones: Sequence[float], others: Sequence[float]) -> list[float]:
        """Return the differences, ones - others, of the compared tokens."""
        differences = [one - other for one, other in zip(ones, others, strict=True)]
        return [differences[i] for i in self._compared()]

    def _distances(self, ones: Sequence[float], others: Sequence[float]) -> list[float]:
        return list(map(abs, self._differences(ones, others)))

    def _check_tokens(self, actor: str, expanded_token_ids: Sequence[int]) -> None:
        if tuple(expanded_token_ids) == self.expanded_token_ids:
            return
        pairs = list(zip(expanded_token_ids, self.expanded_token_ids, strict=False))
        first = next((i for i, (got, expected) in enumerate(pairs) if got != expected), len(pairs))
        num_wrong = sum(got != expected for got, expected in pairs)
        num_missing = abs(len(expanded_token_ids) - len(self.expanded_token_ids))
        raise WeightSyncError(
            f"the engine expanded the canary prompt to {len(expanded_token_ids)} tokens, the"
            f" learner to {len(self.expanded_token_ids)}, first difference at token {first}; check"
            " that engine and learner read the same processor files, with equal image size limits",
            actor=actor,
            phase=SyncPhase.CANARY,
            quantity="canary token ids",
            size=float(num_missing + num_wrong),
        )
