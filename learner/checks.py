"""Does the engine compute what the learner computes? Checked for every rollout; a difference ends
the run (DESIGN 9, spec: canonical encoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from learner.segments import EncodedPrompt, Segment
from shared.config import RunConfig
from shared.errors import RolloutError
from shared.rollouts import DecodeSettings, Rollout


def check_prompt(rollout: Rollout, prompt: EncodedPrompt) -> None:
    """RolloutError at the first prompt token that the engine saw and the learner does not
    encode."""
    engine, learner = rollout.prompt_token_ids, prompt.token_ids
    if engine == learner:
        return
    index = next(
        (i for i, (a, b) in enumerate(zip(engine, learner, strict=False)) if a != b),
        min(len(engine), len(learner)),
    )
    raise RolloutError(
        f"sample {rollout.sample_id}: the prompts differ first at token {index}: engine"
        f" {_around(engine, index)} ({len(engine)} tokens), learner {_around(learner, index)}"
        f" ({len(learner)} tokens); engines and learner must load the same checkpoint, with the"
        " image size limits in its processor files",
        actor=rollout.actor,
        phase="check",
    )


def _around(token_ids: Sequence[int], index: int) -> str:
    return f"...{list(token_ids[max(0, index - 2) : index + 3])}..."


class Sampling(Protocol):
    """Something that an engine sampled."""

    @property
    def sample_id(self) -> str: ...
    @property
    def actor(self) -> str: ...
    @property
    def weight_version(self) -> int: ...


def check_weight_versions(
    rollouts: Sequence[Sampling], version: int, *, max_staleness: int
) -> None:
    """RolloutError when a round is not of the weights the learner holds, `version`, or of weights
    at most `max_staleness` older (DESIGN 5, decision 13).

    A round is of one version: nothing is generated while weights change.
    """
    for rollout in rollouts:
        if not version - max_staleness <= rollout.weight_version <= version:
            allowed = (
                f", and rollout_matching.max_staleness is {max_staleness}" if max_staleness else ""
            )
            raise RolloutError(
                f"sample {rollout.sample_id}: generated with weight version"
                f" {rollout.weight_version}, the learner holds {version}{allowed}; a sync was"
                " skipped or lost",
                actor=rollout.actor,
                phase="check",
            )
        if rollout.weight_version != rollouts[0].weight_version:
            first = rollouts[0]
            raise RolloutError(
                f"sample {rollout.sample_id}: generated with weight version"
                f" {rollout.weight_version}, and sample {first.sample_id} of the same round with"
                f" {first.weight_version} (on {first.actor}); an engine missed a sync",
                actor=rollout.actor,
                phase="check",
            )


def compares_logprobs(decode: DecodeSettings) -> bool:
    """Whether log-probabilities so decoded can be compared with the learner's.

    Truncated or penalised sampling renormalises over a set whose border depends on the last bits of
    the logits: there is nothing exact to compare.
    """
    return (
        decode.return_logprobs
        and decode.top_p >= 1.0
        and decode.top_k <= 0
        and decode.repetition_penalty == 1.0
    )


@dataclass(frozen=True, slots=True)
class LogprobTolerance:
    """By how much the engine's log-probabilities may differ from the learner's before they are of
    other weights.
    """

    max_abs: float
    """In nats. A token that differs by more, which is an outlier, ends the run, but for these:"""
    num_outliers: int = 0
    """So many in a step, whatever their share."""
    outlier_share: float = 0.0
    """More of them, up to this share of the step's compared tokens."""

    @classmethod
    def of(cls, config: RunConfig) -> LogprobTolerance:
        """In bfloat16 what an improbable token rounds to has no bound that millions of them keep;
        wrong weights are off at most of them.
        """
        return cls(
            config.logprob_tolerance,
            *((10, 1e-3) if config.model.dtype == "bfloat16" else (0, 0.0)),
        )

    def permits(self, compared: Compared) -> bool:
        return compared.num_outliers <= max(
            self.num_outliers, self.outlier_share * compared.num_tokens
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """Sampled tokens of a step, of this rank."""

    num_tokens: int = 0
    num_outliers: int = 0
    """Beyond the tolerance."""
    max_abs: float = 0.0
    """The largest absolute difference, in nats."""


def check_logprobs(
    segments: Sequence[Segment],
    learner_K: torch.Tensor,
    engine_K: torch.Tensor,
    *,
    tolerance: LogprobTolerance,
    so_far: Compared,
) -> Compared:
    """Compare the log-probabilities of the sampled tokens of a row.

    Args:
        segments: the row's.
        learner_K, engine_K: the segments' sampled tokens, concatenated.
        so_far: of the step's rows before this one.

    Returns:
        The same, with this row's.

    Raises:
        RolloutError: more outliers than the tolerance permits, or a value that is not a number;
        names the sample, the token and both values.
    """
    if not len(engine_K):
        return so_far
    difference_K = (learner_K - engine_K).abs()
    # Written so that NaN on either side is one too.
    outliers = (~(difference_K <= tolerance.max_abs)).nonzero()[:, 0]
    compared = Compared(
        so_far.num_tokens + len(engine_K),
        so_far.num_outliers + len(outliers),
        max(so_far.max_abs, float(difference_K.max())),
    )
    not_a_number = difference_K.isnan().nonzero()[:, 0]
    if tolerance.permits(compared) and not len(not_a_number):
        return compared
    first = int((not_a_number if len(not_a_number) else outliers)[0])
    number, token = [
        (n, t) for n, segment in enumerate(segments) for t in segment.target.sampled_positions
    ][first]
    segment = segments[number]
    permitted = (
        f", and at most {tolerance.outlier_share:g} of them may" if tolerance.outlier_share else ""
    )
    raise RolloutError(
        f"sample {segment.target.sample_id}: response token {token} (id"
        f" {segment.target.token_ids[token]}) has log-probability {engine_K[first]:.6f} in the"
        f" engine and {learner_K[first]:.6f} in the learner; {compared.num_outliers} of the"
        f" {compared.num_tokens} tokens of this step so far differ by more than"
        f" {tolerance.max_abs:g} (rollout_matching.logprob_tolerance){permitted}: the engine does"
        " not run the learner's weights, or not in its precision",
        actor=segment.actor or "",
        phase="check",
    )
