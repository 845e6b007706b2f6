"""The bytes of every token of a vocabulary, and the byte spans of a token sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from shared.tokens.vocabulary import TokenCodec


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
