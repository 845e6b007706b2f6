"""Trajectories: what the document's summary says that they achieve, in its own words
(`docs/project/requirements.md`).
"""

import asyncio
import copy
import json
import pickle

import datasets
import pytest
from environment_support import (
    Talk,
    assistant,
    generated,
    rolled_out,
    rows,
    rubric_of,
    said_the_answer,
    user,
)
from scripted_client import (
    Answer,
    Call,
    ScriptedClient,
    chat_response,
    connection_error,
    overlong_error,
)

from rollout_actors.environments.clients import openai as endpoint
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.lifecycle import cleanup, stop, teardown
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.tool import ToolEnv
from rollout_actors.environments.training.examples import process_trajectories_for_training
from rollout_actors.environments.types import State

SAMPLING_ARGS = {
    "logprobs": 1,
    "extra_body": {
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "prompt_logprobs": 1,
    },
}
"""The document's vLLM configuration."""


def add(a: int, b: int) -> int:
    return a + b


def twice(call):
    """Says something in every turn, and in the first one of a rollout with tools, calls one."""
    if "tools" in call.arguments and not call.turn:
        return Answer(None, tool_calls=[("add", {"a": 1, "b": 1})])
    return f"said {call.turn}"


class Fresh(Talk):
    """Every call has a prompt of its own, and the last one's begins with no other."""

    async def get_prompt_messages(self, state):
        return [user(f"{state['prompt'][0]['content']}, part {len(state['trajectory'])}")]

    async def _render_completion(self, state):
        state["completion"] = [
            message for step in state["trajectory"] for message in step["completion"]
        ]


ENVIRONMENTS = {
    "one turn": (SingleTurnEnv, {}),
    "several turns": (Talk, {"max_turns": 3}),
    "independent prompts": (Fresh, {"max_turns": 2}),
    "tools": (ToolEnv, {"tools": [add]}),
    "text": (Talk, {"max_turns": 2, "message_type": "completion"}),
}
NUM_TURNS = {"one turn": 1, "several turns": 3, "independent prompts": 2, "tools": 2, "text": 2}


def environment(kind, **changes):
    env, arguments = ENVIRONMENTS[kind]
    prompts = [f"q{i}" if kind == "text" else [user(f"q{i}")] for i in range(2)]
    dataset = [{"prompt": prompt, "answer": "said 0"} for prompt in prompts]
    return env(**{"dataset": dataset, "env_id": kind.replace(" ", "-"), **arguments, **changes})


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_clean_trajectory_support_each_step_is_one_llm_request_response(kind, monkeypatch):
    """Neither what was tried again nor what was refused for its length is a step, and no step is
    more than one call.
    """
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.0)
    client = ScriptedClient(lambda call: connection_error() if call.number == 0 else twice(call))
    env = environment(kind)
    state = rolled_out(env, env.dataset[0], client)
    answered = client.calls[1:]
    assert len(state["trajectory"]) == len(answered) == NUM_TURNS[kind]
    for step, call in zip(state["trajectory"], answered, strict=True):
        assert step["prompt"] == call.prompt
        assert step["response"].id.endswith(f"-{call.number}")
        said = step["response"].choices[0]
        if kind == "text":
            assert step["completion"] == said.text
        else:
            (message,) = step["completion"]
            assert (message["role"], message["content"]) == ("assistant", said.message.content)
    refused = rolled_out(env, env.dataset[0], ScriptedClient([overlong_error()]))
    assert (refused["trajectory"], refused["is_truncated"]) == ([], True)
    assert refused["completion"] == ("" if kind == "text" else [])


def test_no_retokenization_brittleness_use_vllm_s_native_token_ids_logprobs():
    """Tokens that no tokenizer would make of what was said, and log-probabilities to the last bit;
    of the prompt, none are kept.
    """
    prompts, sampled = [[7, 7, 1], [7, 7, 1, 9, 2**31, 4]], [[9, 2**31], [0, 0, 0]]
    logprobs = [[-0.1, -1 / 3], [-1e-300, -0.0, -87.33654475055310898657]]

    def script(call):
        fields = {"prompt_logprobs": [None, {"7": {"logprob": -2.0}}]}
        return Answer(
            "the same words",
            prompt_ids=prompts[call.turn],
            completion_ids=sampled[call.turn],
            logprobs=logprobs[call.turn],
            fields=fields,
        )

    (state,) = generated(
        Talk(max_turns=2), rows(1), ScriptedClient(script), sampling_args=SAMPLING_ARGS
    ).state
    for step, prompt_ids, ids, values in zip(
        state["trajectory"], prompts, sampled, logprobs, strict=True
    ):
        assert step["response"].prompt_logprobs
        assert step["tokens"] == {
            "prompt_ids": prompt_ids,
            "prompt_mask": [0] * len(prompt_ids),
            "completion_ids": ids,
            "completion_mask": [1] * len(ids),
            "completion_logprobs": values,
        }
        assert list(map(float.hex, step["tokens"]["completion_logprobs"])) == list(
            map(float.hex, values)
        )
    examples = process_trajectories_for_training([state])
    for example, prompt_ids, ids, values in zip(examples, prompts, sampled, logprobs, strict=True):
        assert example.token_ids == prompt_ids + ids
        assert example.logprobs == [0.0] * len(prompt_ids) + values


