"""`State`: the fields of its input look like its own, however it is read (spec: trajectories, state
structure).
"""

import copy
import json
import pickle
from typing import Any

import pytest

from rollout_actors.environments.types import State


def state(**more: Any) -> State:
    return State(
        input={
            "prompt": [{"role": "user", "content": "2 + 2"}],
            "answer": "4",
            "task": "sums",
            "info": {"k": [1]},
            "example_id": 7,
        },
        **more,
    )


EVERYTHING = {
    "input": {
        "prompt": [{"role": "user", "content": "2 + 2"}],
        "answer": "4",
        "task": "sums",
        "info": {"k": [1]},
        "example_id": 7,
    },
    "prompt": [{"role": "user", "content": "2 + 2"}],
    "answer": "4",
    "task": "sums",
    "info": {"k": [1]},
    "example_id": 7,
    "turn": 1,
}


def test_the_input_fields_are_those_of_the_document():
    assert State.INPUT_FIELDS == ["prompt", "answer", "task", "info", "example_id"]


@pytest.mark.parametrize("field", State.INPUT_FIELDS)
def test_reading_an_input_field_reads_the_input(field):
    one = state()
    assert one[field] is one["input"][field]
    assert one.get(field) is one["input"][field]
    assert field in one


@pytest.mark.parametrize("field", State.INPUT_FIELDS)
def test_writing_an_input_field_writes_the_input(field):
    one = state()
    one[field] = "other"
    assert one["input"][field] == "other"
    assert one[field] == "other"


def test_writing_an_input_field_that_the_input_lacks_adds_it_there():
    one = State(input={"prompt": "p", "example_id": 0, "task": "t"})
    one["answer"] = "a"
    assert one["input"]["answer"] == "a" and "answer" in one


def test_without_an_input_a_state_is_a_plain_dictionary():
    one = State(prompt="p", answer="a")
    assert dict(one) == {"prompt": "p", "answer": "a"}
    assert one["prompt"] == "p" and list(one) == ["prompt", "answer"]


def test_a_field_that_the_input_does_not_have_is_missing():
    one = State(input={"prompt": "p", "example_id": 0, "task": "t"})
    assert "answer" not in one
    assert one.get("answer") is None and one.get("answer", "none") == "none"
    with pytest.raises(KeyError, match="answer"):
        one["answer"]


def test_a_field_that_is_none_is_there():
    one = State(input={"prompt": "p", "example_id": 0, "task": "t", "answer": None})
    assert "answer" in one
    assert one.get("answer", "other") is None


def test_forwarding_holds_for_iteration_length_keys_values_and_items():
    one = state(turn=1)
    assert sorted(one) == sorted(EVERYTHING)
    assert sorted(one.keys()) == sorted(EVERYTHING)
    assert len(one) == len(EVERYTHING)
    assert list(reversed(one)) == list(one)[::-1]
    assert {key: value for key, value in one.items()} == EVERYTHING  # noqa: C416 - of `items` alone
    assert len(list(one.values())) == len(EVERYTHING)


def test_forwarding_holds_for_dict_unpacking_and_json():
    one = state(turn=1)
    assert dict(one) == EVERYTHING
    assert {**one} == EVERYTHING
    assert json.loads(json.dumps(one)) == EVERYTHING


def test_a_key_that_a_state_has_of_its_own_and_in_its_input_is_there_once():
    one = State(prompt="own")
    one["input"] = {"prompt": "the input's", "example_id": 0, "task": "t"}
    assert list(one).count("prompt") == 1 and len(one) == len(set(one))
    assert one["prompt"] == "the input's"
    one["prompt"] = "written"
    assert one["prompt"] == one.get("prompt") == one["input"]["prompt"] == "written"


@pytest.mark.parametrize("copied", [State.copy, copy.copy], ids=["copy()", "copy.copy"])
def test_a_copy_forwards_and_writing_to_it_leaves_the_first_as_it_is(copied):
    one = state(turn=1)
    other = copied(one)
    assert type(other) is State and dict(other) == EVERYTHING
    other["answer"], other["turn"] = "5", 2
    assert other["answer"] == "5" and other["input"]["answer"] == "5"
    assert dict(one) == EVERYTHING


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
    ids=["deepcopy", "pickle"],
)
def test_a_deep_copy_and_a_pickled_one_forward_to_an_input_of_their_own(copied):
    one = state(turn=1)
    other = copied(one)
    assert type(other) is State and dict(other) == EVERYTHING
    other["answer"] = "5"
    other["info"]["k"].append(2)
    assert other["input"]["answer"] == "5"
    assert dict(one) == EVERYTHING


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_holds_for_every_protocol(protocol):
    assert dict(pickle.loads(pickle.dumps(state(turn=1), protocol))) == EVERYTHING


def test_states_are_equal_where_what_they_show_is():
    assert state(turn=1) == state(turn=1) == EVERYTHING
    assert not state(turn=1) != EVERYTHING  # noqa: SIM202 - `!=` has a method of its own
    other = state(turn=1)
    other["answer"] = "5"
    assert other != state(turn=1)


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


@pytest.mark.parametrize(
    "made",
    [
        lambda other: State(**other),
        lambda other: State() | other,
        lambda other: State(turn=1) | dict(other),
    ],
)
def test_what_is_written_after_joining_leaves_the_other_as_it_was(made):
    other = state()
    made(other)["answer"] = "changed"
    assert other["answer"] == "4"


@pytest.mark.parametrize(
    "copied", [State.copy, copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_a_copy_of_a_subclass_is_of_the_subclass(copied):
    assert type(copied(Richer(state()))) is Richer


class Richer(State):
    pass


def test_the_last_key_is_the_first_to_be_popped():
    one = State(a=1, b=2)
    assert one.popitem() == ("b", 2) and one.popitem() == ("a", 1)
    with pytest.raises(KeyError):
        one.popitem()
