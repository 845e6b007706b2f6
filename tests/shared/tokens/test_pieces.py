from itertools import pairwise

from shared.tokens.hf_codec import HFTokenCodec, byte_alphabet, piece_spans, piece_table


def test_every_byte_has_its_own_printable_character() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert all(character.isprintable() for character in alphabet)
    assert [alphabet[character] for character in "ĠĊ}"] == [ord(" "), ord("\n"), ord("}")]


def test_ids_without_a_token_have_empty_pieces() -> None:
    assert piece_table({"a": 0, "Ġb": 3}, {2: "<é>"}) == (b"a", b"", "<é>".encode(), b" b")
    assert piece_table({}, {}) == ()


def test_spans_are_contiguous_and_cover_the_text(codec: HFTokenCodec) -> None:
    text = '{"object_1": {"desc": "größe 猫 🙂", "bbox_2d": ["<|coord_5|>"]}}'.encode()
    token_ids = codec.encode(text.decode())
    spans = piece_spans(token_ids, codec)
    assert (spans[0][0], spans[-1][1]) == (0, len(text))
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert [text[start:end] for start, end in spans] == list(map(codec.piece_bytes, token_ids))
    assert piece_spans([], codec) == []
