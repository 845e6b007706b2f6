"""The codec of a `tokenizers`-backed tokenizer; transformers itself is not imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from shared.model_families import END_OF_TURN, IMAGE_PLACEHOLDERS, TILE_PLACEHOLDERS
from shared.tokens.pieces import piece_table
from shared.tokens.vocabulary import COORD_TOKENS

ADD_TOKENS = "`rollmatch add-coord-tokens model=STOCK_FOLDER out=NEW_FOLDER`"

LACKING = (
    f"make a checkpoint that has them with {ADD_TOKENS}, and set model.path to it, or set"
    " data.answer_format: qwen3_vl (of a Qwen2.5-VL qwen2_5_vl), whose coordinates are digits, or"
    " of a Rex-Omni rex_omni"
)
"""The remedy for a tokenizer without coord tokens."""

LACKING_OTHERS = (
    "set model.path to a checkpoint that was trained on answers of this format, or"
    " data.answer_format to the format of this one"
)
"""The remedy for a tokenizer without the tokens of another format: `rex_omni` is a model's own."""


def add_coord_tokens(tokenizer: Any) -> int:
    """Add the coord tokens and `<|im_end|>` that `tokenizer` lacks, and return their number.

    The caller lets the model's embeddings grow, and saves the tokenizer beside the model.
    """
    special = tokenizer.add_tokens([END_OF_TURN], special_tokens=True)
    # Ordinary tokens, so that decoding without special tokens keeps them.
    return int(special + tokenizer.add_tokens(list(COORD_TOKENS)))


def token_pieces(tokenizer: Any) -> tuple[bytes, ...]:
    """Return the `piece_table` of a byte-level BPE tokenizer; ValueError for any other."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return piece_table(
        tokenizer.get_vocab(), {token_id: token.content for token_id, token in added.items()}
    )


_CONTROL_NAME = re.compile(r"<\|.+\|>", re.DOTALL)
_COORD_NAME = re.compile(r"<(?:\|coord_[0-9]+\||[0-9]+)>")


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the added tokens that mean something else than their characters, by id.

    They are the special ones, those whose names have the form `<|...|>`, and the placeholders of
    images. Coord tokens are not among them: a question may name a place. Ordinary added tokens,
    such as `<think>`, are not either: a question may speak of them.
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


def find_control_token(text: str, tokens: Iterable[str]) -> str | None:
    """Return one of these tokens that `text` contains; None if there is none."""
    return next((token for token in tokens if token in text), None)


class MissingTokensError(ValueError):
    """A tokenizer that lacks tokens that answers are written in."""


class HFTokenCodec:
    """The `TokenCodec` of a byte-level BPE tokenizer (Qwen's family).

    The piece of every token is computed once.

    Raises:
        MissingTokensError: the tokenizer has no `<|im_end|>`, or lacks tokens of the answer format.
        ValueError: it is not byte-level, or does not encode each coord token as one token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        coord_tokens: Sequence[str] = COORD_TOKENS,
        markup_tokens: Sequence[str] = (),
        has_pieces: bool = True,
    ) -> None:
        """Read the vocabulary.

        Args:
            coord_tokens: the token of each bin, as the answer format has them; none where it writes
                coordinates in digits.
            markup_tokens: the other tokens that it needs.
            has_pieces: False where nobody reads answers token by token: the tokenizer may be of any
                kind.
        """
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._pieces = token_pieces(tokenizer) if has_pieces else None

        if END_OF_TURN not in vocabulary:
            raise MissingTokensError(
                f"its tokenizer has no {END_OF_TURN}, which ends a response; give a chat (Instruct)"
                " checkpoint"
            )
        needed = (*markup_tokens, *coord_tokens)
        if absent := [token for token in needed if token not in vocabulary]:
            are_ours = coord_tokens == COORD_TOKENS
            missing = "the coord tokens"
            if len(absent) < len(needed) or not are_ours:
                kind = "coord tokens" if are_ours else "tokens of data.answer_format"
                missing = f"{len(absent)} of the {len(needed)} {kind}, {absent[0]} first"
            raise MissingTokensError(
                f"its tokenizer lacks {missing}, which boxes are written in;"
                f" {LACKING if are_ours else LACKING_OTHERS}"
            )
        self._coord_ids = tuple(vocabulary[token] for token in coord_tokens)
        self._coord_bins = {token_id: bin for bin, token_id in enumerate(self._coord_ids)}
        if self.encode("".join(needed)) != [vocabulary[token] for token in needed]:
            raise ValueError(
                "the tokenizer splits coord tokens when it encodes them; make the checkpoint with"
                f" {ADD_TOKENS}, which adds them whole"
            )

        self.eos_token_id = vocabulary[END_OF_TURN]
        special = {token_id for token_id, token in added.items() if token.special}
        special.update(vocabulary[token] for token in markup_tokens)
        self.special_ids = frozenset(special) - self._coord_bins.keys()
        """Ids of special tokens (turns, images, padding, markup); coord tokens are not among
        them."""
        self.control_ids = self.special_ids | control_tokens(tokenizer).keys()
        """These and the others of `control_tokens`, which no text to be learned may hold."""

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of this token alone; none of an id beyond the vocabulary."""
        assert self._pieces is not None, "pieces are of models that write boxes"
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def coord_bin(self, token_id: int) -> int | None:
        return self._coord_bins.get(token_id)

    @property
    def coord_ids(self) -> tuple[int, ...]:
        """Ids of the coord tokens by bin; empty without them."""
        return self._coord_ids

    def coord_id(self, bin: int) -> int:
        return self._coord_ids[bin]
