"""The teacher of on-policy distillation: a model on a server that scores the student's tokens.

It is called over `/v1/completions` of a stock `vllm serve` (vLLM 0.32), with token ids as prompt
and `prompt_logprobs`. These log-probabilities are at temperature 1, over the whole vocabulary. They
are added to the examples before the examples are sent to the learner, and so to the log of
rollouts: a resumed or replayed step does not call the teacher.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeVar

from pydantic import BaseModel

from rollout_actors.backends.http import (
    POLL_S,
    STILL_LOADING,
    HttpClient,
    HttpStatusError,
    LateError,
    ServerAddress,
    UnansweredError,
    all_answers,
    token_in,
)
from rollout_actors.backends.stock_messages import NO_LOGPROB
from shared.config.algorithm import TeacherSection
from shared.errors import UnreachableError
from shared.rollouts import TRIES
from shared.trajectory import TrainingExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_M = TypeVar("_M", bound=BaseModel)

SECTION = "environment.teacher"
MODELS = "/v1/models"
COMPLETIONS = "/v1/completions"
NUM_PROBED = 1000
"""Number of token ids whose texts in teacher and student are compared before the first rollout."""
ROUNDING = 1e-3
"""Largest value above 0 that is accepted as a log-probability, as a rounding error."""
_KEY_REMEDY = f"name the variable that holds its key in {SECTION}.token_env"
_REMEDY = "serve the teacher by `vllm serve` of vLLM 0.32"


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """The address of the teacher's server, and the name of the teacher model there."""

    model: str
    address: ServerAddress

    @classmethod
    def from_section(cls, section: TeacherSection) -> Self:
        """Make the settings from the configuration's section `teacher`.

        The bearer token is read from an environment variable. Raises ConfigError if it is not set.
        """
        token = token_in(section.token_env, f"{SECTION}.token_env")
        # Every call has a limit, whatever kind of server it is.
        limit_s = section.timeout_s
        return cls(
            section.model,
            ServerAddress(SECTION, section.base_url, limit_s, limit_s, "vllm", token),
        )


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    data: list[_Model]


class _PromptToken(BaseModel):
    logprob: float
    decoded_token: str | None = None


class _Choice(BaseModel):
    prompt_logprobs: list[dict[int, _PromptToken] | None] | None = None


class _Completion(BaseModel):
    choices: tuple[_Choice]


