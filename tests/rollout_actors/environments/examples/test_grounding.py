"""Detection as an environment."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from damaged_responses import SCRAPS, random_objects
from environment_support import generated
from PIL import Image
from scene_support import png, truth
from scripted_client import ScriptedClient
from scripted_engines import demo_tokenizer

from rollout_actors.environments.examples.grounding import TextCodec, load_environment, parse_text
from shared.errors import RecordError
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import serialize_objects
from shared.records import GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec

CAT, DOG = truth(100, 100, 400, 400, desc="cat"), truth(600, 600, 900, 900, desc="dog")


def record(objects: list[GroundTruthObject], image: str = "a.png") -> dict[str, Any]:
    return {
        "images": [image],
        "width": 101,
        "height": 61,
        "objects": [{one.kind.value: list(one.bins), "desc": one.desc} for one in objects],
    }


def data(folder: Path, *scenes: list[GroundTruthObject]) -> str:
    (folder / "a.png").write_bytes(png())
    (folder / "data.jsonl").write_text(
        "".join(json.dumps(record(list(scene))) + "\n" for scene in scenes)
    )
    return str(folder / "data.jsonl")


def scored(
    folder: Path, there: list[GroundTruthObject], said: str, **kwargs: Any
) -> dict[str, float]:
    """The metrics of one answer."""
    environment = load_environment(data(folder, there), **kwargs)
    results = generated(environment, environment.get_dataset(), ScriptedClient([said]))
    assert results.metadata.num_errors == 0, results.state[0]["error"]
    return {name: values[0] for name, values in results.metrics.items()}


# Prompt


def test_the_prompt_has_the_image_as_a_data_url_and_then_the_question(tmp_path):
    environment = load_environment(
        data(tmp_path, [CAT]), system_prompt="Be exact.", user_prompt="Find all."
    )
    system, user = environment.get_dataset()[0]["prompt"]
    assert system == {"role": "system", "content": [{"type": "text", "text": "Be exact."}]}
    image, text = user["content"]
    assert text == {"type": "text", "text": "Find all."}
    start, _, encoded = image["image_url"]["url"].partition(",")
    assert (image["type"], start) == ("image_url", "data:image/png;base64")
    assert base64.b64decode(encoded) == png()


def test_a_picture_that_exif_turns_is_sent_upright(tmp_path):
    """Endpoints that do not look at EXIF show it right too."""
    rows = data(tmp_path, [CAT])
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = Image.effect_noise((61, 101), 90).convert("RGB")
    stored.save(tmp_path / "a.png", exif=exif)
    environment = load_environment(rows)
    image, _ = environment.get_dataset()[0]["prompt"][0]["content"]
    sent = Image.open(io.BytesIO(base64.b64decode(image["image_url"]["url"].partition(",")[2])))
    assert (sent.size, sent.getexif()) == ((101, 61), {})
    assert sent.tobytes() == stored.transpose(Image.Transpose.ROTATE_270).tobytes()


def test_rows_are_the_records_of_the_file_with_their_text_as_answer(tmp_path):
    environment = load_environment(data(tmp_path, [CAT, DOG], []), max_examples=2)
    assert [row["answer"] for row in environment.get_dataset()] == [
        serialize_objects([CAT, DOG]),
        "{}",
    ]
    assert [row["info"]["sample_id"] for row in environment.get_dataset()] == ["data:1", "data:2"]
    assert len(load_environment(data(tmp_path, [CAT], [DOG]), max_examples=1).get_dataset()) == 1


def test_other_data_can_be_held_out(tmp_path):
    (tmp_path / "held_out").mkdir()
    environment = load_environment(
        data(tmp_path, [CAT]), eval_data=data(tmp_path / "held_out", [DOG], [DOG])
    )
    assert (len(environment.get_dataset()), len(environment.get_eval_dataset())) == (1, 2)


def test_data_that_are_not_as_they_should_be_are_refused_with_their_line(tmp_path):
    with pytest.raises(RecordError, match=r"nothing\.jsonl"):
        load_environment(str(tmp_path / "nothing.jsonl"))
    path = data(tmp_path, [CAT], [CAT])
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(RecordError, match=r"data\.jsonl:1: images\[0\]"):
        load_environment(path)
    with pytest.raises(RecordError, match="poly"):
        load_environment(data(tmp_path, [truth(1, 1, 5, 1, 5, 5)]), polygons=False)


# Reward


def test_an_answer_with_every_object_in_its_place_has_the_full_reward(tmp_path):
    environment = load_environment(data(tmp_path, [CAT, DOG], []))
    answers = [row["answer"] for row in environment.get_dataset()]
    results = generated(environment, environment.get_dataset(), ScriptedClient(answers))
    assert results.reward == pytest.approx([2.2, 2.2])
    assert results.state[0]["detection"] == {
        "is_well_formed": True,
        "num_predictions": 2,
        "num_dropped": 0,
        "num_ground_truth": 2,
        "num_matched": 2,
    }


FAR = truth(0, 0, 50, 50, desc="cat")
HALF = truth(100, 100, 400, 250)
TRIANGLE = truth(100, 100, 500, 100, 500, 500)
CAT_NAMED_DOG = truth(*CAT.bins, desc="dog")


@pytest.mark.parametrize(
    ("scene", "said", "arguments", "recall", "precision"),
    [
        ([CAT, DOG], [CAT], {}, 0.5, 1.0),
        ([CAT], [CAT, DOG, FAR, FAR], {}, 1.0, 0.25),
        ([CAT], [CAT, CAT], {}, 1.0, 0.5),
        ([], [], {}, 1.0, 1.0),
        ([], [CAT], {}, 1.0, 0.0),
        ([CAT], [], {}, 0.0, 0.0),
        ([CAT], [HALF], {"iou": 0.4}, 1.0, 1.0),
        ([CAT], [HALF], {"iou": 0.6}, 0.0, 0.0),
        ([CAT], [CAT_NAMED_DOG], {}, 0.0, 0.0),
        ([CAT], [CAT_NAMED_DOG], {"by_name": False}, 1.0, 1.0),
        ([TRIANGLE], [TRIANGLE], {}, 1.0, 1.0),
    ],
    ids=[
        "one of two",
        "more than there is",
        "the same twice",
        "nothing of nothing",
        "something of nothing",
        "nothing of something",
        "enough overlap",
        "too little overlap",
        "a wrong name",
        "names do not matter",
        "a polygon",
    ],
)
def test_recall_is_of_what_is_there_and_precision_of_what_is_said(
    tmp_path, scene, said, arguments, recall, precision
):
    metrics = scored(tmp_path, scene, serialize_objects(said), **arguments)
    assert metrics == {"well_formed": 1.0, "recall": recall, "precision": precision}


def test_polygons_are_no_objects_where_none_are_wanted(tmp_path):
    metrics = scored(tmp_path, [CAT], serialize_objects([CAT, TRIANGLE]), polygons=False)
    assert metrics == {"well_formed": 0.5, "recall": 1.0, "precision": 1.0}


@pytest.mark.parametrize(
    ("said", "well_formed", "recall"),
    [
        ("I see a cat.", 0.0, 0.0),
        ("", 0.0, 0.0),
        (" {\n} ", 1.0, 0.0),
        ("{}<|im_end|>and more", 1.0, 0.0),
        ("{a cat}", 0.0, 0.0),
        ("Here: {}", 0.0, 0.0),
        (serialize_objects([CAT])[:-1], 0.0, 1.0),
        (serialize_objects([CAT]) + " That is all.", 1.0, 1.0),
        (serialize_objects([CAT]).replace('"bbox_2d"', '"box"'), 0.0, 0.0),
        (serialize_objects([CAT])[:-1] + ', "object_2": {"desc": "dog"}}', 0.5, 1.0),
        (serialize_objects([CAT]).replace('"<|', "<|").replace('|>"', "|>"), 1.0, 1.0),
    ],
)
def test_the_format_is_one_whole_object_of_valid_entries(tmp_path, said, well_formed, recall):
    metrics = scored(tmp_path, [CAT], said)
    assert (metrics["well_formed"], metrics["recall"]) == (well_formed, recall)


# Text in place of tokens


def named(parsed: Any) -> list[Any]:
    return [(one.key, one.kind, one.desc, one.bins) for one in parsed.objects]


@pytest.fixture(scope="module")
def codec() -> HFTokenCodec:
    return HFTokenCodec(demo_tokenizer())


@pytest.mark.slow
def test_text_is_parsed_as_the_tokens_of_a_tokenizer_are(codec):
    generator = random.Random(5)
    for _ in range(300):
        text = serialize_objects(random_objects(generator, generator.randrange(4)))
        for _ in range(generator.randrange(4)):
            place = generator.randrange(len(text) + 1)
            text = text[:place] + generator.choice(SCRAPS) + text[place + generator.randrange(3) :]
        ours, theirs = parse_text(text), parse_rollout(codec.encode(text), codec)
        assert named(ours) == named(theirs)
        assert ours.dropped == theirs.dropped
        assert ours.prefix_text == theirs.prefix_text
        assert (ours.truncated, ours.fallback) == (theirs.truncated, theirs.fallback)


def test_the_end_of_a_turn_ends_an_answer_as_a_token_and_as_text():
    codec = TextCodec()
    assert codec.piece_bytes(codec.eos_token_id) == b"<|im_end|>"
    token_ids = [*codec.encode("{}"), codec.eos_token_id, *codec.encode("x")]
    assert parse_rollout(token_ids, codec) == parse_text("{}<|im_end|>x")
