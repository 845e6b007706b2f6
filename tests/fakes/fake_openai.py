"""An endpoint that speaks the OpenAI protocol by HTTP and answers as it is told, over no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


@dataclass
class FakeOpenAI:
    """Says what the last message says, unless `reply` says something else."""

    models: Sequence[str] | None = ("demo",)
    """None: it has no list of models."""
    reply: Callable[[str], str | int] = str
    """Of the last message: what is said, or the status of an error."""
    key: str | None = None
    """The one that is asked for."""
    delay_s: float = 0.0
    meets: int = 1
    """Nobody is answered before so many are under way at once."""
    answers: int | None = None
    """After so many, a call waits for ever."""
    counts_tokens: bool = True
    limit: str | None = None
    """The only name under which it takes the limit of new tokens; None: any."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of the calls for an answer."""
    most_under_way: int = 0
    _under_way: int = 0
    _have_met: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def check(request: Request, call_next: Any) -> Any:
            if (
                self.key is not None
                and request.headers.get("authorization") != f"Bearer {self.key}"
            ):
                return JSONResponse({"error": {"message": "wrong key"}}, 401)
            return await call_next(request)

        app.get("/v1/models")(self.list)
        app.post("/v1/chat/completions")(self.chat)
        return app

    @property
    def asked(self) -> list[str]:
        """The last message of each call."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def list(self) -> Any:
        if self.models is None:
            return JSONResponse({"error": {"message": "there is no such thing"}}, 404)
        return {
            "object": "list",
            "data": [
                {"id": name, "object": "model", "created": 0, "owned_by": "nobody"}
                for name in self.models
            ],
        }

    async def chat(self, request: Request) -> Any:
        body = await request.json()
        if self.models is not None and body["model"] not in self.models:
            return JSONResponse({"error": {"message": f"no model {body['model']}"}}, 404)
        self.bodies.append(body)
        number = len(self.bodies)
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        if self._under_way >= self.meets:
            self._have_met.set()
        try:
            return await self._answer(body, number)
        finally:
            self._under_way -= 1

    async def _answer(self, body: dict[str, Any], number: int) -> Any:
        await asyncio.wait_for(self._have_met.wait(), 60)
        await asyncio.sleep(self.delay_s)
        if self.answers is not None and number > self.answers:
            await asyncio.Event().wait()
        other = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}.get(
            self.limit or ""
        )
        if other in body:
            text = (
                f"Unsupported parameter: '{other}' is not supported with this model. Use"
                f" '{self.limit}' instead."
            )
            error = {
                "message": text,
                "type": "invalid_request_error",
                "param": other,
                "code": "unsupported_parameter",
            }
            return JSONResponse({"error": error}, 400)
        said = self.reply(body["messages"][-1]["content"])
        if isinstance(said, int):
            return JSONResponse({"error": {"message": f"refused with {said}"}}, said)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": said},
            "logprobs": None,
        }
        made: dict[str, Any] = {
            "id": "a",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
        }
        if self.counts_tokens:
            made["usage"] = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        if body.get("return_token_ids"):
            made["prompt_token_ids"], choice["token_ids"] = [1, 2], [3, 4]
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{token}", "logprob": -0.5, "top_logprobs": []}
                    for token in (3, 4)
                ]
            }
        return made
