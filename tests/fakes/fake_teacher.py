"""A teacher that scores prompts by a rule, over the route of `vllm serve` and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


def scripted_logprob(token_ids: Sequence[int]) -> float:
    """The log-probability of the last of these tokens behind the others."""
    return -(1 + sum(token_ids) % 97) / 16


@dataclass
class FakeTeacher:
    """Serves `model`, and knows its tokens' texts by `tokenizer`."""

    tokenizer: Any
    model: str = "teacher"
    max_model_len: int | None = 4096
    key: str | None = None
    """The one that is asked for."""
    troubles: list[int] = field(default_factory=list)
    """Statuses of the next answers; 0: none for an hour."""
    loads: int = 0
    """So many of the next questions for its models it is still loading."""
    changes: dict[int, float | None] = field(default_factory=dict)
    """Log-probabilities by the place in the prompt; None: there is none."""
    scores: bool = True
    meets: int = 1
    """Answers wait until this many calls are under way at once."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of the calls for log-probabilities."""
    most_under_way: int = 0
    _under_way: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def check(request: Request, call_next: Any) -> Any:
            key = request.headers.get("authorization")
            if self.key is not None and key != f"Bearer {self.key}":
                return refusal(401, "Unauthorized")
            return await call_next(request)

        app.get("/v1/models")(self.models)
        app.post("/v1/completions")(self.complete)
        return app

    def models(self) -> Any:
        if self.loads:
            self.loads -= 1
            return refusal(503, "loading")
        return {"data": [{"id": self.model, "max_model_len": self.max_model_len}]}

    async def complete(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            await asyncio.sleep(0.01)
            async with asyncio.timeout(240):
                while self.most_under_way < self.meets:
                    await asyncio.sleep(0.001)
            if self.troubles:
                status = self.troubles.pop(0)
                if status:
                    return refusal(status, "no such luck")
                await asyncio.sleep(3600)
            return self._answer(body["prompt"])
        finally:
            self._under_way -= 1

    def _answer(self, prompt: list[int]) -> Any:
        if max(prompt) >= len(self.tokenizer):
            return refusal(400, f"Token id {max(prompt)} is out of vocabulary")
        entries: list[Any] = [None]
        for place in range(1, len(prompt)):
            logprob = self.changes.get(place, scripted_logprob(prompt[: place + 1]))
            text = self.tokenizer.decode([prompt[place]])
            entry = {prompt[place]: {"logprob": logprob, "rank": 1, "decoded_token": text}}
            entries.append(None if logprob is None else entry)
        answer = {"index": 0, "text": "x", "prompt_logprobs": entries if self.scores else None}
        return {"object": "text_completion", "choices": [answer]}


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status)
