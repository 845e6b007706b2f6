"""Episodes on a server of the package `openenv` (issue 21, point 12). `make foreign` installs it."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from environment_support import assistant, generated, user
from openenv_server import openenv_server
from scripted_client import ScriptedClient

from rollout_actors.environments.foreign.openenv import (
    Actions,
    ActionSchema,
    OpenEnvEpisode,
    Server,
    as_text,
)
from rollout_actors.environments.loading import load_environment

pytestmark = pytest.mark.slow
SESSIONS = 4
FORM = "Write your action, a text (whatever you like), as <action>ACTION</action>."


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with openenv_server(tmp_path_factory.mktemp("server"), SESSIONS) as url:
        yield url


def played(url, said, **arguments):
    environment = load_environment(f"openenv:{url}", num_examples=2, **arguments)
    client = ScriptedClient(said)
    (state,) = generated(environment, [environment.get_dataset()[0]], client).state
    return state, client.calls


@pytest.mark.long
def test_a_rollout_is_a_session_whose_rewards_are_summed(url):
    seed = load_environment(f"openenv:{url}").get_dataset()[0]["info"]["seed"]
    first = 1000 + seed % 100
    said = ["<action>hello</action>", "you"]
    state, calls = played(url, said, options={"base": 1000})
    assert calls[0].prompt == [
        {"role": "system", "content": f"Say something long.\n\n{FORM}"},
        user(f"Say {first}."),
    ]
    assert calls[1].prompt[2:] == [assistant(said[0]), user(f"Say {first + 1}.")]
    assert (state["error"], state["stop_condition"]) == (None, "episode_terminated")
    assert state["reward"] == pytest.approx(0.08)
    assert (state["metrics"]["num_steps"], state["metrics"]["valid_actions"]) == (2.0, 1.0)


@pytest.mark.long
def test_an_action_that_the_server_refuses_is_told_and_one_that_fails_fails_the_rollout(url):
    state, calls = played(url, ["x" * 1001, "a", "fail"])
    assert re.search(rf"action: text: .* 1000 .*{re.escape(FORM)}$", calls[1].text)
    assert len(calls) == 3
    message = rf"RuntimeError: openenv:{url}: step .*EXECUTION_ERROR: told to fail; .*server's log"
    assert re.match(message, state["error"])


@pytest.mark.long
def test_no_more_sessions_are_open_at_a_time_than_it_says_and_each_is_given_back(url):
    environment = load_environment(f"openenv:{url}", num_examples=12, sessions=2)
    for _ in range(2):  # a second call has an event loop of its own
        results = generated(environment, environment.get_dataset(), ScriptedClient(lambda _: "a"))
        assert [state["error"] for state in results.state] == [None] * 12


def server_of(url, sessions=SESSIONS + 1):
    actions = Actions(ActionSchema(properties={"text": {"type": "string"}}))
    return Server(f"openenv:{url}", url, actions, {}, sessions, timeout_s=60.0)


@pytest.mark.long
def test_a_server_without_a_session_left_is_named_with_what_to_set(url):
    async def open_too_many():
        server = server_of(url)
        episodes = [OpenEnvEpisode(server) for _ in range(SESSIONS + 1)]
        try:
            for episode in episodes[:-1]:
                await episode.reset(0)
            await episodes[-1].reset(0)
        finally:
            for episode in episodes:
                await episode.close()

    with pytest.raises(ConnectionError, match=r"no free session .*max_concurrent_envs"):
        asyncio.run(open_too_many())
    assert played(url, ["a", "b"])[0]["error"] is None, "all were given back"


@pytest.mark.long
def test_an_answer_that_is_late_is_named_with_its_key(url):
    async def wait():
        server = server_of(url)
        episode = OpenEnvEpisode(server)
        await episode.reset(0)
        server.timeout_s = 0.1
        late = r"step .*environment\.args\.timeout_s = 0\.1 s; .*server"
        with pytest.raises(TimeoutError, match=late):
            await episode.step("sleep")
        with pytest.raises(TimeoutError, match=r"has not closed the session"):
            await episode.close()

    asyncio.run(wait())


@pytest.mark.long
def test_what_is_no_openenv_server_is_refused_with_how_one_is_started(url):
    remedy = r"start it, for example by `uvicorn my_env.server.app:app --port 8000`"
    with pytest.raises(ValueError, match=rf"GET /metadata did not answer .*404.*{remedy}"):
        load_environment(f"openenv:{url}/docs")


# Without a server


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://127.0.0.1:9", r"openenv:http://127.0.0.1:9: GET /metadata .*ConnectError"),
        ("127.0.0.1:8000", "write the server's address as openenv:http://HOST:PORT"),
    ],
)
def test_an_address_where_nobody_is_is_refused(address, problem):
    with pytest.raises(ValueError, match=problem):
        load_environment(f"openenv:{address}", timeout_s=60.0)


@pytest.mark.parametrize(
    ("properties", "form", "read"),
    [
        (
            {"number": {"type": "integer"}, "metadata": {"type": "object"}},
            "a whole number",
            {"7": {"number": 7}, "seven": None},
        ),
        (
            {"way": {"type": "string", "enum": ["up", "down"]}},
            "one of up, down",
            {"up": {"way": "up"}},
        ),
        (
            {"x": {"type": "integer"}, "y": {}},
            'a JSON object of the schema {"properties": {"x": {"type": "integer"}, "y": {}}}',
            {'{"x": 1, "y": 2}': {"x": 1, "y": 2}, "3": None, "{": None},
        ),
    ],
)
def test_an_action_is_the_value_of_its_only_field_or_a_json_object(properties, form, read):
    actions = Actions(ActionSchema(properties=properties))
    assert actions.form == f"Write your action, {form}, as <action>ACTION</action>."
    assert {text: actions.read(text) for text in read} == read


def test_an_observation_is_a_line_for_each_field_or_its_only_one_alone():
    assert as_text({"text": "You win.", "metadata": {}, "hint": None}) == "You win."
    several = {"board": "..x", "legal": [1, 2]}
    assert as_text(several) == f"board: ..x\nlegal: {json.dumps([1, 2])}"
