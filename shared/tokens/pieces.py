"""The bytes of every token of a vocabulary, and where the tokens of a sequence lie in its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from shared.tokens.vocabulary import TokenCodec


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE vocabularies (GPT-2's
    table), inverted: character to byte.

    Visible characters of Latin-1 stand for themselves; the others are numbered from U+0100 on.
    """
    visible = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + i): byte for i, byte in enumerate(hidden)
    }


def piece_table(vocabulary: Mapping[str, int], literal: Mapping[int, str]) -> tuple[bytes, ...]:
    """The bytes of each token, indexed by token id; empty where an id has no token.

    `vocabulary` maps tokens, written in the byte alphabet, to ids. `literal` maps the ids of added
    tokens (special tokens, coord tokens) to their text, which is not written in the alphabet.
    ValueError for a vocabulary that is not byte-level.
    """
    alphabet = byte_alphabet()
    pieces = [b""] * (1 + max((*vocabulary.values(), *literal), default=-1))
    for token, token_id in vocabulary.items():
        if token_id in literal:
            continue
        if not alphabet.keys() >= set(token):
            raise ValueError(
                f"token {token_id} ({token!r}) is not written in the byte alphabet; only byte-level"
                " BPE tokenizers (such as Qwen's) can be read"
            )
        pieces[token_id] = bytes(alphabet[character] for character in token)
    for token_id, text in literal.items():
        pieces[token_id] = text.encode()
    return tuple(pieces)


def piece_spans(token_ids: Sequence[int], codec: TokenCodec) -> list[tuple[int, int]]:
    """The half-open byte span of each token in the concatenation of all pieces: contiguous,
    ascending, empty for an empty piece.
    """
    return list(
        pairwise(
            accumulate((len(codec.piece_bytes(token_id)) for token_id in token_ids), initial=0)
        )
    )
