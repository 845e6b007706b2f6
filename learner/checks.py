"""Checks that the engine computes what the learner computes; a difference ends the run.

Every rollout has its prompt and weight version checked (decision 38, spec: canonical encoding). So
are the log-probabilities of the sampled tokens that stay in the target, if the rollout is of the
learner's present weights and was sampled from the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import torch

from learner.segments import EncodedPrompt, Segment
from shared.errors import RolloutError
from shared.rollouts import DecodeSettings, Rollout


def check_prompt(rollout: Rollout, prompt: EncodedPrompt) -> None:
    """Raise RolloutError at the first prompt token that engine and learner have differently."""
    engine = rollout.prompt_token_ids
    learner = prompt.token_ids
    if engine == learner:
        return
    pairs = enumerate(zip(engine, learner, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(engine), len(learner)))
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


class Sampling(NamedTuple):
    """The origin of sampled tokens: a rollout's, or an environment's training example's."""

    sample_id: str
    actor: str
    weight_version: int


def check_weight_versions(sampled: Sequence[Sampling], version: int, *, max_staleness: int) -> None:
    """Check that a round is of one version of the weights, and not too old.

    `version` is the learner's; the round's is at most `max_staleness` older (decision 13). Nothing
    is generated while weights change.

    Raises:
        RolloutError: an engine missed a sync.
    """
    allowed = f", and rollout_matching.max_staleness is {max_staleness}" if max_staleness else ""
    for one in sampled:
        first = sampled[0]
        if not version - max_staleness <= one.weight_version <= version:
            problem = f"the learner holds {version}{allowed}; a sync was skipped or lost"
        elif one.weight_version != first.weight_version:
            problem = (
                f"and sample {first.sample_id} of the same round with {first.weight_version} (on"
                f" {first.actor}); an engine missed a sync"
            )
        else:
            continue
        message = f"sample {one.sample_id}: generated with weight version {one.weight_version}, "
        raise RolloutError(message + problem, actor=one.actor, phase="check")


def compares_logprobs(decode: DecodeSettings) -> bool:
    """Tell whether log-probabilities so decoded can be compared with the learner's."""
    # Truncated or penalised sampling renormalises over a set whose border depends on the last bits
    # of the logits: there is nothing exact to compare.
    return (
        decode.return_logprobs
        and decode.top_p >= 1.0
        and decode.top_k <= 0
        and decode.repetition_penalty == 1.0
    )


@dataclass(frozen=True, slots=True)
class LogprobTolerance:
    """The difference of log-probabilities up to which they are of the same weights."""

    max_abs: float
    """In nats. A token that differs by more is an outlier, and ends the run, but for these:"""
    num_outliers: int = 0
    """Outliers permitted in a step, whatever their share."""
    outlier_share: float = 0.0
    """Share of the step's compared tokens up to which more of them are permitted."""

    @classmethod
    def of(cls, dtype: Literal["float32", "bfloat16"], max_abs: float) -> LogprobTolerance:
        """Return the tolerance of a run whose forwards are of this type."""
        # In bfloat16 what an improbable token rounds to has no bound that millions of them keep;
        # wrong weights are off at most of them.
        if dtype == "bfloat16":
            return cls(max_abs, num_outliers=10, outlier_share=1e-3)
        return cls(max_abs)

    def permits(self, compared: Compared) -> bool:
        by_share = self.outlier_share * compared.num_tokens
        return compared.num_outliers <= max(self.num_outliers, by_share)


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens of a step whose log-probabilities were compared, on this rank."""

    num_tokens: int = 0
    num_outliers: int = 0
    """Tokens beyond the tolerance."""
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
    """Compare the log-probabilities of a row's tokens, and add them to `so_far`.

    K are the tokens to compare of `segments`, concatenated.

    Example: engine [-0.50, -2.10], learner [-0.50, -2.09], tolerance 1e-3: the second token is an
    outlier, and in float32, where none is permitted, ends the run.

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
    pairs = (
        (segment, token) for segment in segments for token in segment.target.compared_positions
    )
    segment, token = next(islice(pairs, first, None))
    share = tolerance.outlier_share
    permitted = f", and at most {share:g} of them may" if share else ""
    raise RolloutError(
        f"sample {segment.target.sample_id}: response token {token} (id"
        f" {segment.target.token_ids[token]}) has log-probability {engine_K[first]:.6f} in the"
        f" engine and {learner_K[first]:.6f} in the learner; {compared.num_outliers} of the"
        f" {compared.num_tokens} tokens of this step so far differ by more than"
        f" {tolerance.max_abs:g} (rollout_matching.logprob_tolerance){permitted}: the engine does"
        " not run the learner's weights, or not in its precision; give both the same model.dtype,"
        " and raise the key only if the difference is noise",
        actor=segment.actor or "",
        phase="check",
    )
