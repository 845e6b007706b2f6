"""Coordinate tokens, and the project's interface to a tokenizer (docs/explanation/decisions.md)."""

from __future__ import annotations

import re
from typing import Protocol

NUM_BINS = 1000
"""Bins of one axis in norm1000: 0..999."""

_COORD_TOKEN = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")


def coord_token(bin: int) -> str:
    """Return `<|coord_k|>`. Raises ValueError outside 0..999."""
    if not 0 <= bin < NUM_BINS:
        raise ValueError(f"bin {bin} has no coordinate token; use a bin in 0..{NUM_BINS - 1}")
    return f"<|coord_{bin}|>"


def parse_coord_token(text: str) -> int | None:
    """Return the bin if `text` is exactly one coordinate token, else None."""
    match = _COORD_TOKEN.fullmatch(text)
    return None if match is None else int(match[1])


COORD_TOKENS = tuple(coord_token(bin) for bin in range(NUM_BINS))
"""In the order of bins."""


class TokenCodec(Protocol):
    """Conversion between token ids and bytes, for any tokenizer."""

    eos_token_id: int
    """The id of `<|im_end|>`."""

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token; they may end inside a character.

        Empty for an id without a token.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; no special tokens are added."""
        ...

    def coord_bin(self, token_id: int) -> int | None:
        """Return 0..999 for a coordinate token, None for any other."""
        ...

    def coord_id(self, bin: int) -> int:
        """Return the id of the coordinate token of `bin` (0..999)."""
        ...
