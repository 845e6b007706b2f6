"""What is trained is text as the model's tokenizer writes it, also where our text meets the
rollout's inside a token (decisions 33 and 37).
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from damaged_responses import Damage, random_objects
from rollout_support import RULES
from small_tokenizers import byte_level_bpe, qwen_words, small_codecs, with_coord_tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from learner.algorithms.matched_targets import ground_truth_target, parsed_target
from learner.targets import TokenRole
from shared.grounding.formats import ObjectDictionary
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import serialize_objects
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject, Sample
from shared.tokens.hf_codec import HFTokenCodec

SEVEN = GroundTruthObject(GeometryKind.BBOX, (100, 100, 300, 300), "seven")
TWO = GroundTruthObject(GeometryKind.BBOX, (500, 500, 800, 900), "two!")
FALSE = GroundTruthObject(GeometryKind.BBOX, (900, 0, 999, 40), "nine")
HALF = GroundTruthObject(GeometryKind.BBOX, (10, 10, 90, 90), "50%")
TRIANGLE = GroundTruthObject(GeometryKind.POLY, (100, 600, 300, 600, 200, 900), "three")


def fusing_braces() -> HFTokenCodec:
    """Splits as Qwen's tokenizers do, and fuses exactly the braces and quotes that they fuse."""
    # In the order of Qwen's merges: `"]]},` is `"]` `]},`, and `"]]}}` is `"]]` `}}`.
    merges = (
        'Ġ " / " , / " : / { " / [ " / } , / } } / " ] / Ġ {" / Ġ [" / { } / " }, / ] }, / " }} /'
        ' "] ] / [ [" / % "'
    )
    pairs = [tuple(pair.split()) for pair in merges.split(" / ")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(first + second for first, second in pairs)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = qwen_words()
    tokenizer.decoder = decoders.ByteLevel()
    return with_coord_tokens(tokenizer)


@pytest.fixture(scope="module")
def codecs(demo_checkpoint):
    return {
        "demo": HFTokenCodec(AutoTokenizer.from_pretrained(demo_checkpoint)),
        "fusing braces": fusing_braces(),
        "trained as Qwen's": with_coord_tokens(byte_level_bpe(200, qwen_words)),
        **small_codecs(),
    }


NAMES = [
    "demo",
    "fusing braces",
    "trained as Qwen's",
    "qwen words",
    "gpt2 words",
    "no words",
    "bytes",
]
QWEN_LIKE = ["demo", "fusing braces"]


@pytest.fixture
def codec(codecs, request):
    return codecs[request.param]


def target_of(token_ids, codec, truth, rules=RULES):
    sample = Sample("scene", (), 96, 96, tuple(truth))
    return parsed_target(parse_rollout(token_ids, codec), sample, codec, rules)


def pieces(target, codec, role):
    return [
        codec.piece_bytes(token).decode()
        for token, own in zip(target.token_ids, target.roles, strict=True)
        if own == role
    ]


@pytest.mark.slow
@pytest.mark.parametrize("codec", NAMES, indirect=True)
@pytest.mark.parametrize("field_order", ["desc_first", "geometry_first"])
def test_canonical_text_of_matched_objects_is_trained_exactly_as_the_tokenizer_writes_the_canonical_answer(
    codec, field_order
):
    rules = replace(RULES, answer_format=ObjectDictionary(field_order))

    def canonical(*objects):
        return codec.encode(serialize_objects(objects, field_order=field_order))

    def trained(answer, objects):
        return target_of(answer, codec, objects, rules).token_ids

    for objects in (
        [],
        [SEVEN],
        [TRIANGLE],
        [SEVEN, TWO],
        [SEVEN, TRIANGLE, TWO],
        [TRIANGLE, HALF, TRIANGLE],
    ):
        whole = canonical(*objects)
        expected = (*whole, codec.eos_token_id)
        assert trained(whole, objects) == expected, "perfect"
        assert trained(whole[1:], objects) == expected, "braceless"
        assert trained([], objects) == expected, "empty"
        assert trained(codec.encode("I see a seven."), objects) == expected, "prose"
        for length in range(len(whole)):
            assert trained(whole[:length], objects) == expected, f"cut after {length} tokens"
        for number in range(len(objects)):
            begun = canonical(*objects[:number])
            for length in range(len(begun), len(whole)):
                if len(parse_rollout(whole[:length], codec).objects) == number:
                    fewer = trained(whole[:length], objects[:number])
                    assert fewer == (*begun, codec.eos_token_id), "the truth had ended"
            assert trained(begun, objects) == expected, "all from one on were missed"


@pytest.mark.parametrize("codec", NAMES, indirect=True)
def test_an_end_that_the_model_wrote_in_pieces_is_trained_in_one(codec):
    """The last kept token is encoded anew where the tokenizer joins it with what is appended."""
    kept = codec.encode(serialize_objects([SEVEN])[:-2])
    pieced = [*kept, *codec.encode("}"), *codec.encode("}")]
    target = target_of(pieced, codec, [SEVEN])
    whole = codec.encode(serialize_objects([SEVEN]))
    assert target.token_ids[:-1] in (tuple(whole), (*pieced[:-2], *codec.encode("}}")))
    assert target.token_ids[: target.reading.num_kept] == tuple(pieced[: target.reading.num_kept])


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["demo", "qwen words", "no words", "bytes"], indirect=True)
def test_of_a_damaged_response_all_ids_stay_up_to_the_last_coord_token_and_beyond_it_where_they_are_not_the_tokenizers_own(
    codec,
):
    generator = random.Random(5)
    damage = Damage(generator, codec)
    for _ in range(150):
        ids = damage.response()
        truth = random_objects(generator, generator.choice([0, 1, 2]), ALL_GEOMETRY)
        parsed = parse_rollout(ids, codec)
        target = target_of(ids, codec, truth)
        reading, text = target.reading, b"".join(map(codec.piece_bytes, target.token_ids[:-1]))
        assert text.decode(errors="replace") == parsed.prefix_text + reading.appended_text
        assert target.token_ids[: reading.num_kept] == tuple(ids[: reading.num_kept])
        behind = [n for n in range(parsed.num_unchanged) if codec.coord_bin(ids[n]) is not None]
        begin = max(behind, default=-1) + 1
        own = ids[begin : parsed.num_unchanged]
        if codec.encode(b"".join(map(codec.piece_bytes, own)).decode(errors="replace")) == own:
            joint = b"".join(map(codec.piece_bytes, target.token_ids[begin:-1])).decode()
            assert target.token_ids[begin:-1] == tuple(codec.encode(joint))
        else:
            is_whole = parsed.num_unchanged == len(parsed.prefix_token_ids)
            assert reading.num_kept >= parsed.num_unchanged - is_whole
        # Ours is every token with appended text, and no other token is learned as appended text.
        ends = np.cumsum([len(codec.piece_bytes(token)) for token in target.token_ids])
        ours = ends > (0 if parsed.fallback else len(text) - len(reading.appended_text.encode()))
        ours[-1] = True  # EOS
        assert (
            np.isin(target.roles, [TokenRole.NEUTRAL, TokenRole.MATCHED_STRUCTURE]) <= ~ours
        ).all()
        assert (
            np.isin(target.roles, [TokenRole.STRUCTURE, TokenRole.DESC, TokenRole.CLOSING]) <= ours
        ).all()
        assert reading.num_prefix == int((~ours).sum())


