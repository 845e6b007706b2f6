"""A row asks its own question, or fills a template of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoProcessor

from learner.segments import PromptEncoder
from shared.dataset import load_dataset
from shared.errors import ConfigError, RecordError
from shared.prompts import DEFAULT_USER_PROMPT, Prompts
from shared.records import Sample, load_record

ROW = {"images": ["a.png"], "width": 10, "height": 10, "objects": []}


def sample(**row: object) -> Sample:
    mapping = {**ROW, **row}
    return load_record(mapping, root=".", require_images=False, default_id="a:1")


def test_a_row_without_a_text_of_its_own_is_asked_what_the_run_asks() -> None:
    assert Prompts().texts(sample()) == (None, DEFAULT_USER_PROMPT)
    assert Prompts(("Where?",), "Be brief.").texts(sample()) == ("Be brief.", "Where?")


def test_null_is_no_text_as_where_other_rows_of_a_table_have_one() -> None:
    keys = ("prompt", "system", "phrase", "classes")
    assert sample(**dict.fromkeys(keys)) == sample()


def test_a_rows_own_texts_come_before_the_runs() -> None:
    row = sample(prompt="Find all {forklifts}.", system="Answer in JSON.")
    assert Prompts(("Where?",), "Be brief.").texts(row) == (
        "Answer in JSON.",
        "Find all {forklifts}.",
    )
    assert row.metadata == {}


def test_a_template_is_filled_with_the_rows_phrase_and_classes() -> None:
    row = sample(phrase="the red car", classes=["car", "bus"])
    template = "Find {phrase} among {classes}; answer like {}."
    filled = "Find the red car among car, bus; answer like {}."
    assert Prompts((template,)).texts(row) == (None, filled)
    row = sample(phrase=r"{classes} \1", classes=["car"])
    assert Prompts(("{phrase}: {classes}",)).texts(row) == (None, r"{classes} \1: car")


def test_each_sample_has_one_of_several_templates_by_seed_and_id() -> None:
    templates = ("one", "two", "three")
    samples = [sample(sample_id=str(number)) for number in range(60)]
    drawn = [Prompts(templates, seed=17).texts(each)[1] for each in samples]
    assert set(drawn) == set(templates)
    assert drawn == [Prompts(templates, seed=17).texts(each)[1] for each in samples]
    assert drawn != [Prompts(templates, seed=18).texts(each)[1] for each in samples]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": " "}, "prompt"),
        ({"phrase": 3}, "phrase"),
        ({"classes": "car"}, "classes"),
        ({"classes": ["car", ""]}, r"classes\[1\]"),
    ],
)
def test_a_text_that_is_none_is_a_bad_row(row: dict[str, object], field: str) -> None:
    with pytest.raises(RecordError, match=f"{field}: is "):
        sample(**row)


def test_a_row_that_cannot_fill_the_template_is_a_bad_row_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    rows = [{**ROW, "phrase": "a cup"}, ROW, {**ROW, "prompt": "Where is the cup?"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    require = Prompts(("Find {phrase}.",)).texts
    message = r"train.jsonl:2: phrase: is missing, but the prompt is 'Find {phrase}.'"
    with pytest.raises(RecordError, match=message):
        load_dataset(
            file, on_bad_row="error", sort_objects=True, check_images=False, require=require
        )
    kept = load_dataset(
        file, on_bad_row="skip", sort_objects=True, check_images=False, require=require
    )
    assert [require(one)[1] for one in kept] == ["Find a cup.", "Where is the cup?"]


@pytest.mark.slow
def test_the_tokens_of_a_prompt_are_those_of_its_rows_text(demo_checkpoint: Path) -> None:
    encoder = PromptEncoder(AutoProcessor.from_pretrained(demo_checkpoint), Prompts())
    rows = [sample(), sample(prompt="Locate every six."), sample(prompt="Locate every two.")]
    for row in rows:
        assert (row.prompt or DEFAULT_USER_PROMPT) in encoder.text(row)
    assert len({encoder.request_ids(row) for row in rows}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}",
            "no system",
        ),
        ("{{ messages", "end of print statement"),
    ],
)
def test_a_chat_template_that_cannot_write_the_prompt_is_named(
    demo_checkpoint: Path, template: str, told: str
) -> None:
    processor = AutoProcessor.from_pretrained(demo_checkpoint)
    processor.chat_template = template
    with pytest.raises(ConfigError, match=rf"template of .*{told}.*data\.system_prompt"):
        PromptEncoder(processor, Prompts()).text(sample())
