"""Rollouts turn by turn: every call of the model is a step of the trajectory (spec: trajectories, 1
to 3 and 7).
"""

import asyncio
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
from scripted_engines import ScriptedEngines, client_over, demo_tokenizer, says

from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.clients import openai as endpoint
from rollout_actors.environments.multi_turn import MultiTurnEnv, SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.tool import ToolEnv
from rollout_actors.environments.training.examples import merge_trajectories_for_training
from rollout_actors.environments.types import State
from shared.errors import RolloutError, UnreachableError
from shared.seeds import request_seed

ROW = {"prompt": [user("hi")], "answer": "c", "task": "talk", "example_id": 3}
TOLD = [user("hi"), assistant("a"), user("yes"), assistant("b"), user("yes"), assistant("c")]


def tool(name):
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOL, OTHER = tool("add"), tool("sub")


# The trajectory


def test_every_call_of_the_model_is_one_step_with_exactly_the_prompt_that_was_sent_and_the_completion_that_came():
    client = ScriptedClient(["a", "b", "c"])
    steps = rolled_out(Talk(), ROW, client, sampling_args=RETURNS_TOKENS)["trajectory"]
    assert [step["prompt"] for step in steps] == [TOLD[:1], TOLD[:3], TOLD[:5]]
    assert [call.prompt for call in client.calls] == [step["prompt"] for step in steps]
    assert [step["completion"] for step in steps] == [[assistant(said)] for said in "abc"]
    assert [step["response"].id for step in steps] == ["chat-0", "chat-1", "chat-2"]
    for step, call, said in zip(steps, client.calls, "abc", strict=True):
        ids = answer_ids(call, Answer(said))
        tokens = step.pop("tokens")
        assert tokens["prompt_ids"] == rendered_ids(call.prompt)
        assert tokens["completion_ids"] == ids
        assert tokens["completion_logprobs"] == [-0.5] * len(ids)
        unscored = {"reward": None, "advantage": None, "extras": {}}
        assert (
            step == {name: step[name] for name in ("prompt", "completion", "response")} | unscored
        )


def test_the_completion_is_all_that_came_after_the_prompt():
    client = ScriptedClient(["a", "b", "c"])
    state = rolled_out(Talk(), ROW, client, sampling_args=RETURNS_TOKENS)
    assert (state["prompt"], state["completion"]) == (TOLD[:1], TOLD[1:])
    assert (state["is_completed"], state["is_truncated"]) == (True, False)
    assert state["stop_condition"] == "max_turns_reached"
    other = pickle.loads(pickle.dumps(state))
    assert other == state and other["trajectory"][2]["response"].id == "chat-2"
    shown = [[*step["prompt"], *step["completion"]] for step in state["trajectory"]]
    messages = [id(message) for step in shown for message in step] + [id(state["prompt"][0])]
    assert len(set(messages)) == len(messages), "what is written to one changes no other"


def test_rollouts_of_completion_type_are_text():
    client = ScriptedClient(["a", "b"])
    args = {"logprobs": 1, "extra_body": {"return_token_ids": True}}
    env = Talk(max_turns=2, message_type="completion")
    state = rolled_out(env, {**ROW, "prompt": "Once"}, client, sampling_args=args)
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
    assert (client.num_calls, state["stop_condition"]) == (2, "environment_has_ended_it")
    assert state["completion"] == [assistant("a"), user("no"), assistant("b"), user("you won")]


