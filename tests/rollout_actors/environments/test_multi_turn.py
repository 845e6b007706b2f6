"""Rollouts turn by turn: every call of the model is a step of the trajectory (spec: trajectories, 1
to 3 and 7).
"""

import asyncio
import copy
import pickle
import re
from collections import Counter

import openai
import pytest
from environment_support import (
    Documented,
    Talk,
    assistant,
    generated,
    rolled_out,
    rows,
    rubric_of,
    user,
)
from openai.types.chat import ChatCompletionMessage
from scripted_client import (
    Answer,
    ScriptedClient,
    answer_ids,
    connection_error,
    overlong_error,
    rendered_ids,
    status_error,
    timeout_error,
)
from scripted_engines import ScriptedEngines, client_over, decode_settings, demo_tokenizer, says

from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.clients.openai import PAUSE_S, TRIES
from rollout_actors.environments.lifecycle import stop
from rollout_actors.environments.multi_turn import MultiTurnEnv, SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.training.examples import merge_trajectories_for_training
from rollout_actors.environments.training.runner import EnvironmentRunner, RunnerSettings
from rollout_actors.environments.types import State
from shared.errors import RolloutError, UnreachableError
from shared.seeds import request_seed
from shared.trajectory import EnvironmentRequest, ExampleGroup

ROW = {"prompt": [user("hi")], "answer": "c", "task": "talk", "example_id": 3}
TOLD = [user("hi"), assistant("a"), user("yes"), assistant("b"), user("yes"), assistant("c")]


# The trajectory


def test_every_call_of_the_model_is_one_step_with_exactly_the_prompt_that_was_sent_and_the_completion_that_came():
    client = ScriptedClient(["a", "b", "c"])
    state = rolled_out(Talk(), ROW, client)
    assert (
        [step["prompt"] for step in state["trajectory"]]
        == [call.prompt for call in client.calls]
        == [TOLD[:1], TOLD[:3], TOLD[:5]]
    )
    assert [step["completion"] for step in state["trajectory"]] == [
        [assistant(said)] for said in "abc"
    ]
    assert [step["response"].id for step in state["trajectory"]] == ["chat-0", "chat-1", "chat-2"]


def test_a_step_has_the_documents_keys_and_is_unscored_during_the_rollout():
    step = rolled_out(Talk(max_turns=1), ROW, ScriptedClient(["a"]))["trajectory"][0]
    assert set(step) == {
        "prompt",
        "completion",
        "response",
        "tokens",
        "reward",
        "advantage",
        "extras",
    }
    assert (step["reward"], step["advantage"], step["extras"]) == (None, None, {})


def test_tokens_of_every_step_are_the_engines_own():
    client = ScriptedClient(["a", "b", "c"])
    state = rolled_out(Talk(), ROW, client, sampling_args=RETURNS_TOKENS)
    for step, call, said in zip(state["trajectory"], client.calls, "abc", strict=True):
        assert step["tokens"]["prompt_ids"] == rendered_ids(call.prompt)
        assert step["tokens"]["completion_ids"] == answer_ids(call, Answer(said))
        assert step["tokens"]["completion_logprobs"] == [-0.5] * len(
            step["tokens"]["completion_ids"]
        )


def test_the_trajectory_is_a_list_always():
    class Never(Talk):
        @stop
        def at_once(self, state):
            return True

    state = rolled_out(Never(), ROW, ScriptedClient([]))
    assert state["trajectory"] == [] and state["completion"] == []


def test_the_completion_is_all_that_came_after_the_prompt():
    state = rolled_out(Talk(), ROW, ScriptedClient(["a", "b", "c"]))
    assert state["completion"] == TOLD[1:] and state["prompt"] == TOLD[:1]
    assert (
        state["is_completed"]
        and state["stop_condition"] == "max_turns_reached"
        and not state["is_truncated"]
    )


def test_an_environment_may_render_the_completion_its_own_way():
    class Last(Talk):
        async def _render_completion(self, state):
            state["completion"] = state["trajectory"][-1]["completion"]

    assert rolled_out(Last(), ROW, ScriptedClient(["a", "b", "c"]))["completion"] == [
        assistant("c")
    ]


