"""Conversion between tokens and bytes: of a vocabulary, and of a Hugging Face tokenizer.

It does not import transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from shared.model_families import END_OF_TURN, IMAGE_PLACEHOLDERS, TILE_PLACEHOLDERS
from shared.tokens.vocabulary import COORD_TOKENS, TokenCodec

EXAMPLE_ANSWER = "the-model-said-this"
"""A text that stands for an answer, to find the text that a chat template writes after answers."""

ADD_TOKENS = "`rollmatch add-coord-tokens model=STOCK_FOLDER out=NEW_FOLDER`"

LACKING = (
    f"make a checkpoint with {ADD_TOKENS} and set model.path to it, or set data.answer_format to a"
    " format that the model knows: qwen3_vl or (for Qwen2.5-VL) qwen2_5_vl, with coordinates in"
    " digits, or (for Rex-Omni) rex_omni"
)
"""What a message advises if the tokenizer has no coordinate tokens."""

LACKING_OTHERS = (
    "set model.path to a checkpoint trained on this answer format, or data.answer_format to the"
    " format of this checkpoint"
)
"""What a message advises if the tokenizer lacks the tokens of `data.answer_format: rex_omni`."""


def add_coord_tokens(tokenizer: Any) -> int:
    """Add the coordinate tokens and `<|im_end|>` that `tokenizer` lacks, and return how many.

    The caller must resize the model's embeddings and save the tokenizer with the model.
    """
    special = tokenizer.add_tokens([END_OF_TURN], special_tokens=True)
    # Add ordinary tokens, so that decoding without special tokens keeps them.
    return int(special + tokenizer.add_tokens(list(COORD_TOKENS)))


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE vocabularies (GPT-2's table).

    Visible Latin-1 characters map to themselves; the others are numbered from U+0100 on.
    """
    visible = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    numbered = {chr(256 + i): byte for i, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in visible} | numbered


def piece_table(vocabulary: Mapping[str, int], literal: Mapping[int, str]) -> tuple[bytes, ...]:
    """Return the bytes of each token of a vocabulary, by token id; empty for an id without a token.

    Args:
        vocabulary: id of each token, which is written in the characters of `byte_alphabet`.
        literal: plain text of each added token (special and coordinate tokens), by id.

    Raises ValueError if the vocabulary is not byte-level.
    """
    alphabet = byte_alphabet()
    pieces = [b""] * (1 + max((*vocabulary.values(), *literal), default=-1))
    for token, token_id in vocabulary.items():
        if token_id in literal:
            continue
        if not alphabet.keys() >= set(token):
            raise ValueError(
                f"token {token_id} ({token!r}) is not written in the byte alphabet; use a"
                " byte-level BPE tokenizer (such as Qwen's)"
            )
        pieces[token_id] = bytes(alphabet[character] for character in token)
    for token_id, text in literal.items():
        pieces[token_id] = text.encode()
    return tuple(pieces)


def piece_spans(token_ids: Sequence[int], codec: TokenCodec) -> list[tuple[int, int]]:
    """Return the half-open byte span of each token in the concatenated bytes of these tokens.

    Example: tokens of 2, 0 and 3 bytes have the spans `(0, 2), (2, 2), (2, 5)`.
    """
    lengths = (len(codec.piece_bytes(token_id)) for token_id in token_ids)
    return list(pairwise(accumulate(lengths, initial=0)))


def token_pieces(tokenizer: Any) -> tuple[bytes, ...]:
    """Return the bytes of each token of a byte-level BPE tokenizer, by token id (`piece_table`).

    Raises ValueError for other kinds of tokenizers.
    """
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return piece_table(
        tokenizer.get_vocab(), {token_id: token.content for token_id, token in added.items()}
    )


