from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
from tokenizers import AddedToken, Tokenizer, models

from shared.tokens.hf_codec import HFTokenCodec, MissingTokensError, add_coord_tokens

CHARACTERS = [*range(1, 0x2FF), *range(0x4E00, 0x4E80), *range(0x1F600, 0x1F640)]
_RANDOM = random.Random(0)
TEXTS = [
    "black cat",
    "größe 猫 🙂 \n\t",
    '{"a": [1, "\\u0041"]}}',
    "<|coord_0|><|coord_999|> <|im_end|>",
    "\x00\x7f¡ÿĀ",
    "",
    *("".join(map(chr, _RANDOM.choices(CHARACTERS, k=20))) for _ in range(200)),
]


def joined(codec: HFTokenCodec, token_ids: list[int]) -> bytes:
    return b"".join(map(codec.piece_bytes, token_ids))


def test_pieces_join_to_the_exact_bytes_of_the_text(codecs: dict[str, HFTokenCodec]) -> None:
    for codec in codecs.values():
        for text in TEXTS:
            assert joined(codec, codec.encode(text)) == text.encode()


def test_a_character_may_be_split_over_tokens(codec: HFTokenCodec) -> None:
    token_ids = codec.encode("鱼")
    assert len(token_ids) > 1
    assert joined(codec, token_ids) == "鱼".encode()


def test_coord_tokens_are_bins_and_special_tokens_are_known(codec: HFTokenCodec) -> None:
    assert [codec.coord_bin(codec.coord_id(bin)) for bin in range(1000)] == list(range(1000))
    assert codec.encode("<|coord_417|>") == [codec.coord_id(417)]
    assert codec.coord_bin(codec.eos_token_id) is None
    assert codec.piece_bytes(codec.eos_token_id) == b"<|im_end|>"
    special = {codec.piece_bytes(token_id) for token_id in codec.special_ids}
    assert special == {b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"}


@pytest.mark.parametrize("token_id", [1_000_000, -1])
def test_an_id_in_the_padding_of_the_embeddings_has_no_text(
    codec: HFTokenCodec, token_id: int
) -> None:
    assert codec.piece_bytes(token_id) == b""
    assert codec.coord_bin(token_id) is None


def test_missing_tokens_are_refused_until_they_are_added(plain_tokenizer: Any) -> None:
    tokenizer = plain_tokenizer()
    message = r"has no <\|im_end\|>, .*; give a chat \(Instruct\) checkpoint"
    with pytest.raises(MissingTokensError, match=message):
        HFTokenCodec(tokenizer)
    assert add_coord_tokens(tokenizer) == 1001
    codec = HFTokenCodec(tokenizer)
    assert codec.encode("<|coord_3|><|im_end|>") == [codec.coord_id(3), codec.eos_token_id]
    assert add_coord_tokens(tokenizer) == 0


def test_a_single_missing_coord_token_is_named(plain_tokenizer: Any) -> None:
    tokenizer = plain_tokenizer()
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens([f"<|coord_{k}|>" for k in range(1000) if k != 613])
    message = r"lacks 1 of the 1000 coordinate tokens \(first: <\|coord_613\|>\)"
    with pytest.raises(ValueError, match=message):
        HFTokenCodec(tokenizer)


def test_a_vocabulary_that_is_not_byte_level_is_refused() -> None:
    class Other:
        added_tokens_decoder: ClassVar[dict[int, AddedToken]] = {}

        def get_vocab(self) -> dict[str, int]:
            return Tokenizer(models.WordLevel({"▁猫": 0}, unk_token="▁猫")).get_vocab()

    with pytest.raises(ValueError, match="byte-level"):
        HFTokenCodec(Other())


def test_it_reads_the_fast_tokenizers_of_transformers(plain_tokenizer: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain_tokenizer().backend_tokenizer)
    assert add_coord_tokens(tokenizer) == 1001
    codec = HFTokenCodec(tokenizer)
    assert codec.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert codec.special_ids == {codec.eos_token_id}
    for text in TEXTS[:6]:
        token_ids = codec.encode(text)
        assert joined(codec, token_ids) == text.encode() == tokenizer.decode(token_ids).encode()