def test_prompts_may_be_independent_of_each_other():
    class Fresh(Talk):
        async def get_prompt_messages(self, state):
            return [user(f"question {len(state['trajectory'])}")]

        async def _render_completion(self, state):
            state["completion"] = [
                message for step in state["trajectory"] for message in step["completion"]
            ]

    client = ScriptedClient(["a", "b"])
    state = rolled_out(Fresh(max_turns=2), ROW, client)
    assert [call.prompt for call in client.calls] == [[user("question 0")], [user("question 1")]]
    assert state["completion"] == [assistant("a"), assistant("b")]


def test_rollouts_of_completion_type_are_text():
    client = ScriptedClient(["a", "b"])
    args = {"logprobs": 1, "extra_body": {"return_token_ids": True}}
    state = rolled_out(
        Talk(max_turns=2, message_type="completion"),
        {**ROW, "prompt": "Once"},
        client,
        sampling_args=args,
    )
    assert [call.prompt for call in client.calls] == ["Once", "Oncea yes "]
    assert state["completion"] == "a yes b"
    assert state["trajectory"][1]["tokens"]["prompt_ids"] == rendered_ids("Oncea yes ")


def test_what_the_environment_says_last_ends_the_rollout_and_belongs_to_the_completion():
    class Game(Talk):
        async def env_response(self, messages, state, **kwargs):
            if messages[-1]["content"] == "b":
                state["final_env_response"] = [user("you won")]
            return [user("no")]

    client = ScriptedClient(["a", "b"])
    state = rolled_out(Game(max_turns=-1), ROW, client)
    assert client.num_calls == 2 and state["stop_condition"] == "environment_has_ended_it"
    assert state["completion"] == [assistant("a"), user("no"), assistant("b"), user("you won")]


def test_the_environment_hears_the_whole_conversation():
    heard = []

    class Listens(Talk):
        async def env_response(self, messages, state, **kwargs):
            heard.append(messages)
            return [user("yes")]

    rolled_out(Listens(), ROW, ScriptedClient(["a", "b", "c"]))
    assert heard == [TOLD[:2], TOLD[:4]]


def test_a_single_turn_is_one_call():
    client = ScriptedClient(["a"])
    state = rolled_out(SingleTurnEnv(), ROW, client)
    assert (
        client.num_calls == 1
        and state["completion"] == [assistant("a")]
        and state["stop_condition"] == "max_turns_reached"
    )


def test_a_single_turn_takes_every_argument_of_an_environment_by_place_too():
    rubric, example = rubric_of(), [user("one"), assistant("two")]
    env = SingleTurnEnv(
        rows(2),
        rows(1),
        "be brief",
        example,
        None,
        rubric,
        {"temperature": 0.5},
        "chat",
        [TOOL],
        100,
        "short",
        {"a": 1},
    )
    assert (
        env.dataset[0]["prompt"]
        == [{"role": "system", "content": "be brief"}, *example, user("q0")]
        and len(env.eval_dataset) == 1
    )
    assert (
        env.rubric is rubric and env.sampling_args["temperature"] == 0.5 and env.oai_tools == [TOOL]
    )
    assert (env.max_seq_len, env.env_id, env.env_args, env.max_turns) == (100, "short", {"a": 1}, 1)
    for arguments, keywords in (([rows(2)], {"dataset": rows(2)}), ([None] * 13, {})):
        with pytest.raises(TypeError):
            SingleTurnEnv(*arguments, **keywords)


def test_a_finished_state_can_be_pickled():
    state = rolled_out(Talk(), ROW, ScriptedClient(["a", "b", "c"]), sampling_args=RETURNS_TOKENS)
    other = pickle.loads(pickle.dumps(state))
    assert other == state and other["trajectory"][2]["response"].id == "chat-2"


# Where it begins


