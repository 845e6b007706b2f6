"""The lenient reading of answers: what it reads, what each object needed, and what a report says
of it. The answers are those of public bug reports.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from config_support import configuration
from damaged_responses import random_objects
from scene_support import scene, truth
from small_tokenizers import small_codecs

from launch.reports.detection import make_report
from launch.reports.lenient import read_leniently
from launch.reports.page import report_tables
from shared.grounding.coco import ScoredObject
from shared.grounding.evaluation import Evaluation, Scene
from shared.grounding.formats import FORMATS
from shared.grounding.json_list import PictureResize
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import AnswerFormat
from shared.records import GeometryKind, Sample

SHAPES = frozenset({GeometryKind.BBOX, GeometryKind.POINT})
SAMPLE = Sample("1", (), 640, 480, (truth(10, 20, 300, 400),))
CODEC = next(iter(small_codecs().values()))
LIST = FORMATS["qwen3_vl"]
PIXELS = FORMATS["qwen2_5_vl"].for_pictures(PictureResize(28, 3136, 12845056))
COORDS = FORMATS["coord_tokens"]
CAT = '{"bbox_2d": [10, 20, 300, 400], "label": "cat"}'
BOX = (10, 20, 300, 400)
ENTRY = '{"desc": "cat", "bbox_2d": [<|coord_10|>, <|coord_20|>, <|coord_300|>, <|coord_400|>]}'


def answered(text: str, answer_format: AnswerFormat = LIST) -> Scene:
    """The scene of an answer, read strictly."""
    of_sample = answer_format.of(SAMPLE)
    ids = CODEC.encode(text)
    parsed = parse_rollout(ids, CODEC, geometry=SHAPES, answer_format=of_sample)
    objects = tuple(
        ScoredObject(one.kind, one.bins, one.desc, 1.0, of_sample.pixels(one, SAMPLE))
        for one in parsed.objects
    )
    dropped = tuple(one.reason for one in parsed.dropped)
    one = Scene(0, SAMPLE, objects, dropped, parsed.truncated, text, answer_format=answer_format)
    return replace(one, num_behind=parsed.num_behind)


def read(text: str, answer_format: AnswerFormat = LIST) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, bins and needs of each object of the lenient reading."""
    found = read_leniently(answered(text, answer_format), SHAPES)
    assert found is not None
    return [(one.object.desc, one.object.bins, " ".join(sorted(one.needed))) for one in found]


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (CAT, "no_list"),
        (f"```json\n{CAT}\n```", "no_list"),
        (f"Here are the objects:\n```json\n[{CAT}]\n```", "text_before"),
        (f"<think>\n{CAT}?\n</think>\n[{CAT}]", "text_before"),
        (f"It is {CAT}.", "no_list text_before"),
        ('{"objects": [' + CAT + "]}", "text_before"),
        (CAT.replace('"', "'").join("[]"), "quotes"),
        ("[{bbox_2d: [10, 20, 300, 400], label: 'cat'}]", "quotes"),
        (f"[{CAT[:-1]},}}]", "separator"),
        (CAT.replace("400]", "400,]").join("[]"), "separator"),
        (CAT.replace("bbox_2d", "bbox").join("[]"), "other_key"),
        (CAT.replace("label", "desc").join("[]"), "other_key"),
        (CAT.replace("}", ', "confidence": 0.9, "more": {"a": 1}}').join("[]"), "extra_key"),
        (CAT.replace("10, 20", "10.0, +20").join("[]"), "number"),
        (CAT.replace("300, 400", '"300", "400"').join("[]"), "number"),
        (CAT.replace("[", "[[").replace("]", "]]").join("[]"), "nested"),
        (CAT.replace("20, 300", "20], [300").replace("[10", "[[10").replace("400]", "400]]").join("[]"), "nested"),
        (CAT.replace("10, 20, 300, 400", "300, 20, 10, 400").join("[]"), "corners"),
    ],
)  # fmt: skip
def test_a_box_that_a_stock_model_plainly_means_is_read_with_what_it_needed(text, needed):
    assert answered(text).objects == ()
    assert read(text) == [("cat", BOX, needed)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"[{CAT}]\n[{CAT}]", [("cat", BOX, ""), ("cat", BOX, "second_list")]),
        (f"[{CAT} {CAT}]", [("cat", BOX, ""), ("cat", BOX, "separator")]),
        (f"{CAT}\n{CAT}", [("cat", BOX, "no_list")] * 2),
        ('[{"bbox_2d": [[10, 20, 300, 400], [1, 2, 3, 4]], "label": "cat"}]',
         [("cat", BOX, "nested"), ("cat", (1, 2, 3, 4), "nested")]),
        ('[{"bbox_2d": [10, 20, 300, 400]}]', [("", BOX, "no_name")]),
        ('[{"bbox_2d": [-3, 20, 300, 1001], "label": "cat"}]',
         [("cat", (0, 20, 300, 999), "clamped number")]),
        ("[{'point_2d': [1, 2], 'label': \"dog's ear\"}]", [("dog's ear", (1, 2), "quotes")]),
        ("[{'point_2d': [1, 2], 'label': 'dog's ear'}]", [("dog's ear", (1, 2), "quotes")]),
        ('[{"point_2d": {"x": 1, "y": 2}, "label": "ear"}]', [("ear", (1, 2), "nested")]),
        # A quote is missing: the object after it is read all the same.
        ('[{"bbox_2d": [1, 2, 3, 4], "label": "owl}, ' + CAT, [("cat", BOX, "separator")]),
        ('[{"bbox_2d": [10, 20, 300, %s], "label": "cat"}]' % ("9" * 400), []),
        ('[{"bbox_2d": [1e999, NaN, "nan", -Infinity], "label": "cat"}]', []),
        ('[{"bbox_2d": [10, 20, 300, 400], "label": null}]', []),
        ('[{"bbox_2d": [10, 20, 300, 1200], "label": "cat"}]', []),
        ("There are none.", []),
    ],
)  # fmt: skip
def test_what_is_read_of_several_and_of_damaged_objects(text, found):
    assert read(text) == found