def test_the_environment_hears_the_whole_conversation_and_what_it_edits_is_no_step_before():
    heard = []

    class Edits(Talk):
        async def env_response(self, messages, state, **kwargs):
            heard.append([dict(message) for message in messages])
            messages[0]["content"] = "edited"
            state["prompt"].append(user("more"))
            return [user("yes")]

    client = ScriptedClient(["a", "b", "c"])
    state = rolled_out(Edits(), ROW, client)
    assert heard == [TOLD[:2], [user("edited"), *TOLD[1:4]]]
    first = [step["prompt"][0]["content"] for step in state["trajectory"]]
    assert first == ["hi", "edited", "edited"]
    assert [call.prompt for call in client.calls] == [
        step["prompt"] for step in state["trajectory"]
    ]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, "TypeError: env_response of Silent returned nothing; return a list of messages"),
        (user("yes"), "TypeError: env_response of Silent returned dict; return a list of messages"),
        (
            ["yes"],
            "ValueError: what env_response of Silent returned: message 0 is str; write it like {",
        ),
        (
            [{"content": "yes"}],
            "ValueError: what env_response of Silent returned: message 0 has no role, only content",
        ),
        (
            [{"role": "human", "content": "yes"}],
            "ValueError: what env_response of Silent returned: message 0 has the unknown role",
        ),
        ("text", "TypeError: text cannot be joined"),
    ],
)
def test_an_answer_of_the_environment_that_is_no_message_fails_the_rollout_whose_steps_are_kept(
    answer, error
):
    class Silent(MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return answer if len(state["trajectory"]) == 2 else [user("yes")]

    (state,) = generated(Silent(), [ROW], ScriptedClient(["a", "b"])).state
    assert state["error"].startswith(error)
    assert state["completion"] == [assistant("a"), user("yes"), assistant("b")]


def test_a_single_turn_is_one_call_and_may_begin_with_plain_text():
    client = ScriptedClient(["a"])
    row = {"prompt": "hi", "example_id": 0, "task": "t"}
    state = rolled_out(SingleTurnEnv(system_prompt="be short"), row, client)
    assert state["prompt"] == [{"role": "system", "content": "be short"}, user("hi")]
    assert state["completion"] == [assistant("a")]
    assert (client.num_calls, state["stop_condition"]) == (1, "max_turns_reached")


@pytest.mark.parametrize("max_turns", [0, -2, "3", 2.5, None, True])
@pytest.mark.parametrize("kind", [ToolEnv, MultiTurnEnv])
def test_a_limit_of_turns_that_is_none_is_refused_when_the_environment_is_made(kind, max_turns):
    class Made(kind):
        async def env_response(self, messages, state, **kwargs):
            return []

    problem = f"max_turns: must be a whole number from 1, or -1 for no limit, got {max_turns!r}"
    with pytest.raises(ValueError, match=re.escape(problem)):
        Made(max_turns=max_turns)
    assert [Made(max_turns=good).max_turns for good in (1, -1)] == [1, -1]


# Where it begins


def test_a_rollout_begins_with_the_fields_of_the_document():
    state = asyncio.run(Talk(env_id="talk").init_state({"prompt": [user("hi")], "example_id": 3}))
    timing = state.pop("timing")
    assert timing.pop("start_time") > 1.6e9
    assert timing == {"generation_ms": 0, "scoring_ms": 0, "total_ms": 0}
    row = {"prompt": [user("hi")], "example_id": 3, "task": "talk"}
    none = ["stop_condition", "completion", "reward", "advantage", "metrics", "error"]
    assert dict(state) == {
        **row,
        **dict.fromkeys(none),
        "input": row,
        "id": 3,
        "is_completed": False,
        "is_truncated": False,
        "oai_tools": [],
        "trajectory": [],
    }


@pytest.mark.parametrize(
    ("info", "read"), [('{"k": 1}', {"k": 1}), ({"k": 1}, {"k": 1}), ("", None)]
)
def test_info_that_a_dataset_stores_as_json_is_read(info, read):
    assert asyncio.run(Talk().init_state({**ROW, "info": info})).get("info") == read


# What is sent


@pytest.mark.parametrize(
    ("own", "info", "sent"),
    [
        ([TOOL], {}, [TOOL]),
        ([TOOL], {"oai_tools": [OTHER]}, [OTHER]),
        ([TOOL], {"oai_tools": None}, [TOOL]),
        (None, {}, None),
    ],
    ids=["the environment's", "the row's", "a row's that a table left empty", "none"],
)
def test_the_rows_tools_win_over_the_environments_and_a_rollout_adds_one_for_itself_alone(
    own, info, sent
):
    class Adds(Talk):
        async def add_model_response(self, state, prompt_messages, response):
            state["oai_tools"].append(tool("mine"))

    client = ScriptedClient(["a"] * 2)
    env = Adds(oai_tools=own)
    env.is_completed = lambda state: len(state["oai_tools"]) > len(sent or ())
    for _ in range(2):
        state = rolled_out(env, {**ROW, "info": info}, client)
        assert state["oai_tools"] == [*(sent or ()), tool("mine")]
    assert [call.arguments.get("tools") for call in client.calls] == [sent] * 2


@pytest.mark.parametrize(
    ("own", "given", "sent"),
    [
        (
            {"temperature": 0.5, "max_tokens": 8, "extra_body": {"top_k": 3, "min_p": 0.1}},
            {"temperature": 1.0, "extra_body": {"top_k": 5}},
            {"temperature": 1.0, "max_tokens": 8, "extra_body": {"top_k": 5, "min_p": 0.1}},
        ),
        (
            {"temperature": 0.5, "extra_body": {"top_k": 3}},
            {"temperature": None, "extra_body": None},
            {},
        ),
    ],
    ids=["extra_body is merged", "None takes the environment's back"],
)
def test_a_calls_sampling_arguments_win_over_the_environments(own, given, sent):
    client = ScriptedClient(["a"])
    generated(Talk(max_turns=1, sampling_args=own), [ROW], client, sampling_args=given)
    assert client.calls[0].arguments == sent


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
    assert (state["is_truncated"], state["is_completed"], state["error"]) == (True, True, None)
    assert (state["stop_condition"], client.num_calls) == ("prompt_too_long", 2)
    (step,) = state["trajectory"]
    assert step["completion"] == state["completion"] == [assistant("a")]
    assert step["tokens"] is not None


def seq(prompt: int, sampled: int, finish_reason: str = "stop") -> Answer:
    ids = range(100, 100 + sampled)
    return Answer("a", prompt_ids=range(prompt), completion_ids=ids, finish_reason=finish_reason)


@pytest.mark.parametrize(
    ("answers", "is_truncated", "kept"),
    [
        ([seq(3, 2), seq(7, 5)], True, [2, 3]),
        ([seq(3, 2), seq(10, 5)], True, [2, None]),
        ([seq(6, 4)], False, [4]),
        ([seq(6, 4, "length")], True, [4]),
    ],
    ids=["cut", "a prompt that leaves no room", "ends by itself at the limit", "cut at the limit"],
)
def test_max_seq_len_ends_a_rollout_as_truncated_with_the_tokens_that_fit(
    answers, is_truncated, kept
):
    client = ScriptedClient(answers)
    env = Talk(max_seq_len=10, max_turns=-1 if is_truncated else 1)
    state = rolled_out(env, ROW, client, sampling_args=RETURNS_TOKENS)
    reason = "max_seq_len_reached" if is_truncated else "max_turns_reached"
    assert (state["is_truncated"], state["stop_condition"]) == (is_truncated, reason)
    for step, answer, number in zip(state["trajectory"], answers, kept, strict=True):
        assert step["tokens"] == (
            None
            if number is None
            else {
                "prompt_ids": list(answer.prompt_ids),
                "prompt_mask": [0] * len(answer.prompt_ids),
                "completion_ids": list(range(100, 100 + number)),
                "completion_mask": [1] * number,
                "completion_logprobs": [-0.5] * number,
            }
        )


# Failures on the way


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
def test_failures_of_the_infrastructure_are_tried_again_with_the_same_call(failure, monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.0)
    client = ScriptedClient([failure, "a"])
    state = rolled_out(Talk(max_turns=1), ROW, client, sampling_args={"temperature": 0.5})
    first, again = client.calls
    assert (first.prompt, first.arguments) == (again.prompt, again.arguments)
    assert len(state["trajectory"]) == 1


def test_an_infrastructure_that_goes_on_failing_is_raised_after_the_last_try(monkeypatch):
    assert endpoint.PAUSE_S == 0.5
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.0)
    client = ScriptedClient([connection_error()] * endpoint.TRIES)
    with pytest.raises(openai.APIConnectionError):
        rolled_out(Talk(max_turns=1), ROW, client)
    assert client.num_calls == endpoint.TRIES == 3


