"""Small real tokenizers: byte-level BPE made with `tokenizers`, with 1,000 coord tokens and `<|im_end|>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

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
        self.backend_tokenizer = tokenizer
        self.added_tokens_decoder: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def add_tokens(self, tokens: list[str], special_tokens: bool = False) -> int:
        added = [AddedToken(token, special=special_tokens, normalized=False) for token in tokens]
        count = self.backend_tokenizer.add_special_tokens(added) if special_tokens else self.backend_tokenizer.add_tokens(added)
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        return count


# Of Qwen2 and Qwen3: one digit is one word, and so is a run of punctuation with the space in front of it.
QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def gpt2_words() -> Any:
    """Punctuation runs stay together, so `}}` and `"]}}` become tokens."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def qwen_words() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def no_words() -> Any:
    """Any bytes may become a token together, such as `"]}, "object_`."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def byte_level_bpe(num_merges: int = 144, words: Callable[[], Any] = gpt2_words) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + num_merges, initial_alphabet=alphabet, show_progress=False)
    # The coord tokens between empty quotes are cut out before a tokenizer splits anything.
    parts = CORPUS if words is gpt2_words else [part for text in CORPUS for part in text.replace('""', '"\0"').split("\0")]
    tokenizer.train_from_iterator(parts * 4, trainer)
    return tokenizer


def with_coord_tokens(tokenizer: Tokenizer) -> HFTokenCodec:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(f"<|coord_{k}|>", special=False, normalized=False) for k in range(1000)])
    return HFTokenCodec(FastTokenizer(tokenizer))


def small_codecs() -> dict[str, HFTokenCodec]:
    """Tokenizers that cut the same text differently, by name."""
    return {
        "gpt2 words": with_coord_tokens(byte_level_bpe()),
        "qwen words": with_coord_tokens(byte_level_bpe(600, qwen_words)),
        "no words": with_coord_tokens(byte_level_bpe(90, no_words)),
        "bytes": with_coord_tokens(byte_level_bpe(0)),
    }
