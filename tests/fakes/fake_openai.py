"""An endpoint that speaks the OpenAI protocol by HTTP and answers as it is told, over no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from scripted_client import Answer, Call, chat_response


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
            key = request.headers.get("authorization")
            if self.key is not None and key != f"Bearer {self.key}":
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
        model = {"object": "model", "created": 0, "owned_by": "nobody"}
        return {"object": "list", "data": [{"id": name} | model for name in self.models]}

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
        await asyncio.wait_for(self._have_met.wait(), 240)
        await asyncio.sleep(self.delay_s)
        if self.answers is not None and number > self.answers:
            await asyncio.Event().wait()
        names = ["max_tokens", "max_completion_tokens"]
        other = names[1 - names.index(self.limit)] if self.limit else None
        if other in body:
            text = (
                f"Unsupported parameter: '{other}' is not supported with this model. Use"
                f" '{self.limit}' instead."
            )
            return JSONResponse({"error": {"message": text}}, 400)
        reply = self.reply(body["messages"][-1]["content"])
        if isinstance(reply, int):
            return JSONResponse({"error": {"message": f"refused with {reply}"}}, reply)
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        fields = {"usage": usage} if self.counts_tokens else {}
        answer = Answer(reply, prompt_ids=[1, 2], completion_ids=[3, 4], fields=fields)
        call = Call(number, body["model"], body["messages"], {})
        returns_tokens = bool(body.get("return_token_ids"))
        return chat_response(call, answer, returns_tokens).model_dump()
