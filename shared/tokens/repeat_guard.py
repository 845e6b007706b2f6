"""The repeat guard: a rule that ends an answer that repeats itself (spec: repeat termination).

A sequence here is the generated tokens of an answer, without the prompt. Once it has
`min_new_tokens` tokens, it is checked after each token. It is repetitive if

- its last `max_consecutive_token_repeats` tokens are all the same token, or
- its last tokens are the same `ngram_size` tokens, `ngram_repeats` times back to back, or
- more than `max_object_keys` keys `object_{n}` are complete in it.

Then the sequence's next token is not sampled: it is set to the stop token. A repetition that begins
before token `min_new_tokens` counts with its whole length, if it still lasts at that token. The
rule depends only on the tokens, so transformers, vLLM and the receiver of an answer find the same
end (`mark_forced`).

An automaton over bytes counts the keys, however tokens split them, so nothing is decoded. A key is
`"object_`, one or more digits, `"`, any JSON whitespace and `:`; it counts at its colon.
`NEXT[state, byte]` is the next state, `FOUND[state, byte]` is 1 if the byte completes a key.

Shape legend: S states, V token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shared.errors import RolloutError
from shared.rollouts import FinishReason, Rollout

PieceBytes = Callable[[int], bytes]
"""A function that returns the bytes of a token (`TokenCodec.piece_bytes`)."""

_OPENING = b'"object_'
_NUMBER = len(_OPENING)
_DIGITS = _NUMBER + 1
_CLOSED = _NUMBER + 2
_SPACED = _NUMBER + 3
"""The states `_NUMBER` to `_SPACED` follow the opening, a digit, the closing quote and whitespace.
A lower state is the number of bytes of the opening that were read."""
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
    # The closing quote of a string may be the opening quote of the next.
    if state == _CLOSED and byte == _OPENING[1]:
        return 2, False
    return int(byte in b'"'), state in (_CLOSED, _SPACED) and byte in b":"


_STEPS = [[_step(state, byte) for byte in range(256)] for state in range(NUM_STATES)]
NEXT = np.array([[state for state, _ in row] for row in _STEPS], dtype=np.uint8)
FOUND = np.array([[found for _, found in row] for row in _STEPS], dtype=np.uint8)


class ObjectKeys:
    """Counts the JSON keys `object_{n}` in an answer, token by token, with a finite automaton.

    It holds no answer: the caller keeps the automaton's state. The result of `step` is cached for
    each state and token.
    """

    def __init__(self, piece_bytes: PieceBytes) -> None:
        self.piece_bytes = piece_bytes
        self._known: list[dict[int, tuple[int, int]]] = [{} for _ in range(NUM_STATES)]

    def step(self, state: int, token_id: int) -> tuple[int, int]:
        """Return the automaton's state after this token of an answer.

        Also return the number of JSON keys `object_{n}` in the answer that the token completes.
        """
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
    """Return the results of `ObjectKeys.step` for every state and token, as tables for a GPU.

    They are the next states and the numbers of completed keys, each uint8 [S, V]. `pieces` are the
    bytes of each token.
    """
    lengths = np.array([len(piece) for piece in pieces])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    data = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    states_SV = np.repeat(np.arange(NUM_STATES, dtype=np.uint8)[:, None], len(pieces), axis=1)
    found_SV = np.zeros_like(states_SV)
    for index in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > index)
        bytes_ = data[starts[longer] + index]
        before = states_SV[:, longer]
        found_SV[:, longer] += FOUND[before, bytes_]
        states_SV[:, longer] = NEXT[before, bytes_]
    return states_SV, found_SV


@dataclass(frozen=True, slots=True)
class RepeatGuardSettings:
    """The settings of the repeat guard (`rollout_matching.repeat_terminate`).

    Example: `RepeatGuardSettings(64, 32, 16, 4, None)` ends a sequence of at least 64 tokens after
    32 equal tokens in a row, or after 16 tokens four times back to back.
    """

    min_new_tokens: int
    """Number of generated tokens before the first check."""
    max_consecutive_token_repeats: int
    """How many equal tokens in a row count as a repetition; at least 1."""
    ngram_size: int
    """Length, in tokens, of the n-grams that `ngram_repeats` counts; at least 1."""
    ngram_repeats: int
    """How many equal n-grams in a row count as a repetition; at least 2."""
    max_object_keys: int | None
    """Answers with more JSON keys `object_{n}` count as a repetition; None means no limit."""


class RepeatRule:
    """The repeat guard's rule for all answers of an engine; it creates the guard of each answer.

    It holds the settings and, if JSON keys are limited, the bytes of the vocabulary's tokens.
    """

    def __init__(
        self, settings: RepeatGuardSettings, piece_bytes: PieceBytes | None = None
    ) -> None:
        """Create the rule; `piece_bytes` is needed if and only if `max_object_keys` is set."""
        assert piece_bytes is not None or settings.max_object_keys is None, (
            "max_object_keys needs piece_bytes"
        )
        self.settings = settings
        self.object_keys: ObjectKeys | None = None
        if piece_bytes is not None and settings.max_object_keys is not None:
            self.object_keys = ObjectKeys(piece_bytes)

    def guard(self) -> RepeatGuard:
        """Create the repeat guard of a new answer."""
        return RepeatGuard(self)

    def first_repetition(self, token_ids: Sequence[int]) -> int | None:
        """Return after how many tokens the rule ends this answer; None if it does not."""
        guard = self.guard()
        for number, token_id in enumerate(token_ids, 1):
            if guard.push(token_id):
                return number
        return None


class RepeatGuard:
    """Finds out when one answer begins to repeat itself, at constant cost per token."""

    __slots__ = (
        "_key_state",
        "_keys",
        "_lag",
        "_max_keys",
        "_min_tokens",
        "_needed_lag",
        "_needed_run",
        "_num_keys",
        "_num_periodic",
        "_run",
        "_tokens",
    )

    def __init__(self, rule: RepeatRule) -> None:
        settings = rule.settings
        self._min_tokens = settings.min_new_tokens
        self._needed_run = settings.max_consecutive_token_repeats
        self._lag = settings.ngram_size
        self._needed_lag = settings.ngram_size * (settings.ngram_repeats - 1)
        self._max_keys = settings.max_object_keys
        self._keys = rule.object_keys
        self._tokens: list[int] = []
        self._run = 0
        """Number of equal tokens at the end of the answer so far."""
        self._num_periodic = 0
        """Number of tokens at the end of the answer so far of which each equals the token
        `ngram_size` places earlier.
        """
        self._key_state = START
        self._num_keys = 0

    def push(self, token_id: int) -> bool:
        """Add the answer's next token. Return True if the token after it must be the stop token."""
        tokens = self._tokens
        num_before = len(tokens)
        self._run = self._run + 1 if num_before and tokens[-1] == token_id else 1
        self._num_periodic = (
            self._num_periodic + 1
            if num_before >= self._lag and tokens[-self._lag] == token_id
            else 0
        )
        tokens.append(token_id)
        if self._keys is not None:
            self._key_state, num_found = self._keys.step(self._key_state, token_id)
            self._num_keys += num_found
        if num_before + 1 < self._min_tokens:
            return False
        return (
            self._run >= self._needed_run
            or self._num_periodic >= self._needed_lag
            or (self._max_keys is not None and self._num_keys > self._max_keys)
        )


def mark_forced(rollout: Rollout, rule: RepeatRule) -> Rollout:
    """Return the rollout, with its stop token marked as forced if the repeat guard forced it.

    Only for requests with a stop token: without a stop token, nothing can be forced.

    Raises RolloutError if the answer continues after a repetition, so the engine did not apply the
    rule.
    """
    length = rule.first_repetition(rollout.response_token_ids)
    if length is None:
        return rollout
    if length < len(rollout.response_token_ids):
        raise RolloutError(
            f"sample {rollout.sample_id} repeats itself after {length} tokens but continues to"
            f" {len(rollout.response_token_ids)}: the repeat guard"
            " (rollout_matching.repeat_terminate) was not active, or had other settings. If another"
            " run uses this server, give each run its own server; else report this with error.txt",
            actor=rollout.actor,
            phase="generate",
        )
    if rollout.stop_token_id is None:  # `max_new_tokens` came first
        return rollout
    return replace(
        rollout,
        finish_reason=FinishReason.REPETITION,
        stop_token_logprob=None,
        forced_positions=(length,),
    )
