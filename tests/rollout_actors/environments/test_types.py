"""`State`: the fields of its input look like its own, however it is read (spec: trajectories, state
structure).
"""

import copy
import json
import pickle
from typing import Any

import pytest

from rollout_actors.environments.types import State

INPUT = {
    "prompt": [{"role": "user", "content": "2 + 2"}],
    "answer": "4",
    "task": "sums",
    "info": {"k": [1]},
    "example_id": 7,
}
EVERYTHING = {"input": INPUT, **INPUT, "turn": 1}


def state(**more: Any) -> State:
    return State(input=copy.deepcopy(INPUT), **more)


def test_the_input_fields_are_those_of_the_document():
    assert State.INPUT_FIELDS == ["prompt", "answer", "task", "info", "example_id"]


@pytest.mark.parametrize("field", State.INPUT_FIELDS)
def test_reading_and_writing_an_input_field_reads_and_writes_the_input(field):
    one = state()
    assert one[field] is one.get(field) is one["input"][field]
    assert field in one
    one[field] = "other"
    assert one["input"][field] == one[field] == "other"


def test_without_an_input_a_state_is_a_plain_dictionary():
    one = State(prompt="p", answer="a")
    assert dict(one) == {"prompt": "p", "answer": "a"}
    assert one["prompt"] == "p" and list(one) == ["prompt", "answer"]


def test_a_field_that_the_input_does_not_have_is_missing_and_one_that_is_none_is_there():
    one = State(input={"prompt": "p", "example_id": 0, "task": None})
    assert "answer" not in one
    assert (one.get("answer"), one.get("answer", "none")) == (None, "none")
    with pytest.raises(KeyError, match="answer"):
        one["answer"]
    assert "task" in one and one.get("task", "other") is None
    one["answer"] = "a"
    assert one["input"]["answer"] == "a" and "answer" in one


def test_forwarding_holds_for_iteration_length_keys_values_and_items():
    one = state(turn=1)
    assert sorted(one) == sorted(one.keys()) == sorted(EVERYTHING)
    assert len(one) == len(list(one.values())) == len(EVERYTHING)
    assert {key: value for key, value in one.items()} == EVERYTHING  # noqa: C416 - of `items` alone


def test_forwarding_holds_for_dict_unpacking_and_json():
    one = state(turn=1)
    assert dict(one) == {**one} == json.loads(json.dumps(one)) == EVERYTHING


class Richer(State):
    pass


SHALLOW = [State.copy, copy.copy]
DEEP = [
    copy.deepcopy,
    *(
        lambda one, protocol=protocol: pickle.loads(pickle.dumps(one, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
]


@pytest.mark.parametrize("kind", [State, Richer])
@pytest.mark.parametrize("copied", [*SHALLOW, *DEEP])
def test_a_copy_forwards_and_writing_to_it_leaves_the_first_as_it_is(copied, kind):
    one = kind(state(turn=1))
    other = copied(one)
    assert type(other) is kind and dict(other) == EVERYTHING
    other.update(answer="5", turn=2)
    if copied not in SHALLOW:
        other["info"]["k"].append(2)
    assert other["answer"] == other["input"]["answer"] == "5"
    assert dict(one) == EVERYTHING


def test_removing_forwards_too():
    one = state(turn=1)
    assert one.pop("answer") == "4"
    assert "answer" not in one and "answer" not in one["input"]
    assert one.pop("answer", None) is None
    del one["info"]
    assert "info" not in one["input"]
    with pytest.raises(KeyError):
        del one["info"]
    with pytest.raises(KeyError):
        one.pop("info")


def test_update_setdefault_and_joining_forward_too():
    one = state()
    one.update(answer="5", turn=2)
    one |= {"task": "other"}
    assert (one["input"]["answer"], one["input"]["task"], one["turn"]) == ("5", "other", 2)
    assert one.setdefault("answer", "6") == "5"
    joined = one | {"answer": "7"}
    assert type(joined) is State and joined["input"]["answer"] == "7" and one["answer"] == "5"
