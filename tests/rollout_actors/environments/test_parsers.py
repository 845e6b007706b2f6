"""From what a model said to its answer."""

import pytest
from environment_support import assistant, user

from rollout_actors.environments.rubric import Parser, ThinkParser, XMLParser

PARTS = {"role": "assistant", "content": [{"type": "text", "text": part} for part in "42"]}


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ([assistant("first"), user("and?"), assistant("last")], "last"),
        ([assistant("mine"), user("you lost")], "mine"),
        ([PARTS], "42"),
        ("text", "text"),
        ([], None),
    ],
)
def test_a_plain_parser_returns_the_last_thing_that_the_model_said(completion, answer):
    assert Parser().parse_answer(completion) == answer
    assert Parser(extract_fn=len).parse_answer(completion) == (answer and len(answer))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>hm</think> 4 ", "4"),
        ("a</think>b</think>c", "c"),
        ("4", None),
        ("<think>4", None),
        ("x</think>", ""),
    ],
)
def test_behind_the_thought_stands_the_answer_and_without_its_end_there_is_none(text, answer):
    assert ThinkParser().parse(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer>\n4\n</answer>", "4"),
        ("<answer>3</answer><answer>4</answer>", "4"),
        ("<answer>4", None),
        ("4", None),
    ],
)
def test_an_xml_answer_stands_last_between_its_marks(text, answer):
    assert XMLParser().parse(text) == answer


def test_xml_fields_are_found_by_name_and_the_answers_is_one_of_them():
    fields = XMLParser(["plan", "move"], "move").parse_fields("<plan>go</plan>")
    assert fields == {"plan": "go", "move": None}
    with pytest.raises(ValueError, match="answer_field: 'move'"):
        XMLParser(["plan"], "move")


def test_the_format_reward_is_the_share_of_messages_with_an_answer():
    reward = XMLParser().format_reward_func()
    assert reward([assistant("<answer>1</answer>"), user("no"), assistant("1")]) == 0.5
    assert (reward("<answer>1</answer>"), reward([])) == (1.0, 0.0)
