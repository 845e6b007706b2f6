"""What environments have: data, `generate` and `evaluate` with their names, and results (spec:
trajectories and rollout orchestration).
"""

import asyncio
import copy
import json
import pickle

import openai
import pytest
from environment_support import Talk, assistant, generated, rows, rubric_of, said_the_answer, user
from scripted_client import ScriptedClient

from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Parser, Rubric, RubricGroup, ThinkParser
from shared.errors import StorageError


def echo(call):
    return call.text


def evaluated(env, client=None, **kwargs):
    return asyncio.run(
        env.evaluate(client or ScriptedClient(echo), "model", use_tqdm=False, **kwargs)
    )


class Table:
    """Rows as a Hugging Face `Dataset` gives them: a new mapping each time, with every column in
    every row.
    """

    def __init__(self, given):
        self._rows = given
        self._columns = list(dict.fromkeys(name for row in given for name in row))

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return {name: copy.deepcopy(self._rows[index].get(name)) for name in self._columns}


# Data


def test_a_dataset_may_be_a_table_or_a_sequence_of_mappings():
    given = [{"question": "a", "answer": "1"}, {"question": "b", "info": {"k": 1}}]
    for dataset in (given, Table(given)):
        env = SingleTurnEnv(dataset=dataset)
        assert len(env.dataset) == 2
        assert env.dataset[0] == {
            "prompt": [user("a")],
            "answer": "1",
            "example_id": 0,
            "task": "default",
        }
        assert env.dataset[1] == {
            "prompt": [user("b")],
            "info": {"k": 1},
            "example_id": 1,
            "task": "default",
        }


def test_evaluation_falls_back_on_the_rows_to_train_on():
    assert evaluated(SingleTurnEnv(dataset=rows(2))).example_id == [0, 1]
    assert [
        prompt[0]["content"]
        for prompt in evaluated(
            SingleTurnEnv(dataset=rows(2), eval_dataset=[{"question": "e"}])
        ).prompt
    ] == ["e"]


def test_without_any_data_evaluation_says_what_is_missing():
    with pytest.raises(ValueError, match="SingleTurnEnv has no dataset"):
        evaluated(SingleTurnEnv())


def test_the_first_n_rows_or_n_of_an_order_by_a_seed():
    env = SingleTurnEnv(dataset=rows(20))
    assert [row["example_id"] for row in env.get_dataset(3)] == [0, 1, 2]
    one, same, other = (
        [row["example_id"] for row in env.get_dataset(5, seed)] for seed in (1, 1, 2)
    )
    assert one == same != other
    assert len(env.get_dataset(100)) == 20


def test_a_message_type_is_chat_or_completion():
    with pytest.raises(ValueError, match="message_type: must be chat or completion, got 'text'"):
        SingleTurnEnv(message_type="text")


def test_rubric_and_environment_share_a_parser():
    parser = ThinkParser()
    assert SingleTurnEnv(parser=parser).rubric.class_objects["parser"] is parser
    assert SingleTurnEnv(rubric=Rubric(parser=parser)).parser is parser
    assert type(SingleTurnEnv().parser) is Parser


@pytest.mark.parametrize(
    "rubric_of_both", [Rubric, lambda functions: RubricGroup([Rubric(functions), Rubric()])]
)
def test_a_reward_function_gets_the_environments_parser_where_its_rubric_has_none(rubric_of_both):
    def parsed(parser, completion):
        return float(parser.parse_answer(completion) == "4")

    env = SingleTurnEnv(
        dataset=[{"question": "2 + 2"}], parser=ThinkParser(), rubric=rubric_of_both([parsed])
    )
    assert evaluated(env, ScriptedClient(["hm</think>4"])).reward == [1.0]
    own = SingleTurnEnv(
        dataset=[{"question": "2 + 2"}],
        parser=ThinkParser(),
        rubric=Rubric([parsed], parser=Parser()),
    )
    assert evaluated(own, ScriptedClient(["hm</think>4"])).reward == [0.0]


