"""From rows to what rollouts begin with."""

import json
import math

import datasets
import numpy as np
import pandas
import pytest
from environment_support import assistant, generated, user
from scripted_client import ScriptedClient

from rollout_actors.environments.datasets import (
    Examples,
    PromptFormat,
    check_one_row_per_id,
    to_rows,
    with_positions,
)
from rollout_actors.environments.multi_turn import SingleTurnEnv

SYSTEM = {"role": "system", "content": "Add."}
FEW_SHOT = (user("1 + 1"), assistant("2"))
MINE = [{"role": "system", "content": "Mine."}, user("a")]


def inputs(rows, **form):
    return list(Examples(to_rows(rows), PromptFormat(**form)))


def ids(rows):
    return [row["example_id"] for row in rows]


@pytest.mark.parametrize(
    ("row", "form", "prompt"),
    [
        ({"question": "a"}, {}, [user("a")]),
        (
            {"question": "a"},
            {"system_prompt": "Add.", "few_shot": FEW_SHOT},
            [SYSTEM, *FEW_SHOT, user("a")],
        ),
        ({"prompt": MINE, "question": "b"}, {"system_prompt": "Add."}, MINE),
        ({"prompt": "Once"}, {"message_type": "completion"}, "Once"),
        ({"prompt": [], "question": "a"}, {}, [user("a")]),
        ({"prompt": "", "question": "a"}, {}, [user("a")]),
    ],
    ids=[
        *("a question", "behind system prompt and examples", "a prompt wins over both", "text"),
        *("an empty list beside a question", "an empty text beside a question"),
    ],
)
def test_a_row_becomes_a_prompt(row, form, prompt):
    assert inputs([row], **form)[0]["prompt"] == prompt


@pytest.mark.parametrize(
    ("row", "form", "problem"),
    [
        ({"prompt": [user("a")]}, {"message_type": "completion"}, "must be text"),
        ({"answer": "b"}, {}, "row 1 has neither prompt nor question, only answer"),
    ],
)
def test_a_row_that_is_no_prompt_is_refused(row, form, problem):
    with pytest.raises(ValueError, match=problem):
        inputs([{"question": "a"}, row], **form)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([{"content": "hi"}], "message 0 has no role, only content"),
        ([SYSTEM, {"role": None, "content": "hi"}], "message 1 has no role, only role, content"),
        (["hi"], "message 0 is str"),
        ({"role": "user", "content": "hi"}, "is dict, not text or a list of messages"),
        (3, "is int, not text or a list of messages"),
    ],
)
@pytest.mark.parametrize("column", ["prompt", "question"])
def test_a_prompt_that_is_no_conversation_is_refused_with_its_row_and_the_remedy(
    column, prompt, problem
):
    examples = Examples([{"question": "fine"}, {column: prompt}], PromptFormat())
    with pytest.raises(ValueError, match=f"^row 1: {column}") as caught:
        examples[1]
    assert problem in str(caught.value)
    assert 'write it like {"role": "user", "content": "..."}' in str(caught.value)


def test_a_role_that_chat_templates_do_not_know_is_refused_with_those_that_they_know():
    problem = "^row 0: prompt: message 1 has the unknown role 'human'; use one of system, .*, user"
    with pytest.raises(ValueError, match=problem):
        inputs([{"prompt": [SYSTEM, {"role": "human", "content": "hi"}]}])


# Ids


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{}, {}, {}], [0, 1, 2]),
        ([{"id": "x"}, {"id": 9}], ["x", 9]),
        ([{"example_id": "x"}, {"example_id": 9}], ["x", 9]),
        ([{"id": 1, "example_id": 2}], [2]),
    ],
    ids=["synthesized", "id", "example_id", "both"],
)
def test_example_id_is_canonical_where_a_row_has_both_and_is_synthesized_where_it_has_none(
    given, expected
):
    rows = inputs([{"question": "a", **one} for one in given])
    assert ids(rows) == expected
    assert [row.get("id") for row in rows] == [one.get("id") for one in given]


@pytest.mark.parametrize("column", ["id", "example_id"])
@pytest.mark.parametrize("nan", [float("nan"), np.float32("nan")], ids=["python", "numpy"])
def test_an_id_that_is_nan_is_refused_by_row(column, nan):
    problem = f"^{column}: NaN in row 1; give every row a value, or leave the column out$"
    with pytest.raises(ValueError, match=problem):
        inputs([{"question": "a", column: 1.0}, {"question": "b", column: nan}])