@pytest.mark.parametrize("kind", ["several turns", "independent prompts", "tools"])
def test_horizontal_training_each_trajectory_step_independent_training_example(kind):
    """As many examples as calls, and each the same whatever other steps there are, whether or not a
    prompt extends the one before.
    """
    env, client = environment(kind, rubric=rubric_of(said_the_answer)), ScriptedClient(twice)
    states = generated(env, rows(2), client, sampling_args=SAMPLING_ARGS).state
    examples = process_trajectories_for_training(states=states, mask_prompts=True)
    steps = [(state, step) for state in states for step in state["trajectory"]]
    assert len(examples) == len(steps) == 2 * NUM_TURNS[kind]
    for example, (state, step) in zip(examples, steps, strict=True):
        tokens = step["tokens"]
        assert example.token_ids == tokens["prompt_ids"] + tokens["completion_ids"]
        assert example.mask == [0] * len(tokens["prompt_ids"]) + [1] * len(tokens["completion_ids"])
        (alone,) = process_trajectories_for_training([{**state, "trajectory": [step]}])
        for name in ("token_ids", "logprobs", "mask", "reward", "advantage", "example_id"):
            assert getattr(alone, name) == getattr(example, name)


def test_backward_compatibility_most_existing_environments_work_unchanged_via_state_forwarding():
    """Code that knows nothing of `state["input"]`, over a table with tools and more in its `info`
    column.
    """
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    infos = [json.dumps({"oai_tools": [tool], "hint": i}) for i in range(2)]
    table = datasets.Dataset.from_list(
        [
            {"prompt": [user(f"q{i}")], "answer": f"{i}", "task": "old", "info": info}
            for i, info in enumerate(infos)
        ]
    )

    class Old(Talk):
        async def setup_state(self, state):
            state["hint"] = state["info"]["hint"] if "info" in state and "answer" in state else None
            return state

        async def env_response(self, messages, state, **kwargs):
            known = dict(state)
            copied = pickle.loads(pickle.dumps(state.copy()))
            assert all(known[name] == copied[name] for name in State.INPUT_FIELDS)
            state["answer"] = state.get("answer", "none") + "!"
            said = (state["task"], state["example_id"], state["hint"], known["answer"])
            return [user(" ".join(map(str, said)))]

    def judged(prompt, completion, answer, info, task, state):
        row = prompt[0]["content"], task, answer
        expected = f"q{info['hint']}", "old", f"{info['hint']}!"
        return float(row == expected and state["answer"] == answer)

    client = ScriptedClient(lambda call: "a")
    results = generated(Old(max_turns=2, rubric=Rubric([judged])), table, client)
    assert (results.reward, results.metadata.num_errors) == ([1.0, 1.0], 0)
    heard = [completion[1]["content"] for completion in results.completion]
    assert heard == ["old 0 0 0", "old 1 1 1"]
    assert all(call.arguments["tools"] == [tool] for call in client.calls)


def test_setup_pattern_clarity_init_state_for_data_setup_state_for_config():
    class Configured(Talk):
        def __init__(self, region, **kwargs):
            super().__init__(**kwargs)
            self.region = region

        async def setup_state(self, state):
            assert state["trajectory"] == [] and state["completion"] is None
            state["sandbox"] = f"{self.region}-{state['example_id']}"
            state["prompt"] = [*state["prompt"], user(f"you are in {state['sandbox']}")]
            state["info"]["k"].append(2)
            state["answer"] = "other"
            return state

    row = {"prompt": [user("hi")], "answer": "a", "info": {"k": [1]}, "task": "t", "example_id": 3}
    before = copy.deepcopy(row)

    async def begun(env):
        state = await env.init_state(row)
        state["timing"].pop("start_time")
        return dict(state)

    first, second = Configured("north", max_turns=1), SingleTurnEnv()
    assert asyncio.run(begun(first)) == asyncio.run(begun(second)), "whatever the environment"
    client = ScriptedClient(["done"])
    state = rolled_out(first, row, client)
    assert client.calls[0].prompt == [user("hi"), user("you are in north-3")]
    assert state["sandbox"] == "north-3"
    assert row == before