# Ids


def test_repeated_rollouts_of_an_example_are_adjacent_and_share_its_synthesized_id():
    results = evaluated(SingleTurnEnv(dataset=rows(3)), rollouts_per_example=2)
    assert results.example_id == [i // 2 for i in range(6)]
    assert [state["id"] for state in results.state] == results.example_id
    assert [prompt[0]["content"] for prompt in results.prompt] == [
        "q0",
        "q0",
        "q1",
        "q1",
        "q2",
        "q2",
    ]


@pytest.mark.parametrize("column", ["id", "example_id"])
def test_ids_of_the_data_are_repeated_with_their_rows(column):
    given = [{"question": "a", column: "x"}, {"question": "b", column: "y"}]
    results = evaluated(SingleTurnEnv(dataset=given), rollouts_per_example=2)
    assert [state["id"] for state in results.state] == results.example_id == ["x", "x", "y", "y"]


@pytest.mark.parametrize("number", [0, -1])
def test_rollouts_per_example_are_at_least_one(number):
    with pytest.raises(ValueError, match=f"rollouts_per_example: must be 1 or more, got {number}"):
        evaluated(SingleTurnEnv(dataset=rows(2)), rollouts_per_example=number)


def test_num_examples_counts_examples_and_not_rollouts():
    results = evaluated(SingleTurnEnv(dataset=rows(5)), num_examples=2, rollouts_per_example=3)
    assert len(results.state) == 6
    assert (results.metadata.num_examples, results.metadata.rollouts_per_example) == (2, 3)


# Results


def test_results_are_readable_by_key_and_by_attribute():
    results = evaluated(SingleTurnEnv(dataset=rows(2), rubric=rubric_of(said_the_answer)))
    for name in (
        "prompt",
        "completion",
        "answer",
        "state",
        "info",
        "task",
        "example_id",
        "reward",
        "metrics",
        "metadata",
    ):
        assert results[name] is getattr(results, name)
    assert (
        results.metadata.avg_reward
        == results.metadata["avg_reward"]
        == results["metadata"].avg_reward
        == 1.0
    )
    with pytest.raises(AttributeError, match="results have no 'rewards'"):
        results.rewards  # noqa: B018 - reading it is the point
    with pytest.raises(KeyError):
        results["rewards"]


def test_columns_are_filled_where_rows_have_no_answer_and_no_info():
    results = evaluated(SingleTurnEnv(dataset=[{"question": "a"}]))
    assert results.answer == [""] and results.info == [{}]


def test_an_answer_of_0_is_an_answer():
    env = SingleTurnEnv(dataset=[{"question": "1 - 1", "answer": 0}])
    results = evaluated(env)
    assert results.answer == [0] and env.make_dataset(results)["answer"][:] == [0]


def test_metadata_says_how_the_results_were_made():
    env = SingleTurnEnv(
        dataset=rows(2),
        rubric=rubric_of(said_the_answer),
        env_id="echo",
        env_args={"k": 1},
        sampling_args={"max_tokens": 8},
    )
    metadata = evaluated(env, sampling_args={"temperature": 0.5}).metadata
    assert (metadata.env_id, metadata.env_args, metadata.model) == ("echo", {"k": 1}, "model")
    assert metadata.sampling_args == {"max_tokens": 8, "temperature": 0.5}
    assert (metadata.num_errors, metadata.num_truncated, metadata.avg_metrics) == (
        0,
        0,
        {"said_the_answer": 1.0},
    )
    assert metadata.time_ms > 0 and metadata.date.startswith("2")


def test_results_can_be_pickled_and_copied():
    results = evaluated(SingleTurnEnv(dataset=rows(2)))
    for other in (pickle.loads(pickle.dumps(results)), copy.deepcopy(results)):
        assert (
            other.state == results.state
            and other.metadata.avg_reward == results.metadata.avg_reward
        )


def test_results_write_themselves_out_shortly():
    assert (
        repr(evaluated(SingleTurnEnv(dataset=rows(2))))
        == "GenerateOutputs(2 rollouts, avg_reward 0.000)"
    )


# The other names


def test_a_generate_is_generate_also_where_a_subclass_has_its_own():
    class Own(SingleTurnEnv):
        async def generate(self, *args, **kwargs):
            return "own"

    env, client = SingleTurnEnv(), ScriptedClient(echo)
    assert asyncio.run(env.a_generate(rows(2), client, "model", use_tqdm=False)).example_id == [
        0,
        1,
    ]
    assert asyncio.run(Own().a_generate(rows(2), client, "model")) == "own"


def test_generate_sync_and_evaluate_sync_need_no_event_loop():
    env, client = SingleTurnEnv(dataset=rows(2)), ScriptedClient(echo)
    assert env.generate_sync(rows(3), client, "model", use_tqdm=False).example_id == [0, 1, 2]
    assert env.evaluate_sync(client, "model", use_tqdm=False).example_id == [0, 1]


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

    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    dataset = [
        {
            "prompt": [user(f"q{i}")],
            "answer": "a",
            "info": {"tags": ["x"], "oai_tools": [tool]},
            "id": i,
        }
        for i in range(3)
    ]
    few_shot = [user("1 + 1"), assistant("2")]
    sampling_args = {
        "temperature": 0.5,
        "stop": ["x"],
        "extra_body": {"top_k": 3, "nested": {"a": [1]}},
    }
    env_args = {"k": [1]}
    env_sampling_args = {"max_tokens": 8, "extra_body": {"min_p": 0.1}}
    mine = (dataset, few_shot, sampling_args, env_args, env_sampling_args, [tool])
    before = copy.deepcopy(mine)
    env = Scribbles(
        max_turns=2,
        dataset=dataset,
        few_shot=few_shot,
        sampling_args=env_sampling_args,
        env_args=env_args,
        oai_tools=mine[-1],
        rubric=rubric_of(scribbling),
    )
    for inputs in (
        dataset,
        {"prompt": [row["prompt"] for row in dataset], "info": [row["info"] for row in dataset]},
    ):
        results = generated(
            env, inputs, ScriptedClient(lambda call: "a"), sampling_args=sampling_args
        )
        assert results.metadata.num_errors == 0, results.state[0]["error"]
        assert results.prompt[0][0]["content"] != "q0"
    evaluated(env, rollouts_per_example=2, sampling_args=sampling_args)
    assert mine == before
    assert env.oai_tools == [tool] and env.sampling_args == env_sampling_args


def test_repeated_rollouts_of_one_row_share_nothing():
    env = SingleTurnEnv(dataset=[{"question": "a", "info": {"tags": []}}])
    first, second = evaluated(env, rollouts_per_example=2).state
    first["info"]["tags"].append("x")
    first["prompt"][0]["content"] = "b"
    assert second["info"] == {"tags": []} and second["prompt"] == [user("a")]


# Saving


def test_a_folder_that_cannot_be_written_is_told_before_the_first_rollout(tmp_path):
    (tmp_path / "file").write_text("")
    client = ScriptedClient(echo)
    with pytest.raises(StorageError, match=r"cannot write .*file"):
        evaluated(SingleTurnEnv(dataset=rows(2)), client, save_path=tmp_path / "file" / "results")
    assert client.num_calls == 0


def test_a_state_column_that_no_rollout_has_is_told_and_the_results_are_saved_without_it(
    tmp_path, caplog
):
    evaluated(
        SingleTurnEnv(dataset=rows(2)),
        save_path=tmp_path,
        state_columns=["timing.total_ms", "timing.totl_ms"],
    )
    assert "no rollout has timing.totl_ms, which" in caplog.text
    saved = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(saved) == 2 and all(
        "timing.total_ms" in row and "timing.totl_ms" not in row for row in saved
    )


def test_an_evaluation_is_saved_with_its_numbers_of_examples_and_rollouts(tmp_path):
    evaluated(SingleTurnEnv(dataset=rows(2)), save_path=tmp_path, rollouts_per_example=3)
    saved = json.loads((tmp_path / "metadata.json").read_text())
    assert (saved["num_examples"], saved["rollouts_per_example"]) == (2, 3)


def test_results_are_saved_by_row_with_their_metadata(tmp_path):
    results = evaluated(SingleTurnEnv(dataset=rows(2), rubric=rubric_of(said_the_answer)))
    results.save(
        tmp_path / "new" / "folder",
        [{"example_id": 0, "reward": 1.0}, {"example_id": 1, "reward": 1.0}],
    )
    lines = (tmp_path / "new" / "folder" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["example_id"] for line in lines] == [0, 1]
    assert (
        json.loads((tmp_path / "new" / "folder" / "metadata.json").read_text())["avg_reward"] == 1.0
    )


# What would fail every rollout, or be dropped without a word


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("system_prompt", "Be brief."),
        ("few_shot", [user("q"), assistant("a")]),
        ("oai_tools", [{"type": "function", "function": {"name": "f"}}]),
    ],
)
def test_what_a_completion_is_not_sent_is_refused_by_name(name, value):
    with pytest.raises(
        ValueError,
        match=f"{name}: with message_type='completion' the model is sent the row's text alone",
    ):
        SingleTurnEnv(rows(1), message_type="completion", **{name: value})