def test_a_nan_of_a_table_is_a_gap_and_no_file_has_one(tmp_path):
    nan = float("nan")
    rows = [
        {"question": "a", "answer": "1", "info": {"level": nan, "tags": ["x", nan]}},
        {"question": "b", "answer": np.float32("nan"), "task": nan},
        {"question": "c", "info": '{"level": NaN, "most": Infinity}'},
    ]
    first, second, _ = inputs(rows)
    assert first["info"] == {"level": None, "tags": ["x", None]}
    assert ("answer" in second, second["task"]) == (False, "default")
    with pytest.raises(ValueError, match=r"row 0: .*NaN"):
        inputs([{"question": nan}])

    class Notes(SingleTurnEnv):
        async def setup_state(self, state):
            state["note"] = math.inf
            return state

    results = generated(
        Notes(),
        rows,
        ScriptedClient(lambda call: call.text),
        state_columns=["note"],
        save_path=tmp_path,
    )
    assert results.state[2]["info"] == {"level": None, "most": None}

    def refuse(constant):
        raise AssertionError(constant)

    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    saved = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [row["note"] for row in saved] == [None] * 3


def check(*rows):
    examples = Examples(rows, PromptFormat())
    check_one_row_per_id(examples, with_positions(examples))


ONE, OTHER = {"question": "1 + 1", "id": 7}, {"question": "2 + 2", "id": 7}
BY_NUMBER = r"1 \(input 1 has no id, so its row number is used\) but are different rows"


def with_array(*values):
    answer = np.array(values)
    return {"question": "q", "id": 7, "answer": answer, "info": {"boxes": [np.arange(2)]}}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            [ONE, {"question": "?", "id": 8}, OTHER],
            "0 and 2 both have 7 but are different rows, .*; give every row its own id",
        ),
        ([ONE | {"answer": {"k": 2}}, ONE | {"answer": {"k": 3}}], "0 and 1 both have 7"),
        ([ONE | {"info": {"k": 2}}, ONE | {"info": {"k": 3}}], "0 and 1 both have 7"),
        ([with_array(1, 2), with_array(1, 3)], "0 and 1 both have 7"),
        ([{"question": "a", "id": 1}, {"question": "b"}], f"0 and 1 both have {BY_NUMBER}"),
        ([{"question": "a", "example_id": 1}, {"question": "b"}], f"0 and 1 both have {BY_NUMBER}"),
    ],
)
def test_an_id_that_two_different_rows_have_is_refused_because_they_would_be_one_group(
    rows, problem
):
    with pytest.raises(ValueError, match=f"id: inputs {problem}"):
        check(*rows)


@pytest.mark.parametrize(
    "rows",
    [
        [ONE, ONE, ONE | {"position": 5}, {"question": "?", "id": 8}],
        [ONE, OTHER | {"task": "another"}],
        [{"question": "?"}, {"question": "!"}],
        [with_array(1, 2), with_array(1, 2)],
        [{"question": "a", "id": 1}, {"question": "a"}],
        [{"question": "a", "example_id": 1}, {"question": "a"}],
        [{"question": "a", "id": "x"}, {"question": "b"}],
        # Who names the group himself compares different rows on purpose.
        [ONE | {"example_id": 0}, OTHER | {"example_id": 0}],
        [{"question": "?", "example_id": "g"}, {"question": "!", "example_id": "g"}],
    ],
)
def test_one_row_may_be_there_often_and_a_named_group_may_have_different_ones(rows):
    check(*rows)


# Other columns


def test_answer_and_info_are_optional_and_a_task_has_a_default():
    (bare,) = inputs([{"question": "a", "answer": None, "info": None}])
    assert set(bare) == {"prompt", "example_id", "task"}
    given = [{"question": "a", "task": task} for task in (None, "", "own", 0)]
    assert [row["task"] for row in inputs(given, task="sums")] == ["sums", "sums", "own", "0"]


