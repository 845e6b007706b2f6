"""Conversion of requests and answers to and from vLLM's types, for `AsyncLLM` and `LLM`."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams, TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from rollout_actors.engine.completion import Completion
from rollout_actors.engine.sampling import (
    PROBE_FIELDS,
    decode_images,
    finish_reason,
    sampling_fields,
)
from shared.errors import RolloutError
from shared.records import ImageRef
from shared.rollouts import DecodeSettings, RolloutRequest
from shared.weight_sync.canary import CanaryProbe


def request_prompt(request: RolloutRequest, actor: str) -> TokensPrompt:
    """Build the prompt that vLLM takes for this request.

    Raises RolloutError that names the sample if an image cannot be decoded.
    """
    return _prompt(request.prompt_token_ids, request.images, request.sample_id, actor)


def probe_prompt(probe: CanaryProbe, actor: str) -> TokensPrompt:
    return _prompt(probe.token_ids, probe.images, "canary", actor)


def _prompt(
    token_ids: Sequence[int], refs: Sequence[ImageRef], sample_id: str, actor: str
) -> TokensPrompt:
    # One placeholder per image, which vLLM expands. It would also expand expanded ids again.
    prompt = TokensPrompt(prompt_token_ids=list(token_ids))
    images = decode_images(refs, sample_id, actor=actor)
    if images:
        prompt["multi_modal_data"] = {"image": images}
    return prompt


def sampling_params(decode: DecodeSettings, seed: int) -> SamplingParams:
    # FINAL_ONLY: partial answers are not read.
    return SamplingParams(**sampling_fields(decode, seed), output_kind=RequestOutputKind.FINAL_ONLY)


def probe_params() -> SamplingParams:
    return SamplingParams(**PROBE_FIELDS, output_kind=RequestOutputKind.FINAL_ONLY)


def probe_scores(output: RequestOutput) -> tuple[list[int], list[float]]:
    """Return the canary prompt's token ids, and the log-probability of each except the first.

    The token ids have expanded image placeholders.
    """
    assert output.prompt_token_ids is not None
    assert output.prompt_logprobs is not None
    token_ids = list(output.prompt_token_ids)
    scores = []
    # The first token has no entry, because no token before it could predict it.
    for entry, token_id in zip(output.prompt_logprobs, token_ids, strict=True):
        if entry is not None:
            scores.append(entry[token_id].logprob)
    return token_ids, scores


def to_completion(
    output: RequestOutput, request: RolloutRequest, *, actor: str, version: int
) -> Completion:
    """Convert vLLM's finished answer to a `Completion`.

    Raises RolloutError if it is incomplete, or was sampled with other weights than `version`.
    """
    (completion,) = output.outputs
    reason = finish_reason(completion.finish_reason, request, actor)
    # vLLM's own record by token span. It shows whether a sync happened within an answer.
    versions = {span.version for span in completion.weight_versions or ()}
    if versions - {str(version)}:
        raise RolloutError(
            f"sample {request.sample_id} was sampled by weights {sorted(versions)};"
            f" expected only version {version}. A weight sync must not happen during an answer:"
            " this is a bug, report it with error.txt",
            actor=actor,
            phase="generate",
        )
    logprobs = None
    if completion.logprobs is not None:
        logprobs = [
            entry[token_id].logprob
            for entry, token_id in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
    assert output.prompt_token_ids is not None
    return Completion(tuple(output.prompt_token_ids), completion.token_ids, logprobs, reason)
