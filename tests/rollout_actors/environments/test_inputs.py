"""From rows to what rollouts begin with."""

import copy

import datasets
import numpy as np
import pytest
from environment_support import assistant, user

from rollout_actors.environments.datasets import (
    Examples,
    PromptFormat,
    check_one_row_per_id,
    to_rows,
    with_positions,
)


def inputs(rows, **form):
    return list(Examples(to_rows(rows), PromptFormat(**form)))


def test_a_question_becomes_a_users_message():
    assert inputs([{"question": "2 + 2"}])[0]["prompt"] == [user("2 + 2")]


def test_the_system_prompt_and_the_examples_come_in_front_of_the_question():
    few_shot = (user("1 + 1"), assistant("2"))
    made = inputs([{"question": "2 + 2"}], system_prompt="Add.", few_shot=few_shot)
    assert made[0]["prompt"] == [{"role": "system", "content": "Add."}, *few_shot, user("2 + 2")]


def test_a_prompt_wins_over_a_question_and_over_the_system_prompt_where_it_has_its_own():
    own = [{"role": "system", "content": "Mine."}, user("a")]
    assert inputs([{"prompt": own, "question": "b"}], system_prompt="Add.")[0]["prompt"] == own


def test_a_prompt_of_completion_type_is_text():
    assert inputs([{"prompt": "Once"}], message_type="completion")[0]["prompt"] == "Once"
    with pytest.raises(ValueError, match="must be text"):
        inputs([{"prompt": [user("a")]}], message_type="completion")


def test_ids_are_synthesized_from_0_where_a_row_has_none():
    assert [row["example_id"] for row in inputs([{"question": "a"}] * 3)] == [0, 1, 2]


@pytest.mark.parametrize("column", ["id", "example_id"])
def test_ids_that_rows_have_are_carried_through(column):
    assert [
        row["example_id"]
        for row in inputs([{"question": "a", column: "x"}, {"question": "b", column: 9}])
    ] == ["x", 9]


def test_example_id_is_canonical_where_a_row_has_both():
    both = inputs([{"question": "a", "id": 1, "example_id": 2}])[0]
    assert (both["example_id"], both["id"]) == (2, 1)
    assert "id" not in inputs([{"question": "a", "example_id": 2}])[0]


def test_a_selection_keeps_the_ids_of_its_rows():
    examples = Examples([{"question": str(i)} for i in range(4)], PromptFormat())
    assert [row["example_id"] for row in examples.select([2, 2, 0])] == [2, 2, 0]
    assert [row["example_id"] for row in examples[1:3]] == [1, 2]
    assert [row["example_id"] for row in examples.select([3, 1]).select([1, 0, 1])] == [1, 3, 1]


def test_a_row_with_neither_prompt_nor_question_is_refused_with_its_number():
    with pytest.raises(ValueError, match="row 1 has neither prompt nor question, only answer"):
        inputs([{"question": "a"}, {"answer": "b"}])


def test_answer_and_info_are_optional_and_a_task_has_a_default():
    assert set(inputs([{"question": "a", "answer": None, "info": None}])[0]) == {
        "prompt",
        "example_id",
        "task",
    }
    assert inputs([{"question": "a"}], task="sums")[0]["task"] == "sums"
    assert inputs([{"question": "a", "task": "own"}], task="sums")[0]["task"] == "own"


def test_columns_are_rows():
    made = inputs({"question": ["a", "b"], "answer": ["1", "2"]})
    assert [(row["prompt"][0]["content"], row["answer"]) for row in made] == [
        ("a", "1"),
        ("b", "2"),
    ]


def test_columns_of_prompts_are_rows_for_messages_and_for_text():
    assert [row["prompt"] for row in inputs({"prompt": [[user("a")], [user("b")]]})] == [
        [user("a")],
        [user("b")],
    ]
    assert [row["prompt"] for row in inputs({"prompt": ["a", "b"]}, message_type="completion")] == [
        "a",
        "b",
    ]


def test_rows_of_a_generator_are_rows():
    assert [row["prompt"] for row in inputs({"question": text} for text in "ab")] == [
        [user("a")],
        [user("b")],
    ]


@pytest.mark.parametrize("given", ["What is 2 + 2?", 7, None])
def test_what_is_no_rows_is_refused_with_what_it_must_be(given):
    with pytest.raises(
        TypeError,
        match=(
            "inputs: must be a dataset, rows, one row, or a mapping of columns, got"
            f" {type(given).__name__}"
        ),
    ):
        inputs(given)


def test_columns_of_different_lengths_are_refused_with_their_lengths():
    with pytest.raises(ValueError, match=r"question 2, answer 1"):
        inputs({"question": ["a", "b"], "answer": ["1"]})


@pytest.mark.parametrize(
    "given", [{"answer": 5}, {"answer": ["1", "2"], "prompt": None}, {"answer": "1"}]
)
def test_a_mapping_with_neither_prompt_nor_question_is_refused_with_what_it_has(given):
    with pytest.raises(
        ValueError, match=r"inputs: neither prompt nor question, only answer; give one of the two"
    ):
        inputs(given)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("abc", "str"),
        (7, "int"),
        ({"a": 1, "b": 2, "c": 3}, "dict"),
        (iter("abc"), "str_.*iterator"),
        ({"x", "y", "z"}, "set"),
    ],
)
def test_what_is_no_list_beside_columns_is_refused_with_the_remedy(wrong, kind):
    with pytest.raises(
        TypeError, match=rf"inputs: task must be a list with one for each row, got {kind}"
    ):
        inputs({"prompt": [[user("a")], [user("b")], [user("c")]], "task": wrong})