def tool(name, parameter):
    integer = {parameter: {"type": "integer"}}
    parameters = {"type": "object", "properties": integer, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_a_rows_own_tools_come_out_of_a_table_as_they_were_put_in_and_the_rest_of_its_info_as_the_table_has_it():
    first, second = [tool("f", "x")], [tool("g", "y")]
    table = datasets.Dataset.from_list(
        [
            {"question": "a", "info": {"oai_tools": first, "more": {"a": 1}}},
            {"question": "b", "info": {"oai_tools": second, "more": {"b": 2}}},
        ]
    )
    assert [row["info"] for row in inputs(table)] == [
        {"oai_tools": first, "more": {"a": 1, "b": None}},
        {"oai_tools": second, "more": {"a": None, "b": 2}},
    ]


# Columns, and other forms of rows

TABLE = datasets.Dataset.from_list([{"question": "a"}, {"question": "b"}])


@pytest.mark.parametrize(
    ("given", "form", "prompts"),
    [
        ({"question": ["a", "b"]}, {}, [[user("a")], [user("b")]]),
        ({"question": TABLE["question"]}, {}, [[user("a")], [user("b")]]),
        ({"prompt": [[user("a")], [user("b")]]}, {}, [[user("a")], [user("b")]]),
        ({"prompt": ["a", "b"]}, {"message_type": "completion"}, ["a", "b"]),
    ],
    ids=["questions", "columns of a table", "conversations", "texts"],
)
def test_columns_are_rows(given, form, prompts):
    rows = inputs({**given, "answer": ["1", "2"]}, **form)
    assert [row["prompt"] for row in rows] == prompts
    assert [row["answer"] for row in rows] == ["1", "2"]


def test_a_data_frame_is_a_dataset_whose_gaps_are_missing_values():
    rows = [{"question": "a", "id": 7}, {"question": "b", "id": 8, "answer": "2"}]
    assert inputs(pandas.DataFrame(rows)) == inputs(rows)


THREE = {"prompt": [[user("a")], [user("b")], [user("c")]]}
NO_ROWS = "inputs: must be a dataset, rows, one row, or a mapping of columns, got"
NO_PROMPT = "inputs: neither prompt nor question, only answer; give one of the two"
NO_LIST = "inputs: {} must be a list with one value per row, got {}"


@pytest.mark.parametrize(
    ("given", "error", "problem"),
    [
        ("What is 2 + 2?", TypeError, f"{NO_ROWS} str"),
        (7, TypeError, f"{NO_ROWS} int"),
        (None, TypeError, f"{NO_ROWS} NoneType"),
        ({"question": ["a", "b"], "answer": ["1"]}, ValueError, "question 2, answer 1"),
        ({"answer": 5}, ValueError, NO_PROMPT),
        ({"answer": ["1", "2"], "prompt": None}, ValueError, NO_PROMPT),
        ({"answer": "1"}, ValueError, NO_PROMPT),
        ({"prompt": 5, "answer": "1"}, TypeError, NO_LIST.format("prompt", "int")),
        ({"question": 5, "answer": "1"}, TypeError, NO_LIST.format("question", "int")),
        *(
            ({**THREE, "task": wrong}, TypeError, NO_LIST.format("task", kind))
            for wrong, kind in (
                ("abc", "str"),
                (7, "int"),
                ({"a": 1, "b": 2, "c": 3}, "dict"),
                (iter("abc"), "str_.*iterator"),
                ({"x", "y", "z"}, "set"),
            )
        ),
    ],
)
def test_what_is_no_rows_is_refused_with_what_it_must_be(given, error, problem):
    with pytest.raises(error, match=problem):
        inputs(given)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("rows.jsonl", "str"),
        ({"question": ["a", "b"]}, "dict"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(MINE)}), "DatasetDict"),
        (datasets.Dataset.from_list(MINE).to_iterable_dataset(), "IterableDataset"),
        (iter(MINE), "list_iterator"),
    ],
)
@pytest.mark.parametrize("column", ["dataset", "eval_dataset"])
def test_a_dataset_without_rows_by_number_is_refused_with_the_remedies(given, kind, column):
    problem = f"dataset: must be a datasets.Dataset, .* got {kind}; .*, choose a split"
    with pytest.raises(TypeError, match=problem):
        SingleTurnEnv(**{column: given})


def test_a_row_that_is_no_mapping_is_refused_by_its_number():
    with pytest.raises(ValueError, match="row 1 is str; write rows like"):
        inputs([{"question": "a"}, "What is 2 + 2?"])


def test_columns_that_no_reward_function_gets_are_named_once_for_all_rows(caplog):
    rows = [{"question": q, "solution": "4", "level": 1, "id": q, "info": {}} for q in "abc"]
    assert all("solution" not in row for row in inputs(rows))
    (warning,) = caplog.messages
    assert warning.startswith("columns level, solution of the dataset are not used")
    inputs([{"question": "a", "answer": "1", "task": "t", "example_id": 0, "position": 1}])
    assert len(caplog.messages) == 1
