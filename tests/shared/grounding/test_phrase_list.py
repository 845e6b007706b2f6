"""Rex-Omni's phrases (issue 21, point 1): what is read of them, and that appends close them."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from damaged_responses import DESCS, check_damaged, damage_few, random_objects
from small_tokenizers import byte_level_bpe, gpt2_words, no_words, qwen_words, rex_codec

from shared.grounding.formats import FORMATS
from shared.grounding.objects import DropReason, ParsedRollout
from shared.grounding.parsing import parse_rollout, trim_prefix
from shared.records import GeometryKind, GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec, MissingTokensError

REX = FORMATS["rex_omni"]
BOXES = frozenset({GeometryKind.BBOX})
TOKENIZERS = {"gpt2 words": (144, gpt2_words), "qwen words": (600, qwen_words)}
TOKENIZERS |= {"no words": (90, no_words), "bytes": (0, no_words)}


def phrase(name: str, *boxes: str) -> str:
    head = f"<|object_ref_start|>{name}<|object_ref_end|><|box_start|>"
    return f"{head}{','.join(boxes)}<|box_end|>"


def box(*bins: int) -> str:
    return "".join(f"<{bin}>" for bin in bins)


A = box(1, 2, 30, 999)
B = box(5, 6, 7, 8)
CAT = phrase("cat", A)
OPEN_CAT = CAT.removesuffix("<|box_end|>")


def truth(*bins: int, desc: str = "cat") -> GroundTruthObject:
    return GroundTruthObject(GeometryKind.BBOX, bins, desc)


def read(codec: HFTokenCodec, text: str) -> ParsedRollout:
    return parse_rollout(codec.encode(text), codec, geometry=BOXES, answer_format=REX)


def joined(codec: HFTokenCodec, token_ids) -> bytes:
    return b"".join(map(codec.piece_bytes, token_ids))


@pytest.fixture(scope="module")
def rex_codecs() -> dict[str, HFTokenCodec]:
    return {name: rex_codec(byte_level_bpe(*how)) for name, how in TOKENIZERS.items()}


@pytest.fixture
def codec(rex_codecs) -> HFTokenCodec:
    return rex_codecs["qwen words"]


@pytest.fixture
def parse(codec: HFTokenCodec):
    return lambda text: read(codec, text)


def test_objects_come_in_written_order_with_their_phrase_and_the_tokens_of_their_bins(
    rex_codecs: dict[str, HFTokenCodec],
) -> None:
    text = f"{phrase('cat', A, B)}, {phrase('black dog', B)}"
    for codec in rex_codecs.values():
        parsed = read(codec, text)
        assert [(o.key, o.desc, o.bins) for o in parsed.objects] == [
            ("[0]", "cat", (1, 2, 30, 999)),
            ("[1]", "cat", (5, 6, 7, 8)),
            ("[2]", "black dog", (5, 6, 7, 8)),
        ]
        prefix = joined(codec, parsed.prefix_token_ids)
        for object_ in parsed.objects:
            tokens = [parsed.prefix_token_ids[i] for i in object_.coord_positions]
            assert tokens == [codec.coord_id(bin) for bin in object_.bins]
            assert prefix[slice(*object_.desc_value)].decode() == object_.desc
            start, stop = object_.span
            assert joined(codec, parsed.prefix_token_ids[start:stop]) in prefix
            assert start <= object_.coord_positions[0] < object_.coord_positions[-1] == stop - 1
        first, second, _ = (prefix[slice(*o.value)].decode() for o in parsed.objects)
        assert first == f"cat<|object_ref_end|><|box_start|>{A}"
        assert second == B
        assert parsed.prefix_text == text.removesuffix("<|box_end|>")
        assert (parsed.truncated, parsed.fallback, parsed.max_object_index) == (False, False, None)


@pytest.mark.parametrize(
    ("text", "prefix", "truncated"),
    [
        (f"{OPEN_CAT},{B}", f"{OPEN_CAT},{B}", True),
        (f"{OPEN_CAT},{box(5, 6, 7)}", OPEN_CAT, True),
        (f"{CAT}, {phrase('dog', B)[:-12]}", f"{OPEN_CAT}", True),
        (f"{CAT}, ", OPEN_CAT, True),
        (f"{CAT} and so on", OPEN_CAT, True),
        (f" {CAT}\n", f" {OPEN_CAT}", False),
        (f"{CAT}, {phrase('dog', 'None')}", OPEN_CAT, False),
        (
            f"{phrase('dog', 'None')}, {CAT}",
            f"{phrase('dog', 'None')}, {OPEN_CAT}",
            False,
        ),
        (f"{OPEN_CAT},<|box_end|>", OPEN_CAT, False),
        (
            f"{OPEN_CAT} , {B} <|box_end|> ,\n{CAT}",
            f"{OPEN_CAT} , {B} <|box_end|> ,\n{OPEN_CAT}",
            False,
        ),
        (phrase("dog", "None"), "", False),
        (phrase("dog"), "", False),
        ("", "", False),
        ("<|object_ref_start|>ca", "", True),
        (f"Sure: {CAT}", "", True),
        ('[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]', "", True),
    ],
)
def test_what_is_kept_ends_behind_the_last_box_inside_its_phrase(
    parse, text: str, prefix: str, truncated: bool
) -> None:
    parsed = parse(text)
    assert (parsed.prefix_text, parsed.truncated) == (prefix, truncated)
    assert parsed.fallback is (not prefix)
    assert parsed.dropped == ()


@pytest.mark.parametrize(
    ("answer", "opens"),
    [("", True), (CAT, True), (f"\n{CAT}", True), ("Sure.", False), ("[", False)],
)
def test_an_answer_of_this_format_begins_with_a_phrase_or_is_empty(answer, opens) -> None:
    assert REX.opens(answer) is opens


DROPS = {
    DropReason.MISSING_DESC: [phrase("", B), phrase(" ", B)],
    DropReason.NON_COORD_TOKEN: [
        phrase("dog", written) for written in ("here", "5,6,7,8", f"{B}.", "<1000>", f"({B})")
    ],
    DropReason.WRONG_ARITY: [phrase("dog", "<1><2>"), phrase("dog", "<1><2><3><4><5>")],
    DropReason.POLY_UNSUPPORTED: [phrase("dog", "<1><2><3><4><5><6>")],
    DropReason.BBOX_INVALID: [phrase("dog", "<3><2><1><4>")],
}


@pytest.mark.parametrize(
    ("reason", "value"), [(reason, value) for reason, values in DROPS.items() for value in values]
)
def test_a_bad_box_is_dropped_for_the_first_reason(parse, reason: DropReason, value: str) -> None:
    parsed = parse(f"{value}, {CAT}")
    assert {one.reason for one in parsed.dropped} == {reason}
    assert [one.desc for one in parsed.objects] == ["cat"]


@pytest.mark.parametrize(
    ("text", "kept", "dropped"),
    [
        (f"{CAT} {CAT}, {phrase('dog', B)}", ["cat", "dog"], ["[1]"]),
        (f"{CAT},, {CAT}", ["cat"], ["[1]"]),
        (f"{OPEN_CAT}, {CAT}", ["cat"], ["[1]"]),
        (f"{OPEN_CAT},,{A},{B}<|box_end|>", ["cat", "cat"], ["[1]"]),
        (phrase("cat", "", A), [], ["[0]"]),
    ],
)
def test_one_comma_stands_between_boxes_and_between_phrases(parse, text, kept, dropped) -> None:
    parsed = parse(text)
    assert [one.desc for one in parsed.objects] == kept
    assert [(one.key, one.reason) for one in parsed.dropped] == [
        (key, DropReason.MALFORMED) for key in dropped
    ]


def test_coord_tokens_spelled_by_other_tokens_are_none(codec: HFTokenCodec) -> None:
    token_ids = codec.encode(OPEN_CAT)
    for part in (",", "<", "5", ">", box(6, 7, 8), "<|box_end|>"):
        token_ids += codec.encode(part)
    parsed = parse_rollout(token_ids, codec, geometry=BOXES, answer_format=REX)
    assert [one.reason for one in parsed.dropped] == [DropReason.NON_COORD_TOKEN]


def test_what_is_written_has_a_phrase_once_and_is_read_back_byte_by_byte(codec) -> None:
    objects = [
        truth(300, 0, 310, 9),
        truth(5, 5, 5, 5, desc='größe "猫", x'),
        truth(100, 10, 100, 999),
        truth(100, 20, 120, 30),
    ]
    layout = REX.layout_objects(objects)
    cats = phrase("cat", box(100, 10, 100, 999), box(100, 20, 120, 30), box(300, 0, 310, 9))
    assert layout.text == f"{cats}, {phrase(objects[1].desc, box(5, 5, 5, 5))}"
    written = layout.text.encode()
    for one, place in zip(objects, layout.objects, strict=True):
        assert [written[slice(*span)].decode() for span in place.coords] == [
            f"<{bin}>" for bin in one.bins
        ]
        assert place.value[1] == place.coords[-1][1]
    names = [written[slice(*place.desc)].decode() for place in layout.objects]
    assert names == ["", objects[1].desc, "cat", ""]
    assert layout.closing == (len(written) - len("<|box_end|>"), len(written))
    parsed = read(codec, layout.text)
    again = [GroundTruthObject(one.kind, one.bins, one.desc) for one in parsed.objects]
    assert again == [objects[2], objects[3], objects[0], objects[1]]
    assert REX.layout_objects(again).text == layout.text
    nothing = REX.layout_objects([])
    assert (nothing.text, nothing.objects, nothing.closing) == ("", (), (0, 0))


@pytest.mark.parametrize(
    ("prefix", "added"),
    [
        ("", f"{phrase('cat', B)}, {phrase('dog', A)}"),
        (OPEN_CAT, f",{B}<|box_end|>, {phrase('dog', A)}"),
        (phrase("dog", A)[:-11], f",{A}<|box_end|>, {phrase('cat', B)}"),
        (f"{CAT}, {phrase('x', A)[:-11]}", f"<|box_end|>, {phrase('cat', B)}, {phrase('dog', A)}"),
        # In a phrase that does not count another box would not either.
        (f"{CAT} {OPEN_CAT}", f"<|box_end|>, {phrase('cat', B)}, {phrase('dog', A)}"),
    ],
)
def test_an_append_goes_on_in_the_phrase_that_is_open_or_closes_it(prefix, added) -> None:
    objects = [truth(5, 6, 7, 8), truth(1, 2, 30, 999, desc="dog")]
    assert REX.layout_append(prefix, objects, start_index=1).text == added
    closing = "<|box_end|>" if prefix else ""
    assert REX.layout_append(prefix, [], start_index=1).text == closing


@pytest.mark.parametrize("prefix", [CAT, f"{OPEN_CAT},", "{", phrase("cat")[:-11]])
def test_nothing_is_appended_where_no_phrase_is_open(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"open phrase; .*ParsedRollout\.prefix_text"):
        REX.layout_append(prefix, [], start_index=1)


def test_a_prefix_is_trimmed_behind_a_box(codec: HFTokenCodec) -> None:
    parsed = read(codec, f"{phrase('cat', A, '<1>', B)}, {phrase('dog', B)}")
    trimmed = trim_prefix(parsed, 1, codec, geometry=BOXES, answer_format=REX)
    assert (trimmed.prefix_text, trimmed.objects) == (OPEN_CAT, parsed.objects[:1])
    nothing = trim_prefix(parsed, 0, codec, geometry=BOXES, answer_format=REX)
    assert (nothing.prefix_text, nothing.fallback) == ("", True)


def test_a_tokenizer_without_the_tokens_is_told_of_other_formats() -> None:
    with pytest.raises(MissingTokensError) as caught:
        HFTokenCodec(
            rex_codec(byte_level_bpe())._tokenizer,
            coord_tokens=[*REX.coord_tokens[:-1], "<1000>"],
            markup_tokens=REX.markup_tokens,
        )
    assert str(caught.value).startswith(
        "its tokenizer lacks 1 of the 1004 tokens of data.answer_format (first: <1000>)"
    )
    assert "or data.answer_format to" in str(caught.value)


SCRAPS = [
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", ",", ", "),
    *(" ", "\n", "<5>", "<7><8>", "<", ">", "cat", "猫", "None", "5", "{", "<1000>", "<01>"),
    *(
        "<|im_end|>",
        "<|endoftext|>",
        "<|object_ref",
        '<1>"]}, <|box_end|>',
        "<|box_end|>, <|object_ref_start|>x",
    ),
    *(
        "<9><1><2><3>",
        ",<1><2><3><4>",
        "<1><2><3><4><5><6>",
        "<|object_ref_start|> <|object_ref_end|><|box_start|>",
    ),
]
NAMES = [name for name in DESCS if "<|" not in name][:4]


def damaged(generator: random.Random, codec: HFTokenCodec, num_ids: int) -> list[int]:
    text = REX.layout_objects(
        random_objects(generator, generator.choice([0, 1, 2, 3, 4, 5]), BOXES, NAMES)
    ).text
    if generator.random() < 0.2:
        text = text.replace(",", " ,\n")
    if generator.random() < 0.2:
        text = re.sub(r"(<\d+>)(<\d+>)", r"\2\1", text, count=1)
    token_ids = codec.encode(text)
    damage_few(token_ids, generator, codec, SCRAPS, num_ids)
    return token_ids


@pytest.mark.slow
def test_damaged_phrases_can_always_be_appended_to(rex_codecs) -> None:
    generator = random.Random(21)
    seen: Counter[object] = Counter()
    for codec in rex_codecs.values():
        num_ids = max(codec.special_ids) + 1200
        for _ in range(400):
            token_ids = damaged(generator, codec, num_ids)
            appended = random_objects(generator, generator.choice([0, 1, 3]), BOXES, NAMES)
            parsed, prefix = check_damaged(token_ids, codec, appended, BOXES, REX, seen)
            for one in parsed.objects:
                assert prefix[slice(*one.desc_value)].decode() == one.desc
            for number in range(len(parsed.objects) + 1):
                trimmed = trim_prefix(parsed, number, codec, geometry=BOXES, answer_format=REX)
                assert trimmed.objects == parsed.objects[:number]
    for outcome in ("fallback", "truncated"):
        assert {(outcome, True), (outcome, False)} <= seen.keys()
    assert {*DROPS, DropReason.MALFORMED} <= seen.keys()
    assert any(seen["fused", codec] for codec in rex_codecs.values())
