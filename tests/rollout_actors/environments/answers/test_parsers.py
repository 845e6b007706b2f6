"""From what a model said to its answer."""

import re

import pytest
from environment_support import assistant, user

from rollout_actors.environments.answers.parsers import (
    MaybeThinkParser,
    Parser,
    ThinkParser,
    XMLParser,
    extract_boxed_answer,
    extract_hash_answer,
)

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
    assert XMLParser().parse_answer(text) == answer
    assert XMLParser(extract_fn=len).parse_answer(text) == (answer and 1)


def test_behind_a_thought_that_may_be_there_stands_the_answer():
    texts = ["<think>hm</think> 4 ", "4", "<think>4", "a</think>b</think>c", "x</think>"]
    assert [MaybeThinkParser().parse(text) for text in texts] == ["4", "4", "<think>4", "c", ""]


def test_xml_fields_are_found_by_name_the_first_or_the_last_and_each_tag_that_may_stand_for_one():
    parser = XMLParser(["plan", ("code", "answer")])
    text = "<plan> go </plan><code>x</code><plan>on</plan><answer>"
    assert vars(parser.parse(text)) == {"plan": "go", "code": "x", "answer": None}
    assert parser.parse(text, last=True).plan == "on"
    assert parser.get_fields() == ["plan", "code"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (["plan"], ValueError, "answer_field: 'answer' is not one of plan"),
        (["plan", ("answer", "plan")], ValueError, "fields: plan occurs twice"),
        (["answer", 3], TypeError, "fields: 3 is not a tag"),
        (["answer", ("code", 3)], TypeError, "is not a tag"),
        (["answer", ()], TypeError, "is not a tag"),
    ],
)
def test_xml_fields_that_are_none_are_refused(fields, error, message):
    with pytest.raises(error, match=re.escape(message)):
        XMLParser(fields)


def test_what_format_writes_parse_reads_and_the_prompt_can_show_it():
    parser = XMLParser(["plan", ("code", "answer")])
    text = parser.format(answer=4, plan="go")
    assert text == "<plan>\ngo\n</plan>\n<code>\n4\n</code>"
    assert vars(parser.parse(text)) == {"plan": "go", "code": "4", "answer": None}
    for values, message in (({"plan": "go"}, "field 'code'; give code or answer"), ({"x": 1}, "x")):
        with pytest.raises(ValueError, match=message):
            parser.format(**values)
    shown = "<plan>\n...\n</plan>\n<[ code | answer ]>\n...\n</[ code | answer ]>"
    assert parser.get_format_str() == shown


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3} or \boxed{4}.", "4"),
        (r"\boxed{\frac{1}{2}} }", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{4", r"\boxed{4"),
        ("4}", "4}"),
    ],
)
def test_a_boxed_answer_is_the_last_with_its_braces_and_without_a_box_it_is_the_text(text, answer):
    assert extract_boxed_answer(text) == answer


def test_a_hash_answer_stands_behind_its_mark():
    assert [extract_hash_answer(text) for text in ("2 + 2\n#### 4 ", "4")] == ["4", "4"]


def test_messages_are_found_by_their_roles():
    parser = Parser()
    found = [parser.get_assistant_messages, parser.get_system_messages, parser.get_tool_messages]
    said = [{"role": "system", "content": "be"}, user("and?"), assistant("yes")]
    assert [get(said) for get in found] == [[said[2]], [said[0]], []]
    assert parser.get_user_messages(said) == [said[1]]


def test_the_format_reward_is_the_share_of_messages_with_an_answer():
    reward = XMLParser().get_format_reward_func()
    assert reward([assistant("<answer>1</answer>"), user("no"), assistant("1")]) == 0.5
    assert (reward("<answer>1</answer>"), reward([])) == (1.0, 0.0)