@pytest.mark.parametrize("codec", QWEN_LIKE, indirect=True)
def test_the_choice_to_stop_or_to_go_on_behind_the_last_kept_object_is_taught_as_one_token(codec):
    """It holds appended text, so it is taught whatever the object is."""
    for kept in (SEVEN, FALSE):
        answer = codec.encode(serialize_objects([kept]))
        stop = target_of(answer, codec, [kept])
        assert pieces(stop, codec, TokenRole.CLOSING) == ["}}", "<|im_end|>"]
        go_on = target_of(answer, codec, [SEVEN, TWO])
        assert pieces(go_on, codec, TokenRole.STRUCTURE)[0] == "},"
    nothing = target_of(codec.encode("{}"), codec, [])
    assert pieces(nothing, codec, TokenRole.CLOSING) == ["{}", "<|im_end|>"]


@pytest.mark.parametrize("codec", QWEN_LIKE, indirect=True)
@pytest.mark.parametrize("truth", [[SEVEN, TWO], [SEVEN, TWO, FALSE], [SEVEN, FALSE], [FALSE]])
def test_going_on_within_the_prefix_is_neutral_whatever_comes_next(codec, truth):
    """Rewarded before matched objects and not before others, it would be learned more often than it
    is right.
    """
    target = target_of(codec.encode(serialize_objects([SEVEN, TWO, FALSE])), codec, truth)
    within = zip(target.token_ids[: target.reading.num_prefix], target.roles, strict=False)
    going_on = [role for token, role in within if codec.piece_bytes(token).endswith(b"},")]
    assert going_on == [TokenRole.NEUTRAL] * 2


@pytest.mark.parametrize("codec", ["fusing braces", "bytes"], indirect=True)
def test_an_opening_brace_that_the_answer_lost_is_taught_like_appended_text(codec):
    target = target_of(codec.encode(serialize_objects([SEVEN])[1:]), codec, [SEVEN])
    truth = ground_truth_target(Sample("scene", (), 96, 96, (SEVEN,)), codec, RULES)
    assert target.reading.parsed.fallback
    assert codec.piece_bytes(target.token_ids[0]).startswith(b"{")
    assert target.roles[0] == TokenRole.STRUCTURE
    assert (target.roles == truth.roles).all()