def test_a_rollout_begins_with_the_fields_of_the_document():
    state = asyncio.run(Talk(env_id="talk").init_state({"prompt": [user("hi")], "example_id": 3}))
    expected = {
        "is_completed": False,
        "stop_condition": None,
        "oai_tools": [],
        "trajectory": [],
        "completion": None,
    }
    expected |= {
        "reward": None,
        "advantage": None,
        "metrics": None,
        "error": None,
        "is_truncated": False,
        "id": 3,
        "example_id": 3,
        "task": "talk",
    }
    assert {key: state[key] for key in expected} == expected
    assert {key: state["timing"][key] for key in ("generation_ms", "scoring_ms", "total_ms")} == {
        "generation_ms": 0,
        "scoring_ms": 0,
        "total_ms": 0,
    }
    assert state["timing"]["start_time"] > 1.6e9


def test_init_state_comes_first_then_setup_state_then_the_first_call():
    order = []

    class Env(Talk):
        async def init_state(self, input, **kwargs):
            order.append("init")
            return await super().init_state(input, **kwargs)

        async def setup_state(self, state):
            order.append("setup")
            return await super().setup_state(state)

    rolled_out(Env(max_turns=1), ROW, ScriptedClient(lambda call: order.append("call") or "a"))
    assert order == ["init", "setup", "call"]


def test_info_that_a_dataset_stores_as_json_is_read():
    assert asyncio.run(Talk().init_state({**ROW, "info": '{"k": 1}'}))["info"] == {"k": 1}


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ("[1]", r"info: must be a mapping, or the JSON of one, got list: '\[1\]'"),
        ([1], "info: must be a mapping, or the JSON of one, got list"),
        ("{k", "info: is not JSON .*give a mapping, or its JSON"),
    ],
)
def test_info_that_is_no_mapping_fails_its_rollout_with_what_it_must_be(info, told):
    (state,) = generated(Talk(), [{**ROW, "info": info}], ScriptedClient([])).state
    assert re.match(f"ValueError: {told}", state["error"]), state["error"]


def test_the_callers_row_stays_as_it_is():
    class Scribbles(Talk):
        async def setup_state(self, state):
            state["prompt"].append(user("more"))
            state["answer"] = "other"
            state["info"]["k"].append(2)
            return state

    row = {**ROW, "info": {"k": [1]}}
    before = copy.deepcopy(row)
    state = rolled_out(Scribbles(max_turns=1), row, ScriptedClient(["a"]))
    assert row == before and state["answer"] == "other"


def test_writing_to_the_prompt_later_does_not_change_what_was_sent():
    class Scribbles(Talk):
        async def env_response(self, messages, state, **kwargs):
            state["prompt"].append(user("more"))
            return [user("yes")]

    state = rolled_out(Scribbles(max_turns=2), ROW, ScriptedClient(["a", "b"]))
    assert state["trajectory"][0]["prompt"] == [user("hi")]


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
OTHER = {
    "type": "function",
    "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}},
}


def test_the_rows_tools_win_over_the_environments():
    env = Talk(max_turns=1, oai_tools=[TOOL])
    for info, tools in (
        (None, [TOOL]),
        ({"oai_tools": [OTHER]}, [OTHER]),
        ({"oai_tools": None}, [TOOL]),
    ):
        client = ScriptedClient(["a"])
        state = rolled_out(env, ROW if info is None else {**ROW, "info": info}, client)
        assert state["oai_tools"] == tools and client.calls[0].arguments["tools"] == tools


def test_no_tools_are_sent_where_there_are_none():
    client = ScriptedClient(["a"])
    rolled_out(Talk(max_turns=1), ROW, client)
    assert "tools" not in client.calls[0].arguments


def test_a_rollout_that_adds_a_tool_adds_it_for_itself_alone():
    class Adds(Talk):
        async def setup_state(self, state):
            state["oai_tools"].append(OTHER)
            return state

    env = Adds(max_turns=1, oai_tools=[TOOL])
    assert rolled_out(env, ROW, ScriptedClient(["a"]))["oai_tools"] == [TOOL, OTHER]
    assert env.oai_tools == [TOOL]


# What is sent


def test_a_calls_sampling_arguments_win_over_the_environments_and_extra_body_is_merged():
    env = Talk(
        max_turns=1,
        sampling_args={
            "temperature": 0.5,
            "max_tokens": 8,
            "extra_body": {"top_k": 3, "min_p": 0.1},
        },
    )
    client = ScriptedClient(["a"])
    rolled_out(env, ROW, client, sampling_args={"temperature": 1.0, "extra_body": {"top_k": 5}})
    assert client.calls[0].arguments == {
        "temperature": 1.0,
        "max_tokens": 8,
        "extra_body": {"top_k": 5, "min_p": 0.1},
    }


