"""A small real tokenizer: byte-level BPE made with `tokenizers`, with 1,000 coord tokens and `<|im_end|>`."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.tokens.hf_codec import HFTokenCodec

CORPUS = [
    '{"object_1": {"desc": "black cat", "bbox_2d": ["", "", "", ""]}, "object_2": {"desc": "", "poly": [["", ""], ["", ""], ["", ""]]}}',
    '{"object_13": {"bbox_2d": ["", ""], "desc": "größe 猫 🙂."}}',
    '{"object_1": {"desc": "x."}}',
    '"]}} "]}} "]}, "]}, {}',
]


class FastTokenizer:
    """The methods of transformers' tokenizers that the codec uses, without importing transformers, which takes seconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.added_tokens_decoder: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def add_tokens(self, tokens: list[str], special_tokens: bool = False) -> int:
        added = [AddedToken(token, special=special_tokens, normalized=False) for token in tokens]
        count = self._tokenizer.add_special_tokens(added) if special_tokens else self._tokenizer.add_tokens(added)
        self.added_tokens_decoder = self._tokenizer.get_added_tokens_decoder()
        return count


def byte_level_bpe(vocab_size: int = 400) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Qwen's and GPT-2's splitting: punctuation runs stay together, so `}}` and `"]}}` become tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    """A fresh tokenizer without coord tokens, as a factory."""
    return lambda: FastTokenizer(byte_level_bpe())


@pytest.fixture(scope="session")
def codec() -> HFTokenCodec:
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(f"<|coord_{k}|>", special=False, normalized=False) for k in range(1000)])
    return HFTokenCodec(FastTokenizer(tokenizer))