def test_numbers_become_pixels_of_the_picture_without_rounding() -> None:
    (one,) = read_leniently(answered('{"bbox": [10.5, 20, 300, 400.25], "label": "a"}'), SHAPES)
    assert one.object.pixels == (10.5 * 0.64, 20 * 0.48, 300 * 0.64, 400.25 * 0.48)
    # The model is shown 644 x 476.
    text = '[{"bbox_2d": [64.4, 47.6, 650, 476], "label": "a"}]'
    (one,) = read_leniently(answered(text, PIXELS), SHAPES)
    assert one.object.pixels == pytest.approx((64, 48, 640, 480))
    assert sorted(one.needed) == ["clamped", "number"]


def test_coord_tokens_and_phrases_have_their_own_lenient_readings() -> None:
    assert read(f'```json\n{{"object_1": {ENTRY}}}\n```', COORDS) == [("cat", BOX, "text_before")]
    assert read(f"[{ENTRY}]", COORDS) == [("cat", BOX, "text_before")]
    assert read(ENTRY, COORDS) == [("cat", BOX, "no_list")]
    labelled = ENTRY.replace("desc", "label")
    both = read(f'{{"object_1": {ENTRY}, "object_2": {labelled}}}', COORDS)
    assert both == [("cat", BOX, ""), ("cat", BOX, "other_key")]
    rex = FORMATS["rex_omni"]
    phrase = "<|object_ref_start|>cat<|object_ref_end|><|box_start|><10><20><300><400><|box_end|>"
    answers = {f"Here: {phrase}": "text_before", f"{phrase}{phrase}": "separator"}
    for text, needed in answers.items():
        strict = Scene(0, SAMPLE, (), (), True, text, answer_format=rex)
        last = read_leniently(strict, SHAPES)[-1]
        assert (last.object.desc, last.object.bins, [*last.needed]) == ("cat", BOX, [needed])
    # Digits are no coord tokens: nothing says what they count.
    assert read(f'{{"object_1": {CAT}}}', COORDS) == []


