"""Rubrics that score an answer by asking another model, or by comparing it as mathematics."""

from __future__ import annotations

import re
from collections.abc import Sequence

import openai

from rollout_actors.environments.answers.parsers import (
    MaybeThinkParser,
    Parser,
    extract_boxed_answer,
    text_of,
)
from rollout_actors.environments.clients.openai import OVERLONG, ask
from rollout_actors.environments.rewards import RewardFunction
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.scope import bind_client
from rollout_actors.environments.types import Client, Messages, SamplingArgs, State

JUDGE_PROMPT = """\
A question, its true answer and a response are given. Is the response correct?

Question: {question}

True answer: {answer}

Response: {response}

Say "yes" or "no", and nothing else."""


class JudgeRubric(Rubric):
    """A rubric whose reward functions may call another model, by their argument `judge`.

    Example: with `async def right(judge, prompt, completion, answer, state, **kwargs): return "yes"
    in await judge(prompt, completion, answer, state, **kwargs)` as its function, the reward is 1 if
    the judge says yes.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunction] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        judge_client: Client | None = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: SamplingArgs | None = None,
        judge_prompt: str = JUDGE_PROMPT,
    ) -> None:
        """
        Args:
            judge_client: an asynchronous client; None: `openai.AsyncOpenAI()`, which reads its URL
                and key from the variables `OPENAI_BASE_URL` and `OPENAI_API_KEY`.
            judge_prompt: a text with `{question}` (the prompt's last message), `{answer}` and
                `{response}` (the answer that the parser finds).

        Raises openai.OpenAIError if there is neither a client nor a key.
        """
        super().__init__(funcs, weights, parser)
        self.judge_client = openai.AsyncOpenAI() if judge_client is None else judge_client
        self.judge_model = judge_model
        self.judge_sampling_args = dict(judge_sampling_args or {})
        self.judge_prompt = judge_prompt
        names = ("judge", "judge_client", "judge_model", "judge_sampling_args", "judge_prompt")
        self.class_objects |= {name: getattr(self, name) for name in names}

    async def judge(
        self,
        prompt: Messages,
        completion: Messages,
        answer: object,
        state: State | None = None,
        **kwargs: object,  # noqa: ARG002
    ) -> str:
        """Ask the judge model about a rollout's answer, and return its response.

        Args:
            state: the rollout's state. It keeps responses, so that the same question is sent only
                once; None: every question is sent.
            kwargs: other arguments of a reward function; not used.

        Raises:
            ValueError: the question is too long for the judge model.
            Exception: an error of the model call. Then the reward function has no value.
        """
        question = prompt if isinstance(prompt, str) else text_of(prompt[-1])
        response = self.current_parser.parse_answer(completion)
        texts = {"question": question, "answer": str(answer), "response": response}
        # Not `format`, because a prompt may contain JSON, and a response may contain braces.
        asked = re.sub(
            r"\{(question|answer|response)\}",
            lambda blank: str(texts[blank[1]]),
            self.judge_prompt,
        )
        said: dict[str, str] = {} if state is None else state.setdefault("judge_response", {})
        if asked not in said:
            verdict = await ask(
                bind_client(self.judge_client),
                self.judge_model,
                [{"role": "user", "content": asked}],
                message_type="chat",
                tools=None,
                sampling_args=self.judge_sampling_args,
            )
            if verdict.id == OVERLONG:
                raise ValueError("judge: the prompt is too long; shorten judge_prompt")
            said[asked] = verdict.choices[0].message.content or ""
        return said[asked]


class MathRubric(Rubric):
    r"""A rubric that rewards an answer that mathematically equals the answer in the dataset row.

    Its reward function `correct_answer` compares them by the package `math_verify` (extra `math`):
    `0.5`, `1/2` and `\frac{1}{2}` are one number. The package's time limits do not work in threads,
    so `scoring_timeout_s` is the limit here.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunction] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
    ) -> None:
        r"""Add the reward function `correct_answer`, with weight 1, after `funcs`.

        `parser`: finds the answer; None: it is the last `\boxed{...}` after the thought, or all
        text after the thought.

        Raises ImportError if `math_verify` is not installed.
        """
        try:
            import math_verify  # imports sympy
        except ImportError as error:
            remedy = "pip install 'rollmatch[math]'"
            raise ImportError(f"MathRubric needs math_verify ({error}); {remedy}") from error
        super().__init__(funcs, weights, parser or MaybeThinkParser(extract_boxed_answer))
        self._library = math_verify
        self.add_reward_func(self.correct_answer)

    def correct_answer(self, parser: Parser, completion: Messages, answer: object) -> float:
        said = parser.parse_answer(completion)
        if said is None or said == "":
            return 0.0
        truth, response = (
            self._library.parse(rf"\boxed{{{text}}}", parsing_timeout=None)
            for text in (answer, said)
        )
        return float(self._library.verify(truth, response, timeout_seconds=None))
