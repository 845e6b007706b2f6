"""The sampling arguments of `vf-eval`, as the client of the OpenAI API takes them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from openai.resources.chat.completions import AsyncCompletions as AsyncChats
from openai.resources.completions import AsyncCompletions

from shared.errors import ConfigError

_SAID_ELSEWHERE = {
    "model": "-m names it",
    "messages": "the environment says them",
    "prompt": "the environment says it",
    "tools": "the environment brings them",
    "functions": "the environment brings tools",
    "stream": "a rollout needs whole answers",
    "stream_options": "a rollout needs whole answers",
}


def sampling_of(sampling: Mapping[str, Any], message_type: str) -> dict[str, Any]:
    """What every call is sent. ConfigError with every name that the calls would fail of, one rollout after the other."""
    create = AsyncCompletions.create if message_type == "completion" else AsyncChats.create
    known = [name for name in inspect.signature(create).parameters if name != "self"]
    problems = []
    for name, value in sampling.items():
        if name in _SAID_ELSEWHERE:
            problems.append(f"-S: {name} is not for -S to say: {_SAID_ELSEWHERE[name]}; leave it out")
        elif name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            beyond = json.dumps({"extra_body": {name: value}}, ensure_ascii=False)
            problems.append(f"-S: {name} is no argument of OpenAI's API{meant}; what the endpoint has beyond it goes into extra_body: -S '{beyond}'")
    if sampling.get("n") not in (None, 1):
        problems.append(f"-S: n is {sampling['n']!r}, and a rollout takes one answer; leave it out, -r says how many rollouts there are of an example")
    if not isinstance(sampling.get("extra_body") or {}, Mapping):
        problems.append(f'-S: extra_body is {sampling["extra_body"]!r}, not an object; write it like {{"top_k": 20}}')
    if problems:
        raise ConfigError(problems)
    # There it is their number.
    counts = message_type == "completion" and sampling.get("logprobs") is True
    return {**sampling, "logprobs": 1} if counts else dict(sampling)
