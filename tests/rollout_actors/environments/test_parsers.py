"""From what a model said to its answer."""

import pytest

from rollout_actors.environments.rubric import Parser, ThinkParser, XMLParser


def test_a_plain_parser_returns_the_last_thing_that_the_model_said():
    completion = [
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "last"},
    ]
    assert Parser().parse_answer(completion) == "last"
    assert Parser().parse_answer("text") == "text"


def test_an_environments_last_word_is_not_the_models():
    completion = [{"role": "assistant", "content": "mine"}, {"role": "user", "content": "you lost"}]
    assert Parser().parse_answer(completion) == "mine"


def test_a_model_that_said_nothing_has_no_answer():
    assert Parser().parse_answer([]) is None


def test_parts_of_text_are_one_text():
    content = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    assert Parser(extract_fn=int).parse_answer([{"role": "assistant", "content": content}]) == 42


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


def test_xml_fields_are_found_by_name():
    assert XMLParser(["plan", "move"], "move").parse_fields("<plan>go</plan>") == {
        "plan": "go",
        "move": None,
    }


def test_an_answer_field_has_to_be_one_of_the_fields():
    with pytest.raises(ValueError, match="answer_field: 'move'"):
        XMLParser(["plan"], "move")


def test_the_format_reward_is_the_share_of_messages_with_an_answer():
    reward = XMLParser().format_reward_func()
    good, bad = (
        {"role": "assistant", "content": "<answer>1</answer>"},
        {"role": "assistant", "content": "1"},
    )
    assert reward([good, {"role": "user", "content": "no"}, bad]) == 0.5
    assert reward("<answer>1</answer>") == 1.0
    assert reward([]) == 0.0
