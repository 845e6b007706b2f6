"""What environments have: data, `generate` and `evaluate` with their names, and results (spec:
trajectories and rollout orchestration).
"""

import asyncio
import copy
import inspect
import json
import re

import openai
import pytest
from environment_support import Talk, assistant, generated, rows, rubric_of, said_the_answer, user
from scripted_client import ScriptedClient

from rollout_actors.environments.answers.parsers import Parser, ThinkParser
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric, RubricGroup
from shared.errors import StorageError

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def echo(call):
    return call.text


def evaluated(env, client=None, **kwargs):
    client = client or ScriptedClient(echo)
    return asyncio.run(env.evaluate(client, "model", use_tqdm=False, **kwargs))


def contents(prompts):
    return [prompt[0]["content"] for prompt in prompts]


# Data


def test_evaluation_falls_back_on_the_rows_to_train_on():
    assert evaluated(SingleTurnEnv(dataset=rows(2))).example_id == [0, 1]
    held_out = evaluated(SingleTurnEnv(rows(2), [{"question": "e"}]))
    assert contents(held_out.prompt) == ["e"]
    with pytest.raises(ValueError, match="SingleTurnEnv has no dataset"):
        evaluated(SingleTurnEnv())


def test_all_rows_are_the_dataset_itself_so_no_call_copies_their_order():
    environment = SingleTurnEnv(rows(20))
    assert environment.get_dataset() is environment.dataset
    assert environment.get_eval_dataset() is environment.dataset


def test_the_first_n_rows_or_n_of_an_order_by_a_seed():
    def ids(*arguments):
        return [row["example_id"] for row in SingleTurnEnv(rows(20)).get_dataset(*arguments)]

    assert ids(3) == [0, 1, 2]
    assert ids(5, 1) == ids(5, 1) != ids(5, 2)
    assert len(ids(100)) == 20


def parsed(parser, completion):
    return float(parser.parse_answer(completion) == "4")


@pytest.mark.parametrize(
    ("rubric", "reward"),
    [
        (Rubric([parsed]), 1.0),
        (RubricGroup([Rubric([parsed]), Rubric()]), 1.0),
        (Rubric([parsed], parser=Parser()), 0.0),
    ],
    ids=["a rubric without one", "a group without one", "a rubric with its own"],
)
def test_a_reward_function_gets_the_environments_parser_where_its_rubric_has_none(rubric, reward):
    given = [{"question": "2 + 2"}]
    env = SingleTurnEnv(dataset=given, parser=ThinkParser(), rubric=rubric)
    assert evaluated(env, ScriptedClient(["hm</think>4"])).reward == [reward]


# Ids


# Results


def test_results_are_readable_by_key_and_by_attribute():
    results = evaluated(SingleTurnEnv(dataset=rows(2), rubric=rubric_of(said_the_answer)))
    columns = ("prompt", "completion", "answer", "state", "info", "task", "example_id", "reward")
    for name in (*columns, "metrics", "metadata"):
        assert results[name] is getattr(results, name)
    assert results.metadata["avg_reward"] == results.metadata.avg_reward == 1.0
    assert repr(results) == "GenerateOutputs(2 rollouts, avg_reward 1.000)"
    with pytest.raises(AttributeError, match="results have no 'rewards'"):
        results.rewards  # noqa: B018 - reading it is the point
    with pytest.raises(KeyError):
        results["rewards"]


def test_metadata_says_how_the_results_were_made():
    env = SingleTurnEnv(
        dataset=rows(5),
        rubric=rubric_of(said_the_answer),
        env_id="echo",
        env_args={"k": 1},
        sampling_args={"max_tokens": 8},
    )
    sampling = {"temperature": 0.5}
    results = evaluated(env, num_examples=2, rollouts_per_example=3, sampling_args=sampling)
    metadata = results.metadata
    assert (metadata.env_id, metadata.env_args, metadata.model) == ("echo", {"k": 1}, "model")
    assert metadata.sampling_args == {"max_tokens": 8, "temperature": 0.5}
    assert (len(results.state), metadata.num_examples, metadata.rollouts_per_example) == (6, 2, 3)
    assert (metadata.num_errors, metadata.num_truncated) == (0, 0)
    assert metadata.avg_metrics == {"said_the_answer": 1.0}
    assert metadata.time_ms > 0 and metadata.date.startswith("2")


# The other names


def test_a_generate_is_generate_also_where_a_subclass_has_its_own():
    class Own(SingleTurnEnv):
        async def generate(self, *args, **kwargs):
            return "own"

    client = ScriptedClient(echo)
    results = asyncio.run(SingleTurnEnv().a_generate(rows(2), client, "model", use_tqdm=False))
    assert results.example_id == [0, 1]
    assert asyncio.run(Own().a_generate(rows(2), client, "model")) == "own"
    for name, alias in (("generate", "a_generate"), ("evaluate", "evaluate_sync")):
        method, other = getattr(SingleTurnEnv, name), getattr(SingleTurnEnv, alias)
        assert inspect.signature(other) == inspect.signature(method)


def test_generate_sync_and_evaluate_sync_need_no_event_loop_and_say_what_to_write_in_one():
    env, client = SingleTurnEnv(dataset=rows(2)), ScriptedClient(echo)
    assert env.generate_sync(rows(3), client, "model", use_tqdm=False).example_id == [0, 1, 2]
    assert env.evaluate_sync(client, "model", use_tqdm=False).example_id == [0, 1]

    async def notebook():
        env.generate_sync(rows(1), client, "m")

    remedy = "generate_sync: an event loop is already running, .* write `await environment.generate"
    with pytest.raises(RuntimeError, match=remedy):
        asyncio.run(notebook())