class Teacher:
    """The client of the teacher model's server, which computes log-probabilities of sampled tokens.

    Its errors are RolloutErrors that name the teacher, its URL and the key.
    """

    def __init__(self, settings: TeacherSettings, *, max_under_way: int) -> None:
        """`max_under_way`: limit of concurrent HTTP calls of one `score`."""
        self._model = settings.model
        self._http = HttpClient("teacher", settings.address)
        self._max_under_way = max_under_way

    async def require_suitable(self, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        """Wait until the teacher's server is ready, and check that it can score the run's tokens.

        Args:
            tokenizer: the run's tokenizer. Its token ids must have the same texts in the teacher.
            longest: maximum number of tokens of a training example.

        Raises:
            UnreachableError: the server does not answer.
            RolloutError: the teacher has another vocabulary or accepts too few tokens, or the
                server serves another model.
        """
        models = self._read(_Models, await self._wait_until_up(), "start")
        model = next((one for one in models.data if one.id == self._model), None)
        if model is None:
            served = ", ".join(one.id for one in models.data) or "nothing"
            why = f"serves {served}, but {SECTION}.model is {self._model}; write one of its names"
            raise self._http.error(why, "start")
        # It must sample one token after the tokens that it scores.
        if model.max_model_len is not None and model.max_model_len <= longest:
            why = (
                f"accepts {model.max_model_len} tokens, but needs global_max_length {longest} and 1"
            )
            remedy = (
                f"start it with --max-model-len {longest + 1}, or lower global_max_length to"
                f" {model.max_model_len - 1}"
            )
            raise self._http.error(f"{why} more, which it samples; {remedy}", "start")
        await self._require_vocabulary(tokenizer, model.max_model_len or longest)

    async def score(self, examples: Sequence[TrainingExample]) -> list[TrainingExample]:
        """Return the training examples with the teacher's log-probabilities, in order.

        They are in `teacher_logprobs`. Raises RolloutError.
        """
        slots = asyncio.Semaphore(self._max_under_way)

        async def scored(example: TrainingExample) -> TrainingExample:
            learned = [index for index, is_learned in enumerate(example.mask) if is_learned]
            logprobs = [0.0] * len(example.token_ids)
            if learned:
                async with slots:
                    # Tokens after the last trained one are not needed.
                    tokens = await self._ask(example.token_ids[: learned[-1] + 1], "score")
                for index in learned:
                    token = tokens[index]
                    logprob = NO_LOGPROB if token is None else token.logprob
                    if not (math.isfinite(logprob) and NO_LOGPROB < logprob <= ROUNDING):
                        raise self._http.error(
                            f"gave token {index} of example {example.example_id!r} the"
                            f" log-probability {logprob:g}, which is invalid; serve it with"
                            " --logprobs-mode raw_logprobs, and check its weights",
                            "score",
                        )
                    logprobs[index] = logprob
            return replace(example, teacher_logprobs=logprobs)

        return await all_answers([scored(example) for example in examples])

    async def _require_vocabulary(
        self, tokenizer: PreTrainedTokenizerBase, max_model_len: int
    ) -> None:
        size = len(tokenizer)
        # Room for the first id twice, the last id, and the sampled token.
        count = max(1, min(size, NUM_PROBED, max_model_len - 3))
        spread = dict.fromkeys([*(size * index // count for index in range(count)), size - 1])
        # The first token of a prompt has no entry.
        token_ids = [0, *spread]
        tokens = await self._ask(token_ids, "start")
        for token_id, token in zip(token_ids[1:], tokens[1:], strict=True):
            ours = tokenizer.decode([token_id])
            theirs = None if token is None else token.decoded_token
            # The text of half a character depends on the tokens before it.
            if theirs != ours and "�" not in ours:
                raise self._http.error(
                    f"reads token id {token_id} as {theirs!r}, but model.path as {ours!r}: a"
                    " teacher needs the student's vocabulary; serve a model of the same family",
                    "start",
                )

    async def _wait_until_up(self) -> bytes:
        limit_s = self._http.address.timeout_s
        remedy = (
            f"check that it runs, that {SECTION}.base_url is its address without /v1, and that no"
            " firewall blocks it"
        )
        deadline = time.monotonic() + limit_s
        while True:
            try:
                left_s = max(POLL_S, deadline - time.monotonic())
                return await self._http.get(MODELS, timeout_s=left_s)
            except UnansweredError as error:
                last = str(error)
            except HttpStatusError as error:
                if error.status not in STILL_LOADING:
                    if error.status == 401:
                        remedy = _KEY_REMEDY
                    why = f"answers {MODELS} with {error}; {remedy}"
                    raise self._http.error(why, "start") from error
                last = str(error)
            if time.monotonic() + POLL_S >= deadline:
                limit = f"{SECTION}.timeout_s = {limit_s:g} s"
                message = self._http.with_url(f"was not ready within {limit} (last: {last})")
                raise UnreachableError(f"{message}; {remedy}", actor="teacher", phase="start")
            await asyncio.sleep(POLL_S)

    async def _ask(self, token_ids: Sequence[int], phase: str) -> list[_PromptToken | None]:
        """Return what the teacher reports for each token; None for the first.

        A failed call is repeated once. If the server cannot be reached or is loading, the call is
        repeated until `timeout_s` is over, so that a restarted teacher does not end the run. All
        calls together take at most `TRIES` times `timeout_s`.
        """
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        content = json.dumps(body).encode()
        limit_s = self._http.address.timeout_s
        limit = f"{SECTION}.timeout_s = {limit_s:g} s"
        deadline = time.monotonic() + limit_s
        num_tries = 0
        while True:
            num_tries += 1
            try:
                answer = await self._http.post(COMPLETIONS, content, timeout_s=limit_s)
            except HttpStatusError as error:
                if error.status < 500:
                    remedy = f"check that {SECTION}.model has the vocabulary of model.path"
                    if error.status == 401:
                        remedy = _KEY_REMEDY
                    why = f"refused {len(token_ids)} token ids: {error}; {remedy}"
                    raise self._http.error(why, phase) from error
                is_away = error.status in STILL_LOADING
                last: Exception = error
            except UnansweredError as error:
                is_away = not isinstance(error, LateError)
                last = error
            else:
                return self._prompt_tokens(answer, token_ids, phase)
            is_over = time.monotonic() + POLL_S >= deadline
            if num_tries >= TRIES and (is_over or not is_away):
                break
            await asyncio.sleep(POLL_S)
        why = f"failed {num_tries} times, last with: {last}; check the teacher's output"
        if isinstance(last, LateError):
            why += f", and that one answer fits into {limit}"
        elif is_away:
            why = f"could not be reached for {limit} (last: {last})"
            why += "; read in its output why it ended, and start it again"
        raise self._http.error(why, phase) from last

    def _prompt_tokens(
        self, answer: bytes, token_ids: Sequence[int], phase: str
    ) -> list[_PromptToken | None]:
        (choice,) = self._read(_Completion, answer, phase).choices
        entries = choice.prompt_logprobs
        if entries is None or len(entries) != len(token_ids):
            found = "no" if entries is None else str(len(entries))
            why = f"returned {found} log-probabilities for {len(token_ids)} tokens"
            raise self._http.error(f"{why}; {_REMEDY}", phase)
        return [
            None if entry is None else entry.get(token_id)
            for entry, token_id in zip(entries, token_ids, strict=True)
        ]

    def _read(self, form: type[_M], body: bytes, phase: str) -> _M:
        try:
            return form.model_validate_json(body)
        except ValueError as error:
            raise self._http.error(f"sent another answer: {error}; {_REMEDY}", phase) from error