def test_a_sampling_argument_that_is_none_takes_the_environments_back():
    client = ScriptedClient(["a"])
    env = Talk(max_turns=1, sampling_args={"temperature": 0.5, "extra_body": {"top_k": 3}})
    asyncio.run(
        env.generate(
            [ROW], client, "model", {"temperature": None, "extra_body": None}, use_tqdm=False
        )
    )
    assert client.calls[0].arguments == {}


# Too long


@pytest.mark.parametrize(
    "refusal",
    [
        overlong_error(),
        status_error(400, "no", code="context_length_exceeded"),
        status_error(400, "The prompt is too long"),
    ],
)
def test_an_over_long_prompt_ends_the_rollout_as_truncated_with_its_steps_kept_and_no_text_invented(
    refusal,
):
    client = ScriptedClient(["a", refusal])
    state = rolled_out(Talk(), ROW, client, sampling_args=RETURNS_TOKENS)
    assert (
        state["is_truncated"]
        and state["is_completed"]
        and state["stop_condition"] == "prompt_too_long"
        and state["error"] is None
    )
    assert [step["completion"] for step in state["trajectory"]] == [[assistant("a")]] and state[
        "trajectory"
    ][0]["tokens"] is not None
    assert state["completion"] == [assistant("a")]
    assert client.num_calls == 2


def seq(prompt: int, sampled: int) -> Answer:
    return Answer("a", prompt_ids=range(prompt), completion_ids=range(100, 100 + sampled))


def test_max_seq_len_ends_a_rollout_as_truncated_with_the_tokens_that_fit():
    client = ScriptedClient([seq(3, 2), seq(7, 5)])
    state = rolled_out(Talk(max_seq_len=10), ROW, client, sampling_args=RETURNS_TOKENS)
    assert (
        state["is_truncated"]
        and state["stop_condition"] == "max_seq_len_reached"
        and client.num_calls == 2
    )
    first, second = (step["tokens"] for step in state["trajectory"])
    assert len(first["completion_ids"]) == 2
    assert (
        second["completion_ids"] == [100, 101, 102]
        and second["completion_mask"] == [1] * 3
        and len(second["completion_logprobs"]) == 3
    )
    assert second["prompt_ids"] == list(range(7))


def test_a_prompt_that_fills_max_seq_len_leaves_nothing_of_its_step_to_learn_and_the_steps_before_it_whole():
    state = rolled_out(
        Talk(max_seq_len=10),
        ROW,
        ScriptedClient([seq(3, 2), seq(10, 5)]),
        sampling_args=RETURNS_TOKENS,
    )
    assert state["is_truncated"] and [step["tokens"] is None for step in state["trajectory"]] == [
        False,
        True,
    ]


# Failures on the way


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure",
    [
        connection_error(),
        timeout_error(),
        status_error(429, "slow"),
        status_error(409, "other weights"),
        status_error(500, "oh"),
        status_error(503, "busy"),
        ConnectionResetError("gone"),
        TimeoutError("late"),
    ],
    ids=repr,
)
def test_failures_of_the_infrastructure_are_tried_again_with_the_same_call(failure):
    client = ScriptedClient([failure, "a"])
    state = rolled_out(Talk(max_turns=1), ROW, client, sampling_args={"temperature": 0.5})
    assert client.num_calls == 2 and len(state["trajectory"]) == 1
    assert (client.calls[0].prompt, client.calls[0].arguments) == (
        client.calls[1].prompt,
        client.calls[1].arguments,
    )


@pytest.mark.parametrize(
    "failure",
    [
        status_error(400, "bad"),
        status_error(401, "key"),
        status_error(404, "model"),
        ValueError("mine"),
        KeyError("k"),
        RuntimeError("r"),
    ],
    ids=repr,
)
def test_failures_of_anything_else_are_not_tried_again(failure):
    client = ScriptedClient([failure, "a"])
    with pytest.raises(type(failure)):
        rolled_out(Talk(max_turns=1), ROW, client)
    assert client.num_calls == 1


