"""Generation of rollouts with the learner's own model (`rollout_backend: hf`): no sync, but slow.

Shape legend: B sequences (or beams) of one call, P prompt tokens (image placeholders expanded,
padded on the left), L tokens so far, T response tokens, V vocabulary, K candidates.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rollout_actors.backends.calls import EngineCalls
from rollout_actors.backends.process_isolation import random_state_kept
from rollout_actors.engine.completion import Completion, EngineInfo, StartTime, cut_behind_stop
from rollout_actors.engine.sampling import BAN, PromptInputs, encode_prompt
from rollout_actors.repeat_guard.hf import HFRepeatGuard
from rollout_actors.repeat_guard.rule import repeat_rule
from shared.errors import RolloutError
from shared.protocols import BackendHost
from shared.rollouts import (
    DecodeMode,
    DecodeSettings,
    FinishReason,
    Rollout,
    RolloutRequest,
    SyncReport,
    WeightOffer,
)
from shared.tokens.pictures import pictures_of
from shared.tokens.repeat_guard import RepeatGuardSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.generation.utils import (
        GenerateBeamDecoderOnlyOutput,
        GenerateDecoderOnlyOutput,
    )

NO_STOP_TOKEN = -1
"""Id that no token has. It is the only stop token of a request without stop tokens.

Without any stop token, transformers would use the checkpoint's stop tokens.
"""


class StopCheck(LogitsProcessor):
    """A logits processor that ends `generate` before its next token when the run is ending."""

    def __init__(self, raise_if_stopping: Callable[[], None]) -> None:
        self._raise_if_stopping = raise_if_stopping

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._raise_if_stopping()
        return scores


class StopTexts(StoppingCriteria):
    """Ends an answer when it contains a stop text. One object serves one call of `generate`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], *, prompt_length: int
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._prompt_length = prompt_length
        # A token has at least one byte, so a stop text of n bytes lies within n tokens. Three more,
        # because the first character of the window may be incomplete.
        self._window = max((len(text.encode()) for text in stop), default=0) + 3
        self.lengths: dict[int, int] = {}
        """For each ended row of the batch, the number of tokens up to the end of the stop text."""

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        """Return bool [B]: whether the answer in each row of `input_ids`, [B, L], has ended."""
        if self._stop:
            tokens_BT = input_ids[:, self._prompt_length :]
            for row, token_ids in enumerate(tokens_BT[:, -self._window :].tolist()):
                if row not in self.lengths and self._ends(token_ids):
                    self.lengths[row] = tokens_BT.shape[1]
        ended = [row in self.lengths for row in range(len(input_ids))]
        return torch.tensor(ended, device=input_ids.device)

    def _ends(self, token_ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in text for stop in self._stop)

    def cut(self, row: int, answer: Completion) -> Completion:
        """Return the answer of one row of the batch, cut after its first stop text.

        An answer that ended earlier, for example with a stop token, is returned unchanged.
        """
        length = self.lengths.get(row)
        if length is None or length > len(answer.token_ids):
            return answer
        if length == len(answer.token_ids) and answer.finish_reason is FinishReason.STOP:
            return answer
        logprobs = None if answer.logprobs is None else answer.logprobs[:length]
        return replace(
            answer,
            token_ids=answer.token_ids[:length],
            logprobs=logprobs,
            finish_reason=FinishReason.STOP,
        )


