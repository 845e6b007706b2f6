"""What tests of the learner share: a learner in this process, and rollouts nobody had to generate."""

from __future__ import annotations

from collections.abc import Sequence

from learner.learner import Learner
from learner.model.ranks import LearnerPlace, ReceiverGroup
from learner.segments import EncodedPrompt
from learner.targets import ground_truth_target
from shared.config import RunConfig
from shared.metrics import StepReport, merge_reports
from shared.rollouts import FinishReason, Rollout, RolloutRequest
from shared.schedule import StepPlan
from shared.weight_sync.transports import Transport


def make_learner(config: RunConfig) -> Learner:
    return Learner(config, LearnerPlace(Transport.GLOO, (ReceiverGroup(1),)))


def half_right(learner: Learner, plan: StepPlan) -> list[Rollout]:
    """Begin a step and answer its requests without an engine: each response is the first half of the ground truth's text."""
    requests = learner.next_requests(plan)
    samples = [learner.steps[-1].work.sample(request.position) for request in requests]
    responses = [ground_truth_target(sample, learner.loaded.codec, learner.algorithms.base.rules).token_ids for sample in samples]
    prompts = map(learner.algorithms.base.encoder.encode, samples)
    return [answer(request, prompt, response[: len(response) // 2]) for request, prompt, response in zip(requests, prompts, responses, strict=True)]


def finish_step(learner: Learner) -> StepReport:
    """The step as its only rank reports it."""
    return merge_reports([learner.finish_step()])


def answer(request: RolloutRequest, prompt: EncodedPrompt, response: Sequence[int], *, logprobs: Sequence[float] | None = None) -> Rollout:
    """What an engine with the first weights would have returned for a request, cut off at the length limit."""
    return Rollout(
        step=request.step,
        position=request.position,
        sample_id=request.sample_id,
        prompt_token_ids=prompt.token_ids,
        response_token_ids=tuple(response),
        stop_token_id=None,
        logprobs=None if logprobs is None else tuple(logprobs),
        stop_token_logprob=None,
        finish_reason=FinishReason.LENGTH,
        forced_positions=(),
        weight_version=0,
        actor="nobody",
        attempt=0,
        seed=request.seed,
        generate_s=0.0,
    )