@pytest.mark.parametrize(
    "failure",
    [
        RolloutError(
            "its process has ended; check its log and the machine's memory",
            actor="actor-0",
            phase="generate",
        ),
        RolloutError(
            "no answer from actor-0 after timeouts.generate_s = 600 s; check the engine's log",
            actor="actor-0",
            phase="generate",
        ),
        RolloutError(
            "the engine serves no rollouts: its sync to version 4 was not completed",
            actor="actor-0",
            phase="generate",
        ),
        RolloutError(
            "answered another prompt than the one of sample 3", actor="actor-0", phase="check"
        ),
        UnreachableError(
            "server-0 failed 2 times, last with: refused", actor="server-0", phase="generate"
        ),
    ],
    ids=str,
)
def test_what_an_engine_of_the_runs_own_fails_with_is_not_tried_again(failure):
    client = ScriptedClient([failure, "a"])
    with pytest.raises(RolloutError) as caught:
        rolled_out(Talk(max_turns=1), ROW, client)
    assert caught.value is failure and client.num_calls == 1


@pytest.mark.slow
def test_an_infrastructure_that_goes_on_failing_is_raised_after_the_last_try():
    client = ScriptedClient([connection_error()] * TRIES)
    with pytest.raises(openai.APIConnectionError):
        rolled_out(Talk(max_turns=1), ROW, client)
    assert client.num_calls == TRIES == 3 and PAUSE_S == 0.5


def test_env_response_has_to_be_written():
    with pytest.raises(TypeError, match="env_response"):
        MultiTurnEnv()  # type: ignore[abstract]


# Clients that know rollouts


def test_a_client_that_wants_to_know_which_calls_are_of_one_rollout_is_told():
    class Knows:
        def __init__(self):
            self.states, self.clients = [], []

        def conversation(self, state, *, of=None, path=""):
            self.states.append(state)
            self.clients.append(ScriptedClient(["a", "b"]))
            return self.clients[-1]

    client = Knows()
    first = rolled_out(Talk(max_turns=2), ROW, client)
    rolled_out(Talk(max_turns=2), ROW, client)
    assert [one.num_calls for one in client.clients] == [2, 2] and client.states[0] is first


