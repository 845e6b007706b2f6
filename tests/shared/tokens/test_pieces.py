from itertools import pairwise

from shared.tokens.hf_codec import HFTokenCodec
from shared.tokens.pieces import byte_alphabet, piece_spans, piece_table


def test_every_byte_has_its_own_printable_character() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert all(character.isprintable() for character in alphabet)
    assert alphabet["Ġ"] == ord(" ") and alphabet["Ċ"] == ord("\n") and alphabet["}"] == ord("}")


def test_ids_without_a_token_have_empty_pieces() -> None:
    assert piece_table({"a": 0, "Ġb": 3}, {2: "<é>"}) == (b"a", b"", "<é>".encode(), b" b")
    assert piece_table({}, {}) == ()


def test_spans_are_contiguous_and_cover_the_text(codec: HFTokenCodec) -> None:
    text = '{"object_1": {"desc": "größe 猫 🙂", "bbox_2d": ["<|coord_5|>"]}}'
    token_ids = codec.encode(text)
    spans = piece_spans(token_ids, codec)
    assert len(spans) == len(token_ids) and spans[0][0] == 0 and spans[-1][1] == len(text.encode())
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert [text.encode()[start:end] for start, end in spans] == [
        codec.piece_bytes(token_id) for token_id in token_ids
    ]
    assert piece_spans([], codec) == []