@pytest.mark.parametrize(
    "failure",
    [
        status_error(400, "bad"),
        status_error(401, "key"),
        status_error(404, "model"),
        ValueError("mine"),
        KeyError("k"),
        RuntimeError("r"),
        RolloutError("its process has ended", actor="actor-0", phase="generate"),
        RolloutError("answered another prompt", actor="actor-0", phase="check"),
        UnreachableError("server-0 failed 2 times", actor="server-0", phase="generate"),
    ],
    ids=repr,
)
def test_failures_of_anything_else_are_not_tried_again(failure):
    client = ScriptedClient([failure, "a"])
    with pytest.raises(type(failure)) as caught:
        rolled_out(Talk(max_turns=1), ROW, client)
    assert caught.value is failure
    assert client.num_calls == 1


# Clients that know rollouts


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


def says_no(tokenizer, number=1):
    return ScriptedEngines(lambda _: says(tokenizer, "no"), number=number)


@pytest.mark.parametrize("copies", [False, True])
def test_a_rollout_of_an_environments_own_asks_engines_as_one_of_turns_does(tokenizer, copies):
    class Own(Documented):
        async def setup_state(self, state):
            return State(state) if copies else state

    def played(kind):
        engines = ScriptedEngines(lambda one: says(tokenizer, f"no {one.seed % 7}"), number=2)
        given = [{"question": "q", "position": place} for place in (4, 5)]
        env = kind(max_turns=3, rubric=rubric_of(lambda state: 1.0))
        states = generated(env, given, client_over(engines, tokenizer)).state
        assert [(state["error"], state["num_splits"]) for state in states] == [(None, 0)] * 2
        tokens = [[step["tokens"] for step in state["trajectory"]] for state in states]
        asked = sorted((one.position, one.seed, engine) for engine, one in engines.requests)
        return tokens, asked, merge_trajectories_for_training(states)

    own = played(Own)
    assert own == played(Talk)
    _, asked, merged = own
    places = [(place, turn) for place in (4, 5) for turn in range(3)]
    assert asked == sorted((p, request_seed(7, 3, p, turn), p % 2) for p, turn in places)
    assert [example.steps for example in merged.examples] == [(0, 1, 2)] * 2


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
        questions = [{"question": f"{question} {i}"} for i in range(2)]
        await Documented(max_turns=1).generate(questions, self.client, "m", use_tqdm=False)