_CONTROL_NAME = re.compile(r"<\|.+\|>", re.DOTALL)
_COORD_NAME = re.compile(r"<(?:\|coord_[0-9]+\||[0-9]+)>")


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the tokens of a tokenizer that texts in the user's data must not contain, by id.

    They control the model: special tokens, tokens with names like `<|...|>`, and placeholders of
    images. They do not include coordinate tokens, because a question may name a position, nor
    ordinary added tokens such as `<think>`, because a question may mention them.
    """
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    placeholders = {*IMAGE_PLACEHOLDERS, *TILE_PLACEHOLDERS}
    return {
        token_id: token.content
        for token_id, token in added.items()
        if (
            token.special
            or token.content in placeholders
            or _CONTROL_NAME.fullmatch(token.content) is not None
        )
        and _COORD_NAME.fullmatch(token.content) is None
    }


def example_conversation(tokenizer: Any, **template_args: object) -> str:
    """Return a question and the answer `EXAMPLE_ANSWER` as the chat template writes them.

    Returns an empty text if the template refuses such messages. Raises jinja2's TemplateSyntaxError
    if it is not valid.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    answer = {"role": "assistant", "content": EXAMPLE_ANSWER}
    turn = [{"role": "user", "content": "?"}, answer]
    # Some templates need a system message, others refuse it.
    for messages in (turn, [{"role": "system", "content": "?"}, *turn]):
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **template_args))
        except TemplateSyntaxError:
            raise
        except TemplateError:
            continue
    return ""


def find_control_token(text: str, tokens: Iterable[str]) -> str | None:
    """Return the first of these control tokens that a text contains, or None."""
    return next((token for token in tokens if token in text), None)


class MissingTokensError(ValueError):
    """Error about a tokenizer that lacks tokens which answers need."""


class HFTokenCodec:
    """Conversion between token ids and bytes for a byte-level BPE tokenizer (Qwen's family).

    The bytes of every token are computed once.

    Raises:
        MissingTokensError: the tokenizer has no `end_of_turn`, or lacks tokens of the answer
            format.
        ValueError: the tokenizer is not byte-level, or encodes a coordinate token as several
            tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        coord_tokens: Sequence[str] = COORD_TOKENS,
        markup_tokens: Sequence[str] = (),
        has_pieces: bool = True,
        end_of_turn: str | None = END_OF_TURN,
    ) -> None:
        """Read the vocabulary.

        Args:
            coord_tokens: the answer format's token of each bin; empty if coordinates are digits.
            markup_tokens: the other tokens that the format needs.
            has_pieces: whether answers are read token by token; if not, any kind of tokenizer
                works.
            end_of_turn: the token that ends an answer; None: the tokenizer has none.
        """
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._pieces = token_pieces(tokenizer) if has_pieces else None

        if end_of_turn not in vocabulary:
            raise MissingTokensError(
                f"its tokenizer has no {end_of_turn or 'eos_token'}, which ends an answer; give a"
                " chat (Instruct) checkpoint"
            )
        needed = (*markup_tokens, *coord_tokens)
        if absent := [token for token in needed if token not in vocabulary]:
            are_ours = coord_tokens == COORD_TOKENS
            missing = "the coordinate tokens"
            if len(absent) < len(needed) or not are_ours:
                kind = "coordinate tokens" if are_ours else "tokens of data.answer_format"
                missing = f"{len(absent)} of the {len(needed)} {kind} (first: {absent[0]})"
            raise MissingTokensError(
                f"its tokenizer lacks {missing}, which answers need for boxes;"
                f" {LACKING if are_ours else LACKING_OTHERS}"
            )
        self._coord_ids = tuple(vocabulary[token] for token in coord_tokens)
        self._coord_bins = {token_id: bin for bin, token_id in enumerate(self._coord_ids)}
        if self.encode("".join(needed)) != [vocabulary[token] for token in needed]:
            raise ValueError(
                "the tokenizer splits coordinate tokens into several tokens; make the checkpoint"
                f" with {ADD_TOKENS}, which adds them as single tokens"
            )

        self.eos_token_id = vocabulary[end_of_turn]
        special = {token_id for token_id, token in added.items() if token.special}
        special.update(vocabulary[token] for token in markup_tokens)
        self.special_ids = frozenset(special) - self._coord_bins.keys()
        """Ids of special tokens (turns, images, padding, markup), without coordinate tokens."""
        self.control_ids = self.special_ids | control_tokens(tokenizer).keys()
        """Ids of all tokens that text to be learned must not contain: `special_ids`, and the ids of
        the other `control_tokens`.
        """

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token; empty if the id is not in the vocabulary."""
        assert self._pieces is not None, "create the codec with has_pieces=True"
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def coord_bin(self, token_id: int) -> int | None:
        return self._coord_bins.get(token_id)

    @property
    def coord_ids(self) -> tuple[int, ...]:
        """Ids of the coordinate tokens, in the order of bins; empty if there are no such tokens."""
        return self._coord_ids

    def coord_id(self, bin: int) -> int:
        return self._coord_ids[bin]
