"""The tokens of a response as one text, with the way back from its bytes to tokens (DESIGN 7.2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shared.tokens.vocabulary import END_OF_TURN, TokenCodec


@dataclass(frozen=True, slots=True)
class Response:
    """A response up to its hard stop. Lists by coord token have one element per coord token of the response, wherever it stands."""

    token_ids: list[int]
    text: bytes
    ends: list[int]
    """[token]: offset behind each token's bytes, ascending."""
    coord_positions: list[int]
    """[coord token]: its position among `token_ids`, ascending."""
    coord_ends: list[int]
    """[coord token]: offset behind its bytes."""
    coord_bins: list[int]
    """[coord token]: 0..999."""

    @classmethod
    def read(cls, token_ids: Sequence[int], codec: TokenCodec) -> Response:
        """Up to `<|im_end|>`, which ends a response as a token and as text."""
        kept = list(token_ids)
        if codec.eos_token_id in kept:
            del kept[kept.index(codec.eos_token_id) :]
        # The codec is asked once per distinct token: a response repeats few of them over and over.
        pieces = {token_id: codec.piece_bytes(token_id) for token_id in set(kept)}
        bins = {token_id: bin for token_id in pieces if (bin := codec.coord_bin(token_id)) is not None}
        parts = list(map(pieces.__getitem__, kept))
        ends = list(accumulate(map(len, parts)))
        positions = [position for position, token_id in enumerate(kept) if token_id in bins]
        text, _, _ = b"".join(parts).partition(END_OF_TURN.encode())
        return cls(kept, text, ends, positions, [ends[position] for position in positions], [bins[kept[position]] for position in positions])

    def coords_in(self, span: tuple[int, int]) -> slice:
        """The coord tokens that end in a span of bytes, as a slice of the lists by coord token."""
        return slice(bisect_right(self.coord_ends, span[0]), bisect_right(self.coord_ends, span[1]))

    def coord_spans(self, span: tuple[int, int]) -> dict[tuple[int, int], int]:
        """Byte span, counted from the start of `span`, of each coord token that ends in it; to its index in the lists by coord token."""
        spans: dict[tuple[int, int], int] = {}
        coords = self.coords_in(span)
        for coord in range(coords.start, coords.stop):
            position = self.coord_positions[coord]
            start = self.ends[position - 1] if position else 0
            spans[start - span[0], self.ends[position] - span[0]] = coord
        return spans