class Jury(Documented):
    """Has two judges by `generate`, two by hand at once, and two rollouts of its own."""

    def __init__(self, client):
        super().__init__(max_turns=1)
        self.client = client

    async def setup_state(self, state):
        if state["task"] == "inner":
            return state
        for i in range(2):
            again = [user(f"{state['input']['answer']} again {i}")]
            row = {**state["input"], "prompt": again, "task": "inner"}
            await self.rollout(row, self.client, "m")
        judge = Judge(self.client)
        questions = [f"{state['input']['answer']} judge {i}" for i in range(4)]
        given = [{"question": question} for question in questions[:2]]
        await judge.generate(given, self.client, "m", use_tqdm=False)
        by_hand = [{"prompt": one, "example_id": 0, "task": "t"} for one in questions[2:]]
        await asyncio.gather(*(judge.rollout(row, self.client, "m") for row in by_hand))
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

    first, *others = [seeds_of(f"judge {i}") for i in range(4)] + [seeds_of("nothing")]
    assert others == [first] * 4
    assert len(set(first.values())) == len(first)
    # Of each of the two: its call, its own two rollouts, and its judges with those that they ask.
    num_calls = 1 + 2 + 4 * (2 + 2) + 2 * 2
    assert Counter(position for _, position in first) == {0: num_calls, 1: num_calls}


def test_a_call_of_engines_that_is_of_no_rollout_says_what_to_do(tokenizer):
    class Own(Talk):
        async def rollout(self, input, client, model, sampling_args=None):
            return await client.chat.completions.create(model=model, messages=input["prompt"])

    client = client_over(says_no(tokenizer), tokenizer)
    (state,) = generated(Own(), rows(1), client).state
    message = r"AttributeError: EngineClient .*`self\.get_model_response\(client"
    assert re.search(message, state["error"])
    rolled_out(Talk(max_turns=1), ROW, client)  # which is over when the next call is made
    with pytest.raises(RuntimeError, match=r"no rollout .*; call .*rollout"):
        asyncio.run(Talk().get_model_response(client, "m", [user("q")]))