# What belongs to the caller


def test_the_callers_arguments_are_never_changed():
    class Scribbles(Talk):
        async def setup_state(self, state):
            state["prompt"][0]["content"] = "scribbled"
            state["info"]["tags"].append("scribbled")
            state["answer"] = "scribbled"
            for shown in state["oai_tools"]:
                shown["function"]["name"] = "scribbled"
            state["oai_tools"].append({})
            state["scribbled"] = True
            return state

        async def env_response(self, messages, state, **kwargs):
            messages.append(user("scribbled"))
            return [user("yes")]

    def scribbling(info, prompt, completion):
        info["tags"].append("more")
        prompt.append(user("more"))
        completion.append(user("more"))
        return 1.0

    info = {"tags": ["x"], "oai_tools": [TOOL]}
    dataset = [{"prompt": [user(f"q{i}")], "answer": "a", "info": info, "id": i} for i in range(3)]
    given = {
        "dataset": dataset,
        "few_shot": [user("1 + 1"), assistant("2")],
        "env_args": {"k": [1]},
        "sampling_args": {"max_tokens": 8, "extra_body": {"min_p": 0.1}},
        "oai_tools": [TOOL],
    }
    body = {"top_k": 3, "nested": {"a": [1]}}
    sampling_args = {"temperature": 0.5, "stop": ["x"], "extra_body": body}
    before = copy.deepcopy((given, sampling_args))
    env = Scribbles(max_turns=2, rubric=rubric_of(scribbling), **given)
    columns = {name: [row[name] for row in dataset] for name in ("prompt", "info")}
    for inputs in (dataset, columns):
        client = ScriptedClient(lambda call: "a")
        results = generated(env, inputs, client, sampling_args=sampling_args)
        assert results.metadata.num_errors == 0, results.state[0]["error"]
        assert results.prompt[0][0]["content"] != "q0"
    evaluated(env, rollouts_per_example=2, sampling_args=sampling_args)
    assert (given, sampling_args) == before
    assert (env.oai_tools, env.sampling_args) == ([TOOL], given["sampling_args"])


# Saving


def test_a_folder_that_cannot_be_written_is_told_before_the_first_rollout(tmp_path):
    (tmp_path / "file").write_text("")
    client = ScriptedClient(echo)
    with pytest.raises(StorageError, match=r"cannot write .*file"):
        evaluated(SingleTurnEnv(dataset=rows(2)), client, save_path=tmp_path / "file" / "results")
    assert client.num_calls == 0


def test_an_evaluation_is_saved_by_row_with_its_metadata_and_without_columns_that_no_rollout_has(
    tmp_path, caplog
):
    folder = tmp_path / "new" / "folder"
    columns = ["timing.total_ms", "timing.totl_ms"]
    env = SingleTurnEnv(dataset=rows(2), rubric=rubric_of(said_the_answer))
    evaluated(env, save_path=folder, state_columns=columns, rollouts_per_example=3)
    assert re.search(r"state_columns: .* timing\.totl_ms; ", caplog.text)
    saved = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [row["example_id"] for row in saved] == [0, 0, 0, 1, 1, 1]
    assert all("timing.total_ms" in row and "timing.totl_ms" not in row for row in saved)
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["num_examples"], metadata["rollouts_per_example"]) == (2, 3)
    assert metadata["avg_reward"] == 1.0


# What would fail every rollout, or be dropped without a word


class Foreign:
    """A rubric or environment of another library."""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"message_type": "text"}, "message_type: must be chat or completion, got 'text'"),
        ({"few_shot": [{"content": "q"}]}, "few_shot: message 0 has no role"),
        *(
            (
                {"message_type": "completion", name: value},
                f"{name}: not allowed with message_type='completion'",
            )
            for name, value in (
                ("system_prompt", "Be brief."),
                ("few_shot", [user("q"), assistant("a")]),
                ("oai_tools", [TOOL]),
            )
        ),
    ],
)
def test_what_a_completion_is_not_sent_is_refused_by_name(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        SingleTurnEnv(rows(1), **arguments)


def test_parts_of_another_library_are_refused_by_their_full_names():
    name = r".*test_environment\.Foreign"
    with pytest.raises(TypeError, match=f"rubric: is {name}; give a Rubric of rollout_actors"):
        SingleTurnEnv(rows(1), rubric=Foreign())
    with pytest.raises(TypeError, match=f"envs: must be environments of .*, got {name}"):
        EnvGroup([SingleTurnEnv(rows(1)), Foreign()])


def test_a_synchronous_client_is_refused_before_any_rollout():
    client = openai.OpenAI(api_key="none", base_url="http://nowhere.invalid/v1")
    remedy = r"client: is a synchronous openai\.OpenAI; give an openai\.AsyncOpenAI"
    with pytest.raises(TypeError, match=remedy):
        generated(SingleTurnEnv(), rows(2), client)


def test_a_dataset_has_columns_by_name():
    examples = SingleTurnEnv(dataset=rows(2), system_prompt="Hi.").get_dataset()
    assert examples.column_names == ["prompt", "example_id", "task", "answer"]
    assert (examples["answer"], examples["example_id"]) == (["q0", "q1"], [0, 1])
    assert examples["prompt"][1][0] == {"role": "system", "content": "Hi."}
    with pytest.raises(KeyError, match=r"no column 'question'; .*prompt, example_id"):
        examples["question"]
