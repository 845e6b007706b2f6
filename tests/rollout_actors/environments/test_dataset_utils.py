"""From results to a dataset (spec: orchestration, dataset construction and sanitization, and its
testing plan).
"""

import datasets
import numpy as np
import pytest
from scripted_client import Answer, ScriptedClient

from rollout_actors.environments.chat.messages import cleanup_messages
from rollout_actors.environments.datasets import (
    build_dataset_from_outputs,
    plain,
    sanitize_messages,
)
from rollout_actors.environments.multi_turn import MultiTurnEnv, SingleTurnEnv
from rollout_actors.environments.rubric import Rubric

CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


class UsesTools(MultiTurnEnv):
    """Answers every call of a tool with 2."""

    async def env_response(self, messages, state, **kwargs):
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": "2"}
            for call in messages[-1]["tool_calls"]
        ]


def results_of(rows, script, environment=None, **arguments):
    environment = environment or SingleTurnEnv(dataset=rows, rubric=Rubric([exact]))
    client = ScriptedClient(script)
    return environment, environment.generate_sync(rows, client, "m", use_tqdm=False, **arguments)


def echoed(rows, **changes):
    return results_of(rows, lambda call: call.text, **changes)


def test_make_dataset_includes_id_when_available():
    rows = [{"id": "x", "question": "a"}, {"id": "y", "question": "b"}]
    environment, results = echoed(rows)
    table = environment.make_dataset(results)
    assert table["id"][:] == table["example_id"][:] == ["x", "y"]
    without = environment.make_dataset(results, include_ids=False)
    assert not {"id", "example_id"} & set(without.column_names)
    synthesized, results = echoed([{"question": "a"}, {"question": "b"}])
    assert synthesized.make_dataset(results)["id"][:] == [0, 1]


def test_make_dataset_has_prompt_completion_answer_task_reward_and_a_column_per_metric():
    row = {"question": "b", "answer": "c", "task": "letters"}
    environment, results = echoed([{**row, "answer": "b"}, row])
    table = environment.make_dataset(results)
    expected = {
        "id": 1,
        "example_id": 1,
        "prompt": [{"role": "user", "content": "b"}],
        "completion": [{"role": "assistant", "content": "b"}],
        "answer": "c",
        "task": "letters",
        "reward": 0.0,
        "exact": 0.0,
    }
    assert (table.column_names, list(table)[1]) == (list(expected), expected)


def test_answer_and_info_are_columns_only_where_a_row_has_them():
    environment = SingleTurnEnv(dataset=[])
    _, results = echoed([{"question": "a"}], environment=environment)
    assert not {"answer", "info"} & set(build_dataset_from_outputs(results).column_names)
    rows = [{"question": "a"}, {"question": "b", "info": {"k": 1}}]
    _, results = echoed(rows, environment=environment)
    assert list(build_dataset_from_outputs(results)["info"]) == [{}, {"k": 1}]


def test_make_dataset_applies_sanitation_to_both_prompt_and_completion():
    asks = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_0", "content": "2"},
    ]
    rows = [{"prompt": asks, "answer": "2"}]
    script = [Answer(tool_calls=[("add", {"a": [1]}), ("sub", {"b": "c"})]), "2"]
    environment = UsesTools(dataset=rows, rubric=Rubric([exact]), max_turns=2)
    _, results = results_of(rows, script, environment)
    [row] = environment.make_dataset(results)
    messages = [*row["prompt"], *row["completion"]]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    assert [type(call) for call in calls] == [str, str, str]
    # What is stored is what was said: it can be sent again.
    assert cleanup_messages(row["prompt"]) == asks
    assert cleanup_messages(row["completion"]) == results.completion[0]
    assert results.completion[0][0]["tool_calls"][0]["function"]["name"] == "add"


def test_sanitize_messages_leaves_its_argument_as_it_is_and_is_the_same_twice():
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "user", "content": "a", "tool_calls": None},
    ]
    once = sanitize_messages(messages)
    assert messages[0]["tool_calls"] == [CALL]
    assert sanitize_messages(once) == once
    assert "tool_calls" not in once[1]