@pytest.mark.parametrize("key", ["prompt", "question"])
def test_a_prompt_that_is_neither_one_nor_a_column_is_refused_with_what_it_must_be(key):
    with pytest.raises(
        TypeError, match=f"inputs: {key} must be a list with one for each row, got int"
    ):
        inputs({key: 5, "answer": "1"})


def test_columns_of_a_table_are_columns():
    table = datasets.Dataset.from_list(
        [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
    )
    made = inputs({"question": table["question"], "answer": table["answer"]})
    assert [(row["prompt"][0]["content"], row["answer"]) for row in made] == [
        ("a", "1"),
        ("b", "2"),
    ]


def test_what_an_input_holds_is_not_the_rows_own():
    row = {
        "prompt": [user("a"), {"role": "user", "content": [{"type": "text", "text": "b"}]}],
        "info": {"k": [1]},
        "answer": ["x"],
    }
    before = copy.deepcopy(row)
    made = inputs([row])[0]
    made["prompt"][1]["content"][0]["text"] = "changed"
    made["prompt"][0]["content"] = "changed"
    made["prompt"].append(user("more"))
    made["info"]["k"].append(2)
    made["answer"].append("y")
    assert row == before


def test_inputs_without_a_position_get_their_place_and_nothing_of_the_callers_is_written_to():
    given = [
        {"prompt": [], "example_id": "x", "task": "t"},
        {"prompt": [], "example_id": "y", "task": "t", "position": 7},
    ]
    before = copy.deepcopy(given)
    assert [one["position"] for one in with_positions(given)] == [0, 7] and given == before


def tool(name, parameter):
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "integer"}},
        "required": [parameter],
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_a_rows_own_tools_come_out_of_a_table_as_they_were_put_in_and_the_rest_of_its_info_as_the_table_has_it():
    own = [[tool("f", "x")], [tool("g", "y")]]
    table = datasets.Dataset.from_list(
        [
            {"question": "a", "info": {"oai_tools": own[0], "told": {"a": 1}}},
            {"question": "b", "info": {"oai_tools": own[1], "told": {"b": 2}}},
        ]
    )
    assert [row["info"] for row in inputs(table)] == [
        {"oai_tools": own[0], "told": {"a": 1, "b": None}},
        {"oai_tools": own[1], "told": {"a": None, "b": 2}},
    ]


def require(*rows):
    examples = Examples(rows, PromptFormat())
    check_one_row_per_id(examples, with_positions(examples))


ONE, OTHER = {"question": "1 + 1", "id": 7}, {"question": "2 + 2", "id": 7}


def test_an_id_that_two_different_rows_have_is_refused_because_they_would_be_one_group():
    with pytest.raises(
        ValueError,
        match=(
            r"id: inputs 0 and 2 both have 7 and are different rows, .*; give every row an id of"
            r" its own"
        ),
    ):
        require(ONE, {"question": "?", "id": 8}, OTHER)
    for field in ("answer", "info"):
        with pytest.raises(ValueError, match="inputs 0 and 1 both have 7"):
            require(ONE | {field: {"k": 2}}, ONE | {field: {"k": 3}})
    require(ONE, ONE, ONE | {"position": 5}, {"question": "?", "id": 8})
    require(ONE, OTHER | {"task": "another"})
    require({"question": "?"}, {"question": "!"})
    # Who names the group himself compares different rows on purpose.
    require(ONE | {"example_id": 0}, OTHER | {"example_id": 0})
    require({"question": "?", "example_id": "g"}, {"question": "!", "example_id": "g"})


@pytest.mark.parametrize("named", [{"id": 1}, {"example_id": 1}])
def test_a_row_without_an_id_whose_number_is_anothers_is_refused(named):
    told = (
        r"id: inputs 0 and 1 both have 1 \(input 1 by its number in the data, for it has none\) and"
        r" are different rows"
    )
    with pytest.raises(ValueError, match=told):
        require({"question": "a"} | named, {"question": "b"})
    require({"question": "a"} | named, {"question": "a"})
    require({"question": "a", "id": "x"}, {"question": "b"})


@pytest.mark.parametrize("column", ["id", "example_id"])
@pytest.mark.parametrize("nan", [float("nan"), np.float32("nan")], ids=["python", "numpy"])
def test_an_id_that_is_nan_is_refused_by_row(column, nan):
    with pytest.raises(
        ValueError,
        match=f"^{column}: of row 1 is NaN; give every row one, or leave the column out$",
    ):
        inputs([{"question": "a", column: 1.0}, {"question": "b", column: nan}])


def test_rows_with_arrays_are_compared_by_what_is_in_them():
    one, same, other = (
        {"question": "q", "id": 7, "answer": np.array(values), "info": {"boxes": [np.arange(2)]}}
        for values in ([1, 2], [1, 2], [1, 3])
    )
    require(one, same)
    with pytest.raises(ValueError, match="inputs 0 and 1 both have 7"):
        require(one, other)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([{"content": "hi"}], "message 0 has no role, only content"),
        (
            [{"role": "system", "content": "hi"}, {"role": None, "content": "hi"}],
            "message 1 has no role, only role, content",
        ),
        (["hi"], "message 0 is str"),
        ({"role": "user", "content": "hi"}, "is dict, not a list of messages"),
        (3, "is int, not a list of messages"),
    ],
)
def test_a_prompt_that_is_no_conversation_is_refused_with_its_row_and_the_remedy(prompt, problem):
    examples = Examples([{"question": "fine"}, {"prompt": prompt}], PromptFormat())
    with pytest.raises(
        ValueError, match=r"^row 1: prompt.*write it like {\"role\": \"user\""
    ) as caught:
        examples[1]
    assert problem in str(caught.value)