def test_an_environment_that_edits_the_messages_that_it_hears_changes_the_next_call_and_no_step_before_it():
    class Edits(MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            messages[0]["content"] = "edited"
            return [user("yes")]

    client = ScriptedClient(["a", "b"])
    state = rolled_out(Edits(max_turns=2), ROW, client)
    assert (
        [step["prompt"][0]["content"] for step in state["trajectory"]]
        == [call.prompt[0]["content"] for call in client.calls]
        == ["hi", "edited"]
    )
    assert state["prompt"] == [user("hi")]


def test_a_step_shares_no_message_with_the_state_or_with_another_step():
    state = rolled_out(Talk(), ROW, ScriptedClient(["a", "b", "c"]))
    messages = [
        id(message)
        for step in state["trajectory"]
        for message in [*step["prompt"], *step["completion"]]
    ]
    assert len(set(messages)) == len(messages) and id(state["prompt"][0]) not in messages


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "TypeError: env_response of Silent returned nothing; return a list of messages"),
        (user("yes"), "TypeError: env_response of Silent returned dict; return a list of messages"),
        (
            ["yes"],
            (
                "ValueError: what env_response of Silent returned: message 0 is str; write it like"
                ' {"role": "user"'
            ),
        ),
        ("text", "TypeError: text cannot be joined"),
    ],
)
def test_an_environment_that_answers_with_what_is_no_message_fails_the_rollout_and_the_completion_has_the_steps(
    answer, told
):
    class Silent(MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return answer if len(state["trajectory"]) == 2 else [user("yes")]

    (state,) = generated(Silent(), [ROW], ScriptedClient(["a", "b"])).state
    assert state["error"].startswith(told) and state["completion"] == [
        assistant("a"),
        user("yes"),
        assistant("b"),
    ]


def test_an_environment_may_answer_with_the_openai_librarys_messages():
    class Library(MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [ChatCompletionMessage(role="assistant", content="yes")]

    client = ScriptedClient(["a", "b"])
    state = rolled_out(Library(max_turns=2), ROW, client)
    assert state["completion"] == [assistant("a"), assistant("yes"), assistant("b")]
    assert client.calls[1].prompt == [user("hi"), assistant("a"), assistant("yes")]


def test_an_answer_that_ends_by_itself_exactly_at_max_seq_len_is_not_truncated():
    state = rolled_out(
        SingleTurnEnv(max_seq_len=10),
        ROW,
        ScriptedClient([seq(6, 4)]),
        sampling_args=RETURNS_TOKENS,
    )
    assert (
        not state["is_truncated"]
        and state["stop_condition"] == "max_turns_reached"
        and len(state["trajectory"][0]["tokens"]["completion_ids"]) == 4
    )
    cut = Answer("a", prompt_ids=range(6), completion_ids=range(4), finish_reason="length")
    state = rolled_out(
        SingleTurnEnv(max_seq_len=10), ROW, ScriptedClient([cut]), sampling_args=RETURNS_TOKENS
    )
    assert state["is_truncated"] and len(state["trajectory"][0]["tokens"]["completion_ids"]) == 4


@pytest.mark.parametrize(("sampled", "is_truncated"), [(3, False), (4, False), (5, True)])
def test_without_token_ids_max_seq_len_holds_by_what_the_endpoint_counts(sampled, is_truncated):
    answer = Answer(
        "a",
        fields={
            "usage": {"prompt_tokens": 6, "completion_tokens": sampled, "total_tokens": 6 + sampled}
        },
    )
    state = rolled_out(SingleTurnEnv(max_seq_len=10), ROW, ScriptedClient([answer]))
    assert state["is_truncated"] is is_truncated and state["trajectory"][0]["tokens"] is None


def test_a_rollout_of_a_chat_may_begin_with_plain_text():
    state = rolled_out(
        SingleTurnEnv(system_prompt="be short"),
        {"prompt": "hi", "example_id": 0, "task": "t"},
        ScriptedClient(["a"]),
    )
    assert state["prompt"] == [{"role": "system", "content": "be short"}, user("hi")] and state[
        "completion"
    ] == [assistant("a")]


def test_an_empty_text_for_info_is_no_info():
    assert "info" not in rolled_out(Talk(), {**ROW, "info": ""}, ScriptedClient(["a", "b", "c"]))


def test_an_override_of_is_completed_that_notes_it_itself_completes_the_state_too():
    class Done(Talk):
        async def is_completed(self, state, **kwargs):
            if len(state["trajectory"]) == 1:
                state["is_completed"], state["stop_condition"] = True, "mine"
            return state["is_completed"]

    state = rolled_out(Done(), ROW, ScriptedClient(["a"]))
    assert state["completion"] == [assistant("a")] and state["stop_condition"] == "mine"


# Rollouts of an environment's own with the run's engines


class Twice(Talk):
    """The better one of two, say."""

    async def rollout(self, input, client, model, sampling_args=None):
        await super().rollout(input, client, model, sampling_args)
        return await super().rollout(input, client, model, sampling_args)


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


@pytest.mark.parametrize("copies", [False, True])
def test_a_rollout_of_an_environments_own_asks_engines_as_one_of_turns_does(tokenizer, copies):
    class Own(Documented):
        async def setup_state(self, state):
            return State(state) if copies else state

    def made(kind):
        engines = ScriptedEngines(
            lambda request: says(tokenizer, f"no {request.seed % 7}"), number=2
        )
        results = generated(
            kind(max_turns=3, rubric=rubric_of(lambda state: 1.0)),
            [{"question": "q", "position": place} for place in (4, 5)],
            client_over(engines, tokenizer),
        )
        assert [(state["error"], state["num_splits"]) for state in results.state] == [(None, 0)] * 2
        tokens = [[step["tokens"] for step in state["trajectory"]] for state in results.state]
        return (
            tokens,
            sorted(
                (request.position, request.seed, engine) for engine, request in engines.requests
            ),
            merge_trajectories_for_training(results.state),
        )

    assert made(Own) == made(Talk)
    _, asked, merged = made(Own)
    assert asked == sorted(
        (place, request_seed(7, 3, place, turn), place % 2) for place in (4, 5) for turn in range(3)
    )
    assert [example.steps for example in merged.examples] == [(0, 1, 2)] * 2


OWN = """
from environment_support import Documented
from rollout_actors.environments.rubric import Rubric

def length(completion):
    return float(len(completion[0]["content"]))

def load_environment():
    return Documented(max_turns=2, dataset=[{"question": "q"}], rubric=Rubric([length]))
"""


def test_what_is_learned_of_a_rollout_of_an_environments_own_is_what_its_engines_sampled(
    tokenizer, tmp_path
):
    (tmp_path / "own.py").write_text(OWN)
    engines = ScriptedEngines(
        lambda request: says(tokenizer, "no" * (1 + request.position), version=5)
    )
    settings = RunnerSettings(
        env_id=str(tmp_path / "own.py"), model_path="model", max_model_len=512, max_under_way=4
    )
    request = EnvironmentRequest(3, (ExampleGroup(0, range(2)),), decode_settings(tokenizer), 7)
    ((first, second),) = asyncio.run(
        EnvironmentRunner("environment-1", settings, engines, tokenizer).run([request])
    )
    assert [(one.error, one.reward, one.num_turns, one.num_splits) for one in (first, second)] == [
        (None, 2.0, 2, 0),
        (None, 4.0, 2, 0),
    ]
    assert {asked.seed for _, asked in engines.requests} == {
        request_seed(7, 3, place, turn) for place in (0, 1) for turn in (0, 1)
    }
    (example,) = second.examples
    assert (example.steps, example.weight_version, example.advantage) == ((0, 1), 5, 1.0)
    assert (
        example.num_learned
        == second.num_tokens
        == 2 * (len(tokenizer.encode("nono", add_special_tokens=False)) + 1)
    ), "with the stop token of each turn"


def test_all_calls_of_a_rollout_have_seeds_of_their_own_whichever_way_they_are_made(tokenizer):
    engines = ScriptedEngines(lambda _: says(tokenizer, "no"))
    assert (
        generated(Twice(max_turns=2), rows(1), client_over(engines, tokenizer)).state[0]["error"]
        is None
    )
    assert [request.seed for _, request in engines.requests] == [
        request_seed(7, 3, 0, turn, path) for path in ("", "/0") for turn in range(2)
    ]


class Asks(Documented):
    """Its rollout is the last of several by another environment."""

    def __init__(self, inner, times, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.times = inner, times

    async def rollout(self, input, client, model, sampling_args=None):
        bare = {key: value for key, value in input.items() if key != "position"}
        states = await asyncio.gather(
            *(
                self.inner.rollout(dict(one), client, model)
                for one in [input, bare] * (self.times // 2)
            )
        )
        state = await self.init_state(input)
        state["trajectory"], state["is_completed"] = states[-1]["trajectory"], True
        await self._render_completion(state)
        return state


def test_rollouts_that_an_environment_asks_another_one_for_have_its_place_and_seeds_of_their_own(
    tokenizer,
):
    engines = ScriptedEngines(lambda _: says(tokenizer, "no"))
    results = generated(Asks(Documented(max_turns=2), 4), rows(3), client_over(engines, tokenizer))
    assert [state["error"] for state in results.state] == [None] * 3
    seeds = [request.seed for _, request in engines.requests]
    assert len(set(seeds)) == len(seeds) == 3 * 4 * 2
    assert Counter(request.position for _, request in engines.requests) == {0: 8, 1: 8, 2: 8}


class Judge(Documented):
    """Asks for two rollouts more after each turn, and again when it is scored."""

    def __init__(self, client, **kwargs):
        async def grade(prompt):
            await self._asked(f"{prompt[-1]['content']} grade")
            return 1.0

        super().__init__(max_turns=2, rubric=Rubric([grade]), **kwargs)
        self.client = client

    async def env_response(self, messages, state, **kwargs):
        await self._asked(f"{state['prompt'][-1]['content']} sub")
        return [user("yes")]

    async def _asked(self, question):
        await Documented(max_turns=1).generate(
            [{"question": f"{question} {i}"} for i in range(2)], self.client, "m", use_tqdm=False
        )


class Jury(Documented):
    """Has two judges by `generate`, and two by hand at once."""

    def __init__(self, client):
        super().__init__(max_turns=1)
        self.client = client

    async def setup_state(self, state):
        judge, questions = (
            Judge(self.client),
            [f"{state['input']['answer']} judge {i}" for i in range(4)],
        )
        await judge.generate(
            [{"question": question} for question in questions[:2]], self.client, "m", use_tqdm=False
        )
        await asyncio.gather(
            *(
                judge.rollout({"prompt": question, "example_id": 0, "task": "t"}, self.client, "m")
                for question in questions[2:]
            )
        )
        return state


@pytest.mark.slow
def test_seeds_of_rollouts_inside_rollouts_and_scorings_do_not_depend_on_which_engine_answers_first(
    tokenizer,
):
    def seeds_of(late):
        def answer(request):
            prompt = tokenizer.decode(request.prompt_token_ids)
            return says(tokenizer, "no", delay_s=0.05 if late in prompt else 0.0)

        engines = ScriptedEngines(answer)
        client = client_over(engines, tokenizer)
        results = generated(Jury(client), rows(2), client)
        assert results.metadata.num_errors == 0
        return {
            (tokenizer.decode(request.prompt_token_ids), request.position): request.seed
            for _, request in engines.requests
        }

    first = seeds_of("judge 0")
    assert (
        seeds_of("judge 1")
        == seeds_of("judge 2")
        == seeds_of("judge 3")
        == seeds_of("nothing")
        == first
    )
    assert len(set(first.values())) == len(first) == 2 * (1 + 4 * (2 + 2) + 2 * 2)


def test_a_rollout_that_begins_in_another_one_of_the_same_environment_has_seeds_of_its_own(
    tokenizer,
):
    class Again(Talk):
        async def setup_state(self, state):
            if state["task"] != "inner":
                for _ in range(2):
                    await self.rollout({**state["input"], "task": "inner"}, self.client, "m")
            return state

    engines = ScriptedEngines(lambda _: says(tokenizer, "no"))
    environment = Again(max_turns=2)
    environment.client = client_over(engines, tokenizer)
    (state,) = generated(environment, rows(1), environment.client).state
    assert (state["error"], state["num_splits"], len(state["trajectory"])) == (None, 0, 2)
    assert len({request.seed for _, request in engines.requests}) == 6


def test_after_a_rollout_that_was_called_by_hand_no_call_is_of_it(tokenizer):
    client = client_over(ScriptedEngines(lambda _: says(tokenizer, "no")), tokenizer)
    environment = Talk(max_turns=1)

    async def calls_afterwards():
        await environment.rollout(dict(ROW), client, "m")
        await environment.get_model_response(client, "m", [user("late")])

    with pytest.raises(RuntimeError, match="none is under way here"):
        asyncio.run(calls_afterwards())


def test_splits_are_counted_whatever_state_comes_of_the_rollout(tokenizer):
    class Copies(Documented):
        async def setup_state(self, state):
            await self.get_model_response(self.client, "m", [user("something else")])
            return state.copy()

    engines = ScriptedEngines(lambda _: says(tokenizer, "no"))
    environment = Copies(max_turns=1)
    environment.client = client_over(engines, tokenizer)
    (state,) = generated(environment, rows(1), environment.client).state
    assert (state["error"], state["num_splits"]) == (None, 1)


def test_a_call_of_engines_that_is_of_no_rollout_says_what_to_do(tokenizer):
    class Own(Talk):
        async def rollout(self, input, client, model, sampling_args=None):
            return await client.chat.completions.create(model=model, messages=input["prompt"])

    client = client_over(ScriptedEngines([]), tokenizer)
    (state,) = generated(Own(), rows(1), client).state
    assert (
        "AttributeError: EngineClient has to know of which rollout a call is; call"
        " `self.get_model_response(client" in state["error"]
    )
    with pytest.raises(RuntimeError, match="none is under way here; call it inside"):
        asyncio.run(Talk().get_model_response(client, "m", [user("q")]))
