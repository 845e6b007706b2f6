"""What `vf-eval` sends with every call."""

from __future__ import annotations

from typing import Any

import pytest

from launch.vf_eval.arguments import check_sampling
from shared.errors import ConfigError


def test_arguments_of_the_api_are_sent_as_they_are() -> None:
    given = {
        "temperature": 0.5,
        "max_tokens": 8,
        "n": 1,
        "seed": 3,
        "timeout": 20,
        "logprobs": True,
        "extra_body": {"top_k": 3},
    }
    assert check_sampling(given, "chat") == given


def test_the_log_probabilities_of_a_completion_are_asked_for_by_their_number() -> None:
    assert check_sampling({"logprobs": True}, "completion") == {"logprobs": 1}
    assert check_sampling({"logprobs": 5}, "completion") == {"logprobs": 5}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"top_k": 3},
            (
                "top_k is no argument of OpenAI's API (did you mean top_p?); what the endpoint has"
                " beyond it goes into extra_body: "
            ),
        ),
        ({"min_p": 0.1}, """-S '{"extra_body": {"min_p": 0.1}}'"""),
        (
            {"temprature": 0.5},
            "temprature is no argument of OpenAI's API (did you mean temperature?)",
        ),
        ({"self": 1}, "self is no argument"),
        ({"model": "other"}, "model is not for -S to say: -m names it"),
        ({"messages": []}, "messages is not for -S to say: the environment says them"),
        ({"tools": []}, "tools is not for -S to say: the environment brings them"),
        ({"stream": True}, "stream is not for -S to say: a rollout needs whole answers"),
        (
            {"n": 2},
            "n is 2, and a rollout takes one answer; leave it out, -r says how many rollouts",
        ),
        ({"extra_body": 3}, "extra_body is 3, not an object"),
    ],
)
def test_what_every_call_would_fail_of_is_refused_with_where_it_belongs(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sampling({"temperature": 0.5} | given, "chat")
    (problem,) = caught.value.problems
    assert said in problem


def test_all_of_it_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_sampling({"top_k": 3, "messages": [], "n": 4}, "completion")
    assert len(caught.value.problems) == 3