def test_tools_of_a_row_whose_prompt_is_text_are_that_rollouts_error():
    row = {
        "prompt": "once",
        "info": {"oai_tools": [{"type": "function", "function": {"name": "f"}}]},
    }
    results = generated(
        SingleTurnEnv(message_type="completion"), [row], ScriptedClient(["upon a time"])
    )
    assert "oai_tools: with message_type='completion'" in results.state[0]["error"]


def test_a_synchronous_client_is_refused_before_any_rollout():
    with pytest.raises(
        TypeError, match=r"client: is a synchronous openai\.OpenAI; give an openai\.AsyncOpenAI"
    ):
        generated(
            SingleTurnEnv(),
            rows(2),
            openai.OpenAI(api_key="none", base_url="http://nowhere.invalid/v1"),
        )


def test_a_client_whose_calls_are_not_asynchronous_is_told_so():
    class Plain(ScriptedClient):
        class chat:  # noqa: N801 (as openai has it)
            class completions:  # noqa: N801
                @staticmethod
                def create(**arguments):
                    return "an answer"

        def __init__(self):
            pass

    results = generated(SingleTurnEnv(), rows(1), Plain())
    assert (
        "TypeError: client: calls of Plain are not asynchronous; give an openai.AsyncOpenAI"
        in results.state[0]["error"]
    )


def test_a_message_of_an_environment_without_a_role_is_told_with_who_made_it():
    class Mute(Talk):
        async def env_response(self, messages, state, **kwargs):
            return [{"content": "yes"}]

    (state,) = generated(Mute(env_id="mute"), rows(1), ScriptedClient(echo)).state
    assert (
        "what env_response of mute returned: message 0 has no role, only content; write it like"
        in state["error"]
    )
    with pytest.raises(ValueError, match="few_shot: message 0 has no role"):
        SingleTurnEnv(rows(1), few_shot=[{"content": "q"}])


def test_parts_of_another_library_are_refused_by_their_full_names():
    class Rubric:
        """One of another library."""

    with pytest.raises(
        TypeError,
        match=(
            r"rubric: is .*test_environment\..*Rubric; give a Rubric of"
            r" rollout_actors\.environments"
        ),
    ):
        SingleTurnEnv(rows(1), rubric=Rubric())
    with pytest.raises(
        TypeError,
        match=(
            r"envs: has .*test_environment\..*Rubric; put environments of"
            r" rollout_actors\.environments into a group"
        ),
    ):
        EnvGroup([SingleTurnEnv(rows(1)), Rubric()])
