"""A stock `vllm serve` that answers as it is told, over no engine."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

GENERATE = "/inference/v1/generate"


@dataclass
class StockServer:
    """The routes of vLLM 0.32, in the form in which a real one was seen to answer."""

    changes: dict[str, Any] = field(default_factory=dict)
    """Of the engine's configuration, by `part.name`."""
    label: str = "default"
    closed: dict[str, int] = field(default_factory=dict)
    """Routes that answer with this status instead."""
    choice: dict[str, Any] = field(default_factory=dict)
    """Fields of every choice that are other than they should be."""
    holds_guard: bool = True
    """Whether it was started with the repeat guard's processor."""
    guard: dict[str, Any] | None = None
    """The settings by which it guards."""
    latency_s: float = 0.0
    """Of a call for tokens, unless `goes_on` is set before."""
    goes_on: threading.Event = field(default_factory=threading.Event)
    worker_latency_s: float = 0.0
    guard_latency_s: float = 0.0
    """Of a question to its workers."""
    num_tokens: int | None = 0
    """Its counter of sampled tokens; None: it keeps none."""
    failures: int = 0
    """So many calls for tokens are answered with 500 first."""
    learners: list[float] = field(default_factory=list)
    """Log-probabilities of the canary that came behind the weights."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """Route and JSON of every call but the questions about the server's state."""

    def app(self) -> FastAPI:
        app = FastAPI(redirect_slashes=True)

        @app.middleware("http")
        async def close(request: Request, call_next: Any) -> Any:
            status = self.closed.get(request.url.path)
            if status is not None:
                return JSONResponse({"error": {"message": "closed"}}, status)
            return await call_next(request)

        app.get("/health")(lambda: Response())
        app.get("/is_paused")(lambda: {"is_paused": False})
        app.get("/get_world_size")(lambda: {"world_size": 1})
        app.get("/weight_info")(lambda: {"weight_version": self.label})
        app.get("/server_info")(self.info)
        app.get("/metrics")(self.metrics)
        app.add_api_route(GENERATE, self.generate, methods=["POST"])
        app.add_api_route("/{route}", self.other, methods=["POST"])
        return app

    def metrics(self) -> Response:
        lines = ["vllm:num_requests_running 3.0"]
        if self.num_tokens is not None:
            name = "vllm:generation_tokens_total"
            lines.append(f"# TYPE {name} counter")
            lines.append(f'{name}{{engine="0",model_name="a"}} {self.num_tokens}.0')
        return Response("\n".join(lines))

    def info(self) -> Any:
        images = {"limit_per_prompt": {"image": {"count": 1}, "video": {"count": 0}}}
        parts: dict[str, Any] = {
            "model_config": {
                "dtype": "torch.float32",
                "max_model_len": 64,
                "logprobs_mode": "processed_logprobs",
                "multimodal_config": images,
            },
            "scheduler_config": {"max_num_seqs": 8},
            "parallel_config": {
                "data_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "worker_extension_cls": "a.Worker",
            },
            "weight_transfer_config": {"backend": "rollmatch_gloo"},
        }
        for name, value in self.changes.items():
            part, _, key = name.partition(".")
            if key:
                parts[part][key] = value
            else:
                parts[part] = value
        return {"vllm_config": parts, "vllm_env": {}, "system_env": {}}

    async def generate(self, request: Request) -> Any:
        body = await request.json()
        if not body:
            return JSONResponse({"error": {"message": "token_ids: Field required"}}, 400)
        self.asked.append((GENERATE, body))
        until_s = time.monotonic() + self.latency_s
        while time.monotonic() < until_s and not self.goes_on.is_set():
            await asyncio.sleep(0.01)
        if self.failures:
            self.failures -= 1
            return JSONResponse({"error": {"message": "not now"}}, 500)
        expanded = [*body["token_ids"], 7]
        tokens: list[dict[str, Any]] = [
            {"token_id": token_id, "logprob": -token_id / 8, "rank": 1, "top_logprobs": []}
            for token_id in (3, 4, 9)
        ]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": 9,
            "token_ids": [3, 4, 9],
            "logprobs": {"content": tokens},
            "weight_versions": [{"version": self.label, "start": 0, "end": 3}],
        }
        scores: list[Any] | None = None
        if "prompt_logprobs" in body["sampling_params"]:
            score = {"logprob": -0.5, "rank": 1, "decoded_token": None}
            scores = [None, *({str(token_id): score} for token_id in expanded[1:])]
        return {
            "request_id": "a",
            "prompt_token_ids": expanded,
            "prompt_logprobs": scores,
            "choices": [choice | self.choice],
        }

    async def other(self, route: str, request: Request) -> Any:
        body = await request.json()
        if body.get("method") == "active_guard":
            await asyncio.sleep(self.worker_latency_s)
            return self.workers_guard
        query = f"?{request.url.query}" if request.url.query else ""
        self.asked.append((f"/{route}{query}", body))
        if route == "update_weight_version":
            self.label = body["new_version"]
        if body.get("method") == "guard_by":
            await asyncio.sleep(self.guard_latency_s)
            self.guard = body["args"][0] if self.holds_guard else None
            return self.workers_guard
        if body.get("method") == "load_report":
            names = {"missing": [], "unexpected": []}
            times = {"load_s": 0.0, "verify_s": 0.0}
            report = {"checksums": [5], "sent": [5], **names, **times, "logprobs": self.learners}
            return {"results": [report]}
        return {"results": [None]} if route == "collective_rpc" else {"success": True}

    @property
    def workers_guard(self) -> dict[str, Any]:
        guard = {"runner": "V1", "is_loaded": self.holds_guard, "settings": self.guard}
        return {"results": [guard]}

    @property
    def routes(self) -> list[str]:
        return [f"{route} {body.get('method', '')}".rstrip() for route, body in self.asked]