@pytest.mark.parametrize("score_rollouts", [True, False])
@pytest.mark.parametrize("kind", [*ENVIRONMENTS, "group"])
def test_always_on_trajectories_all_rollouts_track_trajectory_data(kind, score_rollouts):
    """Of every kind of environment, alone and in a group, and also where it is not scored."""
    if kind == "group":
        env = EnvGroup([environment(name) for name in ENVIRONMENTS if name != "text"])
    else:
        env = environment(kind)
    ways = {"sampling_args": SAMPLING_ARGS, "score_rollouts": score_rollouts, "use_tqdm": False}
    results = asyncio.run(env.evaluate(ScriptedClient(twice), "model", **ways))
    assert results.metadata.num_errors == 0
    for state in results.state:
        assert len(state["trajectory"]) == NUM_TURNS[state["task"].replace("-", " ")]
        assert all(step["tokens"]["completion_ids"] for step in state["trajectory"])


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_input_first_api_clean_interface_matching_dataset_structure(kind):
    """A row of the dataset is what a rollout begins with, by place and by name, and stays as it
    is."""
    env = environment(kind)
    row = env.dataset[0]
    before = copy.deepcopy(row)
    states = [
        rolled_out(env, row, ScriptedClient(twice)),
        asyncio.run(env.rollout(input=row, client=ScriptedClient(twice), model="m")),
    ]
    for state in states:
        assert isinstance(state, State) and state["is_completed"] and state["input"] == row
        assert all(state[name] == row[name] for name in ("prompt", "answer", "task", "example_id"))
    assert row == before and states[0]["input"] is not row


def test_decorator_based_termination_stop_cleanup_teardown_for_declarative_lifecycle_management():
    """No registration: a subclass of a subclass, whose marks are found by themselves."""
    called = []

    class Base(Talk):
        @stop
        async def has_said_enough(self, state):
            return len(state["trajectory"]) == state["info"]["turns"]

        @cleanup
        async def release(self, state):
            called.append(("release", state["example_id"], state["stop_condition"]))

        @teardown
        async def delete_all(self):
            called.append(("delete_all",))

    class Derived(Base):
        pass

    async def main():
        async with Derived(max_turns=3) as env:
            given = [{"question": "a", "info": {"turns": turns}} for turns in (1, 2, 9)]
            return await env.generate(
                given, ScriptedClient(lambda call: "a"), "model", use_tqdm=False, max_concurrent=1
            )

    results = asyncio.run(main())
    reasons = ["has_said_enough", "has_said_enough", "max_turns_reached"]
    assert [state["stop_condition"] for state in results.state] == reasons and all(
        state["is_completed"] for state in results.state
    )
    assert [len(state["trajectory"]) for state in results.state] == [1, 2, 3]
    assert called == [
        *(("release", place, reason) for place, reason in enumerate(reasons)),
        ("delete_all",),
    ]


# Rules of the document without a place in its summary


def test_extras_allows_environments_to_add_custom_metadata_per_step():
    class Notes(Talk):
        async def add_model_response(self, state, prompt_messages, response):
            await super().add_model_response(state, prompt_messages, response)
            state["trajectory"][-1]["extras"]["turn"] = len(state["trajectory"])

    env = Notes(max_turns=2)
    results = generated(env, rows(2), ScriptedClient(lambda call: "a"))
    assert [[step["extras"] for step in state["trajectory"]] for state in results.state] == [
        [{"turn": 1}, {"turn": 2}]
    ] * 2
    made = env.make_dataset(results, state_columns=["trajectory"])
    assert [step["extras"]["turn"] for step in made[0]["trajectory"]] == [1, 2]


def test_a_state_with_steps_of_a_users_own_is_rendered_from_its_last_step():
    """`_render_completion` as the document lists it: all of the last call behind the rollout's own
    prompt.
    """
    env = Talk(max_turns=1)
    state = asyncio.run(env.init_state({"prompt": [user("hi")], "example_id": 0}))
    for said in ("a", "b"):
        response = chat_response(Call(0, "model", [], {}), Answer(said))
        prompt = [user("hi"), *([] if said == "a" else [assistant("a"), user("more")])]
        asyncio.run(env.add_model_response(state, prompt, response))
    assert asyncio.run(env.is_completed(state)) and state["stop_condition"] == "max_turns_reached"
    assert state["completion"] == [assistant("a"), user("more"), assistant("b")]
    assert state["timing"]["generation_ms"] > 0
