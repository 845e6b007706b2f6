"""What tests of the learner share: a learner in this process, and rollouts nobody had to generate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.learner import Learner
from learner.segments import PromptEncoder
from shared.config import RunConfig
from shared.records import Sample
from shared.rollouts import FinishReason, Rollout, RolloutRequest


def make_learner(config: RunConfig) -> Learner:
    return Learner(config, receiver_ranks=1, transport="rollmatch_gloo", device=torch.device("cpu"))


def scripted_rollouts(
    requests: Sequence[RolloutRequest], samples: Sequence[Sample], encoder: PromptEncoder, responses: Sequence[Sequence[int]], *, version: int = 0
) -> list[Rollout]:
    """Rollouts with these responses, as an engine would report them but for the log-probabilities."""
    return [
        Rollout(
            step=request.step,
            position=request.position,
            sample_id=request.sample_id,
            prompt_token_ids=encoder.encode(sample).token_ids,
            response_token_ids=tuple(response),
            stop_token_id=None,
            logprobs=None,
            stop_token_logprob=None,
            finish_reason=FinishReason.LENGTH,
            forced_positions=(),
            weight_version=version,
            actor="scripted",
            attempt=0,
            seed=request.seed,
            generate_s=0.0,
        )
        for request, sample, response in zip(requests, samples, responses, strict=True)
    ]
