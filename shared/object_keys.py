"""Counting the `object_{n}` keys of a response while its tokens come, wherever the tokens split them.

A key is `"object_`, one or more digits, `"`, any JSON whitespace and `:`; it is counted when its colon has come. An automaton over bytes, so that nothing has
to be decoded: `NEXT[state, byte]` is the next state, `FOUND[state, byte]` whether a key is complete.

Shape legend: S states, V token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

PieceBytes = Callable[[int], bytes]
"""The bytes of one token alone (`TokenCodec.piece_bytes`)."""

_OPENING = b'"object_'
_NUMBER = len(_OPENING)
_DIGITS, _CLOSED, _SPACED = _NUMBER + 1, _NUMBER + 2, _NUMBER + 3
"""States after: the opening (a lower state is how much of it has come), at least one digit, the closing quote, whitespace behind it."""
START = 0
NUM_STATES = _SPACED + 1


def _step(state: int, byte: int) -> tuple[int, bool]:
    if state < _NUMBER and byte == _OPENING[state]:
        return state + 1, False
    if state in (_NUMBER, _DIGITS) and byte in b"0123456789":
        return _DIGITS, False
    if state == _DIGITS and byte in b'"':
        return _CLOSED, False
    if state in (_CLOSED, _SPACED) and byte in b" \t\r\n":
        return _SPACED, False
    if state == _CLOSED and byte == _OPENING[1]:  # the closing quote of one was the opening quote of the next
        return 2, False
    return int(byte in b'"'), state in (_CLOSED, _SPACED) and byte in b":"


_STEPS = [[_step(state, byte) for byte in range(256)] for state in range(NUM_STATES)]
NEXT = np.array([[state for state, _ in row] for row in _STEPS], dtype=np.uint8)
FOUND = np.array([[found for _, found in row] for row in _STEPS], dtype=np.uint8)


class ObjectKeys:
    """The automaton over tokens of one vocabulary. Holds no sequence; remembers what each token did, so that a token costs one look-up."""

    def __init__(self, piece_bytes: PieceBytes) -> None:
        self.piece_bytes = piece_bytes
        self._known: list[dict[int, tuple[int, int]]] = [{} for _ in range(NUM_STATES)]

    def step(self, state: int, token_id: int) -> tuple[int, int]:
        """(the state after this token, the keys that it completed)."""
        known = self._known[state]
        if token_id not in known:
            known[token_id] = self._read(state, token_id)
        return known[token_id]

    def _read(self, state: int, token_id: int) -> tuple[int, int]:
        num_found = 0
        for byte in self.piece_bytes(token_id):
            state, found = _STEPS[state][byte]
            num_found += found
        return state, num_found


def token_steps(pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """`ObjectKeys.step` of every state and every token at once, for whoever looks it up on a device: (next state, keys completed), each uint8 [S, V]."""
    lengths = np.array([len(piece) for piece in pieces])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    data = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    states_SV = np.repeat(np.arange(NUM_STATES, dtype=np.uint8)[:, None], len(pieces), axis=1)
    found_SV = np.zeros_like(states_SV)
    for place in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > place)
        bytes_ = data[starts[longer] + place]
        before = states_SV[:, longer]
        found_SV[:, longer] += FOUND[before, bytes_]
        states_SV[:, longer] = NEXT[before, bytes_]
    return states_SV, found_SV
