"""Coordinate tokens, and the interface to a tokenizer (docs/explanation/decisions.md).

A coordinate token `<|coord_k|>` stands for bin k of an image axis (norm1000).
"""

from __future__ import annotations

import re
from typing import Protocol

NUM_BINS = 1000
"""Number of bins, 0..999, into which each axis of an image is divided (norm1000)."""

_COORD_TOKEN = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")


def coord_token(bin: int) -> str:
    """Return the coordinate token of a bin, `<|coord_k|>`. Raises ValueError outside 0..999."""
    if not 0 <= bin < NUM_BINS:
        raise ValueError(f"bin {bin} has no coordinate token; use a bin in 0..{NUM_BINS - 1}")
    return f"<|coord_{bin}|>"


def parse_coord_token(text: str) -> int | None:
    """Return the bin of a text that is exactly one coordinate token; None for other texts."""
    match = _COORD_TOKEN.fullmatch(text)
    return None if match is None else int(match[1])


COORD_TOKENS = tuple(coord_token(bin) for bin in range(NUM_BINS))
"""All coordinate tokens, in the order of bins."""


class TokenCodec(Protocol):
    """Conversion between token ids and bytes, for any tokenizer."""

    eos_token_id: int
    """The id of the token that ends an answer, such as `<|im_end|>`."""

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may end inside a character.

        Empty for an id without a token.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; no special tokens are added."""
        ...

    def coord_bin(self, token_id: int) -> int | None:
        """Return the bin (0..999) of a coordinate token; None for other tokens."""
        ...

    def coord_id(self, bin: int) -> int:
        """Return the id of the coordinate token of `bin` (0..999)."""
        ...