def test_make_dataset_extracts_requested_state_columns_by_dotted_paths():
    environment, results = echoed([{"question": "a"}, {"question": "b"}])
    results.state[1]["letters"] = 2
    columns = ["timing", "timing.total_ms", "stop_condition", "trajectory", "letters"]
    row, other = environment.make_dataset(results, state_columns=columns)
    assert row["timing"] == results.state[0]["timing"]
    assert row["timing.total_ms"] == row["timing"]["total_ms"] > row["timing"]["scoring_ms"] > 0
    assert row["stop_condition"] == "max_turns_reached"
    assert row["trajectory"][0]["completion"] == [{"role": "assistant", "content": "a"}]
    assert (row["letters"], other["letters"]) == (None, 2)
    assert "timing" not in environment.make_dataset(results).column_names


def test_id_and_timing_are_recorded_per_rollout_and_are_available_for_inclusion_in_datasets():
    environment, results = echoed([{"question": "a", "id": "x"}, {"question": "b", "id": "y"}])
    table = environment.make_dataset(results, state_columns=["timing"])
    assert table["id"][:] == [state["id"] for state in results.state] == ["x", "y"]
    assert table["timing"][:] == [state["timing"] for state in results.state]


@pytest.mark.parametrize(
    ("columns", "error", "problem"),
    [
        (
            ["timing.totl_ms"],
            KeyError,
            "state column 'timing.totl_ms': timing has no 'totl_ms', only generation_ms, scoring_ms",
        ),
        (
            ["reward.mean"],
            KeyError,
            "state column 'reward.mean': reward has no 'mean', only a float",
        ),
        (
            "timing.total_ms",
            TypeError,
            r"must be a list of names, got the text 'timing.total_ms'; give \['timing.total_ms'\]",
        ),
    ],
)
def test_a_state_column_that_no_state_has_is_refused_with_what_there_is_and_so_is_one_text(
    columns, error, problem
):
    environment, results = echoed([{"question": "a"}])
    for build in (environment.make_dataset, build_dataset_from_outputs):
        with pytest.raises(error, match=problem):
            build(results, state_columns=columns)


def test_a_failed_rollout_is_a_row():
    rows = [{"question": "a", "answer": "a"}, {"question": "b", "answer": "b"}]
    script = {"a": "a", "b": ValueError("no")}
    environment, results = results_of(rows, lambda call: script[call.text])
    table = environment.make_dataset(results, state_columns=["error"])
    assert [(row["reward"], row["completion"], row["error"]) for row in table] == [
        (1.0, [{"role": "assistant", "content": "a"}], None),
        (0.0, [], "ValueError: no"),
    ]


def test_make_dataset_and_save_path_have_one_schema(tmp_path):
    columns = ["timing.total_ms"]
    rows = [{"question": "a", "answer": "a"}]
    environment, results = echoed(rows, save_path=tmp_path, state_columns=columns)
    saved = datasets.Dataset.from_json(str(tmp_path / "results.jsonl"))
    table = environment.make_dataset(results, state_columns=columns)
    assert saved.column_names == table.column_names


def test_a_push_goes_to_the_hubs_own_method_with_the_datasets_name(monkeypatch):
    pushed = []
    push = lambda self, repo_id: pushed.append((repo_id, list(self)))  # noqa: E731
    monkeypatch.setattr(datasets.Dataset, "push_to_hub", push)
    environment = SingleTurnEnv(dataset=[], env_id="letters")
    _, results = echoed([{"question": "a"}], environment=environment)
    rows = list(environment.make_dataset(results, push_to_hf_hub=True, hub_name="me/letters"))
    environment.make_dataset(results, push_to_hf_hub=True)
    assert pushed == [("me/letters", rows), ("letters-results", rows)]


def test_plain_has_a_form_for_everything(tmp_path):
    value = {1: (np.float32(0.5), np.arange(2)), "set": {3}, "path": tmp_path}
    assert plain(value) == {"1": [0.5, [0, 1]], "set": [3], "path": str(tmp_path)}
    assert plain(ScriptedClient(["a"])).startswith("<")
