"""What a call may ask of an engine whose decoding the run has fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.rollouts import DecodeSettings

READ_ANYWAY = frozenset({"logprobs", "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs"})
"""Ask for tokens and log-probabilities. Every answer has them but the prompt's, which nothing reads."""
LIMITS = ("max_tokens", "max_completion_tokens")


class CallArguments:
    """Checks the sampling arguments of calls against what the run has fixed."""

    def __init__(self, decode: DecodeSettings, template_args: Mapping[str, Any]) -> None:
        self._decode = decode
        self._fixed: dict[str, Any] = {
            "temperature": decode.temperature,
            "top_p": decode.top_p,
            "top_k": decode.top_k,
            "repetition_penalty": decode.repetition_penalty,
            "stop_token_ids": sorted(decode.stop_token_ids),
            "chat_template_kwargs": dict(template_args),
            "n": 1,
            "stream": False,
            "stop": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "min_p": 0,
            "top_logprobs": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0,
        }

    def max_tokens(self, arguments: Mapping[str, Any]) -> int:
        """Most tokens that a call with these arguments may sample. What is None is not given.

        Raises ValueError for what the run has fixed otherwise, and for what is unknown.
        """
        body = arguments.get("extra_body") or {}
        given = {name: value for name, value in {**arguments, **body}.items() if value is not None and name != "extra_body"}
        limit = self._decode.max_new_tokens
        for name, value in given.items():
            if name in LIMITS:
                limit = self._limit(name, value, limit)
            elif name == "seed":
                raise ValueError("seed: the engines' own follow from the run's seed, the step, the rollout's place in it and the turn; leave it out")
            elif name in self._fixed:
                self._agree(name, value)
            elif name not in READ_ANYWAY:
                known = ", ".join(sorted({*self._fixed, *LIMITS, *READ_ANYWAY}))
                raise ValueError(f"{name}: the engines of a run take no such sampling argument; leave it out. They know {known}")
        if given.get("logprobs") and not self._decode.return_logprobs:
            raise ValueError("logprobs: were asked for, and this run's decoding returns none (return_logprobs); leave them out, or switch them on")
        return limit

    def _limit(self, name: str, value: Any, limit: int) -> int:
        most = self._decode.max_new_tokens
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name}: must be a whole number from 1 to the run's max_new_tokens = {most}, got {value!r}")
        return min(limit, value)

    def _agree(self, name: str, value: Any) -> None:
        fixed = self._fixed[name]
        if name == "stop_token_ids":
            value = sorted(value)
        if value != fixed:
            raise ValueError(f"{name}: {value!r} was asked for, and this run has {fixed!r}; leave it out, or change what the run has")