class SeenTokens:
    """The tokens of each prompt and its answer, to which the repetition penalty applies."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompts = prompts
        self._prompt_length = max(len(prompt) for prompt in prompts)

    def mask(self, ids_BL: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return bool [B, V]: whether each token of the vocabulary occurs in prompt or answer.

        Padding does not count. In a beam search each prompt has one row of the batch per beam.
        """
        mask_BV = torch.zeros(len(ids_BL), vocabulary, dtype=torch.bool, device=ids_BL.device)
        rows_per_prompt = len(ids_BL) // len(self._prompts)
        for row in range(len(ids_BL)):
            mask_BV[row, list(self._prompts[row // rows_per_prompt])] = True
        return mask_BV.scatter_(1, ids_BL[:, self._prompt_length :], True)


def processed_logits(
    logits_BV: torch.Tensor, decode: DecodeSettings, seen_BV: torch.Tensor | None
) -> torch.Tensor:
    """Return the fp32 logits after bans, repetition penalty, temperature, top-k and top-p.

    Does not change `logits_BV`. `seen_BV` marks the tokens in prompt and answer; None: no penalty.
    """
    # vLLM's order: bans, repetition penalty, temperature, top-k, top-p.
    logits_BV = logits_BV.float().clone()
    if decode.banned_token_ids:
        logits_BV[:, list(decode.banned_token_ids)] += BAN
    if seen_BV is not None:
        penalty = decode.repetition_penalty
        penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = torch.where(seen_BV, penalised_BV, logits_BV)
    if decode.mode is not DecodeMode.SAMPLE:
        return logits_BV
    logits_BV /= decode.temperature
    # 0 and -1 mean no limit, as in vLLM.
    if 0 < decode.top_k < logits_BV.shape[1]:
        smallest_B1 = logits_BV.topk(decode.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    if decode.top_p < 1.0:
        # Keep the smallest set whose probability is at least `top_p`, and always the most probable
        # token.
        ascending_BV, order_BV = logits_BV.sort(dim=-1)
        removed_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - decode.top_p
        removed_BV[:, -1] = False
        removed_BV = removed_BV.scatter(1, order_BV, removed_BV)
        logits_BV = logits_BV.masked_fill(removed_BV, -torch.inf)
    return logits_BV


def draw(logprobs_BV: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """Draw a random token for each sequence, from its log-probabilities. Return int64 [B].

    `uniforms` has a number in [0, 1) for each sequence. The drawn token is the first one whose
    cumulative probability exceeds this number.

    Example:
        probabilities 0.2, 0.5, 0.3 and `uniforms` 0.6 -> token 1
    """
    # In fp64, so that the sum over a large vocabulary is accurate enough.
    cumulated_BV = logprobs_BV.double().exp().cumsum(-1)
    total_B1 = cumulated_BV[:, -1:].contiguous()
    uniforms_B1 = torch.tensor(uniforms, dtype=torch.float64, device=logprobs_BV.device)[:, None]
    drawn_B1 = torch.searchsorted(cumulated_BV, uniforms_B1 * total_B1, right=True)
    # The product may round up to the total. Then use the last token with a nonzero probability.
    last_B1 = torch.searchsorted(cumulated_BV, total_B1)
    return torch.minimum(drawn_B1, last_B1)[:, 0]


class _LogprobProcessor(LogitsProcessor):
    """Base class of processors that apply decode settings and compute the log-probabilities."""

    def __init__(self, decode: DecodeSettings, prompts: Sequence[Sequence[int]]) -> None:
        self._decode = decode
        self._seen = None if decode.repetition_penalty == 1.0 else SeenTokens(prompts)

    def _logprobs(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen_BV = None if self._seen is None else self._seen.mask(input_ids, scores.shape[1])
        # After all settings, like vLLM's `processed_logprobs`.
        return processed_logits(scores, self._decode, seen_BV).log_softmax(-1)


class Chooser(_LogprobProcessor):
    """A logits processor that chooses each sequence's next token and keeps its log-probability.

    It chooses greedily, or randomly by a generator for each sequence with the request's seed. So
    results depend neither on other sequences nor on a global random state. All other tokens get the
    score minus infinity. It must be the last processor of `generate`.
    """

    def __init__(
        self, decode: DecodeSettings, seeds: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(decode, prompts)
        # One per row, so that the random numbers do not depend on the other rows of the batch.
        self._generators = [random.Random(seed) for seed in seeds]
        self._chosen: list[torch.Tensor] = []
        self.times: list[float] = []
        """When the tokens of each position were chosen, by `time.perf_counter`.

        On a GPU a time is up to one decoding step too early, because the device may still compute.
        """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logprobs_BV = self._logprobs(input_ids, scores)
        if self._decode.mode is DecodeMode.SAMPLE:
            chosen_B = draw(logprobs_BV, [generator.random() for generator in self._generators])
        else:
            chosen_B = logprobs_BV.argmax(-1)
        self._chosen.append(logprobs_BV.gather(1, chosen_B[:, None])[:, 0])
        self.times.append(time.perf_counter())
        # A greedy `generate` takes the only finite score of a row.
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen_B[:, None], 0.0)

    def logprobs(self) -> list[list[float]]:
        """Return [B][T]: log-probabilities of the chosen tokens, also after an answer's end."""
        return torch.stack(self._chosen, dim=1).tolist()


class BeamScores(_LogprobProcessor):
    """A logits processor for beam search that applies the request's settings.

    It keeps the log-probabilities of the likeliest next tokens of each beam.
    """

    # transformers passes log-probabilities, so a repetition penalty multiplies them for all seen
    # tokens. In vLLM it divides positive logits instead.

    def __init__(self, decode: DecodeSettings, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(decode, prompts)
        # The number that transformers' beam search keeps: some may be stop tokens, and the beams
        # that continue need others.
        self._num_candidates = max(2, 1 + len(decode.stop_token_ids)) * decode.num_beams
        self._candidates: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logprobs_BV = self._logprobs(input_ids, scores)
        logprobs_BK, ids_BK = logprobs_BV.topk(min(self._num_candidates, scores.shape[1]))
        self._candidates.append((ids_BK, logprobs_BK))
        return logprobs_BV

    def logprobs(self, beams: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a finished answer.

        `beams` has for each token the row of the batch to which the beam search added the token.
        """
        values = []
        for (ids_BK, logprobs_BK), beam, token_id in zip(
            self._candidates, beams, token_ids, strict=False
        ):
            (candidate,) = (ids_BK[beam] == token_id).nonzero()[0].tolist()
            values.append(float(logprobs_BK[beam, candidate]))
        return values


class HFBackend:
    """Generates rollouts with the model of a learner rank (`host`) by transformers' `generate`.

    The model may be in training mode or have an adapter. A response depends only on its request and
    seed. In fp32, padding of a prompt in a batch changes the log-probabilities only by the rounding
    of sums (under 1e-5).
    """

    def __init__(
        self,
        host: BackendHost,
        *,
        decode_batch_size: int,
        repeat_guard: RepeatGuardSettings | None = None,
    ) -> None:
        """`decode_batch_size`: largest number of sequences decoded at a time; each beam counts."""
        self._host = host
        self._name = host.name
        self._decode_batch_size = decode_batch_size
        self._rule = repeat_rule(repeat_guard, lambda: host.tokenizer)
        self._sees_images = host.processor is not host.tokenizer
        self._pictures = pictures_of(host.processor)
        # Padding is masked and answers are cut at their end, so any token is suitable.
        pads = (host.tokenizer.pad_token_id, host.tokenizer.eos_token_id, 0)
        self._pad_token_id = next(token_id for token_id in pads if token_id is not None)
        self.version = 0
        self._closed = False

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Generate one rollout per request, in order.

        Raises RolloutError if a request cannot be decoded. If the run is ending, the learner rank
        (`host`) raises an exception between two tokens.
        """
        if not requests:
            return []
        started = StartTime.now()
        rollouts: list[Rollout] = []
        with self._evaluating():
            for batch in self._batches(requests):
                rollouts += self._rollouts(batch, [started] * len(batch))
        return rollouts

    def serve(self, calls: EngineCalls, begin: Callable[[], None]) -> None:
        """Answer an environment's model calls in batches until the round of `calls` ends.

        `EngineCalls.take_together` decides which calls are decoded together. `begin` is called
        once, before the first batch.
        """
        with self._evaluating():
            begin()
            while together := calls.take_together(self._host.raise_if_stopping):
                waiting = iter(together)
                for batch in self._batches([call.request for call in together]):
                    of_batch = list(itertools.islice(waiting, len(batch)))
                    rollouts = self._rollouts(batch, [call.started for call in of_batch])
                    calls.answer(list(zip(of_batch, rollouts, strict=True)))

    def _rollouts(self, batch: list[RolloutRequest], started: Sequence[StartTime]) -> list[Rollout]:
        """Decode one batch; `started` has the arrival time of each request."""
        pictures = self._pictures if self._sees_images else None
        encoded = [encode_prompt(request, pictures, actor=self._name) for request in batch]
        return [
            answer.rollout(request, EngineInfo(self._name, self.version, self._rule, start), end)
            for request, start, (answer, end) in zip(
                batch, started, self._decode(batch, encoded), strict=True
            )
        ]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        if self._closed:
            raise self._error("the backend was closed")
        with random_state_kept(), evaluating(self._host.model), torch.no_grad():
            yield

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Set the new weight version. The weights are the learner's own, so nothing is loaded."""
        # There is no transfer that a canary could check.
        self.version = offer.version
        return SyncReport(version=offer.version, bytes=0, phase_s={}, canary_max_abs=0.0)

    def close(self) -> None:
        self._closed = True

    def _error(self, message: str) -> RolloutError:
        return RolloutError(message, actor=self._name, phase="generate")

    def _batches(self, requests: Sequence[RolloutRequest]) -> Iterator[list[RolloutRequest]]:
        """Yield batches of requests with equal decode settings. A prompt's beams stay together."""
        for decode, group in groupby(requests, key=lambda request: request.decode):
            alike = list(group)
            width = decode.num_beams if decode.mode is DecodeMode.BEAM else 1
            size = self._decode_batch_size // width
            if not size:
                remedy = (
                    "lower rollout_matching.num_beams, or raise rollout_matching.decode_batch_size"
                )
                limit = f"a batch of {self._decode_batch_size} sequences"
                raise self._error(f"{width} beams do not fit into {limit}; {remedy}")
            yield from (alike[start : start + size] for start in range(0, len(alike), size))

    def _decode(
        self, batch: list[RolloutRequest], encoded: list[PromptInputs]
    ) -> list[tuple[Completion, float]]:
        """Return each answer with its end time by `time.perf_counter`."""
        decode = batch[0].decode
        prompts = [prompt.token_ids for prompt in encoded]
        inputs = self._inputs(encoded)
        prompt_length = inputs["input_ids"].shape[1]
        processors: list[LogitsProcessor] = [StopCheck(self._host.raise_if_stopping)]
        # Without a stop token the guard has nothing to force.
        if self._rule is not None and decode.stop_token_ids:
            stop = decode.stop_token_ids[0]
            processors.append(
                HFRepeatGuard(self._rule, prompt_length=prompt_length, stop_token_id=stop)
            )
        if decode.mode is DecodeMode.BEAM:
            beams = BeamScores(decode, prompts)
            output = self._generate(inputs, decode, [*processors, beams])
            end = time.perf_counter()
            answers = []
            for prompt, tokens, rows in zip(
                prompts,
                output.sequences[:, prompt_length:].tolist(),
                output.beam_indices.tolist(),
                strict=True,
            ):
                # A response is followed by padding, which no beam has chosen.
                response = cut_behind_stop(tokens, decode)
                logprobs = beams.logprobs(rows, response)
                answers.append(Completion.up_to_stop(prompt, response, logprobs, decode))
            return [(answer, end) for answer in answers]
        chooser = Chooser(decode, [request.seed for request in batch], prompts)
        texts = StopTexts(self._host.tokenizer, decode.stop, prompt_length=prompt_length)
        output = self._generate(inputs, decode, [*processors, chooser], texts)
        responses = output.sequences[:, prompt_length:].tolist()
        answers = [
            texts.cut(row, Completion.up_to_stop(prompt, response, logprobs, decode))
            for row, (prompt, response, logprobs) in enumerate(
                zip(prompts, responses, chooser.logprobs(), strict=True)
            )
        ]
        return [(answer, chooser.times[len(answer.token_ids) - 1]) for answer in answers]

    def _inputs(self, encoded: list[PromptInputs]) -> dict[str, torch.Tensor]:
        model = self._host.model
        length = max(len(prompt.token_ids) for prompt in encoded)
        shape = (len(encoded), length)
        ids_BP = torch.full(shape, self._pad_token_id, dtype=torch.int64)
        mask_BP = torch.zeros(shape, dtype=torch.int64)
        for row, prompt in enumerate(encoded):
            # Padded on the left, so that every row's next token follows its last position.
            begin = length - len(prompt.token_ids)
            ids_BP[row, begin:] = torch.tensor(prompt.token_ids)
            mask_BP[row, begin:] = 1
        inputs = {"input_ids": ids_BP, "attention_mask": mask_BP}
        if self._sees_images and self._pictures.takes_modality:
            inputs["mm_token_type_ids"] = (ids_BP == self._pictures.token_id).int()
        features = [prompt.features for prompt in encoded if prompt.features]
        # The model takes all images of the batch as one list, in the order of the prompts.
        if features:
            for name in features[0]:
                inputs[name] = torch.cat([one[name] for one in features])
            inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        return {name: tensor.to(model.device) for name, tensor in inputs.items()}

    def _generate(
        self,
        inputs: dict[str, torch.Tensor],
        decode: DecodeSettings,
        processors: list[LogitsProcessor],
        texts: StopTexts | None = None,
    ) -> GenerateDecoderOnlyOutput | GenerateBeamDecoderOnlyOutput:
        # `generate` takes values that are omitted here from the model's own configuration, which
        # was read from the checkpoint's generation_config.json. Engines do not use that file.
        self._host.model.generation_config = GenerationConfig()
        config = GenerationConfig(
            do_sample=False,
            num_beams=decode.num_beams if decode.mode is DecodeMode.BEAM else 1,
            num_return_sequences=1,
            max_new_tokens=decode.max_new_tokens,
            min_new_tokens=0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            length_penalty=decode.length_penalty,
            early_stopping=False,
            eos_token_id=list(decode.stop_token_ids) or [NO_STOP_TOKEN],
            pad_token_id=self._pad_token_id,
            use_cache=True,
            return_dict_in_generate=True,
        )
        try:
            return self._host.model.generate(
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList(processors),
                stopping_criteria=StoppingCriteriaList([texts] if decode.stop and texts else []),
            )
        except torch.OutOfMemoryError as error:
            raise self._error(
                f"{len(inputs['input_ids'])} sequences do not fit in memory with the learner's"
                f" training state ({error}); lower rollout_matching.decode_batch_size"
            ) from error


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode in the `with` block, then restore every module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