def facts(found: ScoredObject) -> tuple[object, ...]:
    return found.kind, found.bins, found.desc, found.pixels_in(640, 480)


@pytest.mark.parametrize("name", ["coord_tokens", "qwen3_vl", "qwen2_5_vl"])
def test_what_the_strict_reading_reads_the_lenient_one_reads_alike(name: str) -> None:
    answer_format = PIXELS if name == "qwen2_5_vl" else FORMATS[name]
    generator = random.Random(5)
    for number in range(60):
        objects = random_objects(generator, generator.randrange(1, 6), SHAPES)
        text = answer_format.of(SAMPLE).layout_objects(objects).text
        strict = answered(text, answer_format)
        found = read_leniently(strict, SHAPES)
        assert found is None or not any(one.needed for one in found)
        if number % 2:  # cut in its last object
            strict = answered(text[:-4], answer_format)
        strict = replace(strict, truncated=True)
        found = read_leniently(strict, SHAPES)
        assert [facts(one.object) for one in found] == [facts(one) for one in strict.objects]
        assert not any(one.needed for one in found)


@pytest.mark.parametrize(
    "unit",
    ["[{", '{"', "{'", "[", "{", '{"a":', '{"a":[', "{'a' ", '{"a":\'{"a":\',', '{"bbox": [', "9",
     '\\"', "</think>", '{"object_1":', "```json\n[", "{ "],
)  # fmt: skip
def test_a_hostile_answer_of_100_000_characters_is_read_without_recursion(unit: str) -> None:
    text = unit * (100_000 // len(unit)) + f" \n[{CAT}]"
    hostile = Scene(0, SAMPLE, (), (), True, text, answer_format=LIST)
    found = read_leniently(hostile, SHAPES)
    assert found is not None
    assert len(found) <= 1


def test_a_report_has_both_figures_by_name_and_says_what_the_lenient_one_needed() -> None:
    square = truth(0, 0, 499, 499)
    strict = scene(0, [square], [])
    text = "Sure: {'bbox': [0, 0, 499, 499], 'label': 'cat'}"
    fenced = replace(strict, text=text, truncated=True, answer_format=LIST)
    second = replace(
        scene(1, [square], []), text="[]\n[{\"bbox_2d\": [0, 0, 499, 499], \"label\": \"cat\"}]",
        num_behind=1, answer_format=LIST,
    )  # fmt: skip
    config = configuration(Path("model"), Path("data"), Path("run"))
    report = make_report(Evaluation(1, 1, (fenced, second), 1.0), config, subject="x")
    metrics = report.metrics()
    assert (metrics["val/f1"], metrics["val/lenient_f1"]) == (0.0, 1.0)
    assert metrics["val/lenient_class_f1"] == 1.0
    assert (metrics["val/num_read_leniently"], metrics["val/num_objects_after_close"]) == (2, 1)
    lenient = report.as_json()["lenient"]
    assert (lenient["num_answers"], lenient["num_objects"]) == (2, 2)
    assert lenient["needed"] == {
        "no_list": 1, "other_key": 1, "quotes": 1, "second_list": 1, "text_before": 1
    }  # fmt: skip
    assert lenient["detection"][0]["f1"] == 1.0
    assert report.as_json()["detection"][0]["f1"] == 0.0
    assert "1 with objects after the close" in report.describe()
    assert "read leniently F1@0.5 1.000" in report.describe()
    tables = {table.title: table.rows for table in report_tables(report)}
    assert tables["Detection, read leniently"][0] == ("IoU 0.5, any class", *["1.000"] * 4)
    assert report.headline.value == 0.0
