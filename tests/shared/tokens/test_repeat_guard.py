"""The rule that ends a sequence, against the obvious reading of it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from shared.errors import RolloutError
from shared.rollouts import FinishReason, Rollout
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule, mark_forced

NEVER = RepeatGuardSettings(0, 10**6, 10**6, 2, None)
PIECES = [b'{"object_', b"1", b"2", b'": ', b'"object_3": ', b", ", b'"', b"a"]


def settings(**changes: int | None) -> RepeatGuardSettings:
    values: dict[str, int | None] = {name: getattr(NEVER, name) for name in NEVER.__slots__}
    return RepeatGuardSettings(**{**values, **changes})  # type: ignore[arg-type]


def rule(**changes: int | None) -> RepeatRule:
    chosen = settings(**changes)
    return RepeatRule(chosen, None if chosen.max_object_keys is None else PIECES.__getitem__)


def exceeds(tokens: Sequence[int], s: RepeatGuardSettings) -> bool:
    """The rule as its text says it, over the whole sequence."""
    if len(tokens) < s.min_new_tokens or not tokens:
        return False
    tail = list(tokens[-s.max_consecutive_token_repeats :])
    if len(tail) == s.max_consecutive_token_repeats and len(set(tail)) == 1:
        return True
    tail = list(tokens[-s.ngram_size * s.ngram_repeats :])
    if tail == tail[: s.ngram_size] * s.ngram_repeats:
        return True
    if s.max_object_keys is None:
        return False
    text = b"".join(PIECES[token] for token in tokens)
    return len(re.findall(rb'"object_[0-9]+"\s*:', text)) > s.max_object_keys


@pytest.mark.slow
def test_thousands_of_random_sequences_end_where_the_obvious_reading_ends_them() -> None:
    rng = random.Random(11)
    ended = 0
    for _ in range(5000):
        s = RepeatGuardSettings(
            rng.randint(0, 12),
            rng.randint(2, 6),
            rng.randint(1, 4),
            rng.randint(2, 4),
            rng.choice([None, 1, 2, 4]),
        )
        guard = RepeatRule(s, PIECES.__getitem__).guard()
        tokens: list[int] = []
        period = rng.choices(range(len(PIECES)), k=rng.randint(1, 5))
        for number in range(rng.randint(1, 40)):
            is_periodic = rng.random() < 0.8
            tokens.append(
                period[number % len(period)] if is_periodic else rng.randrange(len(PIECES))
            )
            verdict = guard.push(tokens[-1])
            assert verdict == exceeds(tokens, s), (s, tokens)
            ended += verdict
    assert ended > 5000


@pytest.mark.parametrize(
    ("changes", "tokens", "first"),
    [
        # As many of the same token as the limit are a repetition, and one less is none.
        ({"max_consecutive_token_repeats": 4}, [9, 5, 5, 5, 5, 5], 5),
        ({"max_consecutive_token_repeats": 4}, [5, 5, 5, 9, 5, 5, 5], None),
        # An n-gram counts back to back, and not with a gap.
        ({"ngram_size": 2, "ngram_repeats": 3}, [7, 1, 2, 1, 2, 1, 2, 1], 7),
        ({"ngram_size": 2, "ngram_repeats": 3}, [1, 2, 1, 2, 7, 1, 2, 1, 2], None),
        # A loop shorter than the n-gram is one of its multiples.
        ({"ngram_size": 4, "ngram_repeats": 2}, [1, 2] * 8, 8),
        # Nothing is looked at before the minimum of new tokens, and what began before it counts.
        ({"min_new_tokens": 6, "max_consecutive_token_repeats": 4}, [5] * 8, 6),
        ({"min_new_tokens": 6, "max_consecutive_token_repeats": 4}, [5, 5, 5, 5, 1, 2, 3], None),
    ],
)
def test_a_sequence_ends_at_its_first_repetition(changes, tokens, first) -> None:
    assert rule(**changes).first_repetition(tokens) == first


def test_one_key_more_than_the_cap_ends_the_sequence_when_its_colon_comes() -> None:
    one = [0, 1, 3]
    assert rule(max_object_keys=2).first_repetition(one * 2) is None
    assert rule(max_object_keys=2).first_repetition(one * 3) == 9


def test_guards_of_one_rule_do_not_share_their_sequences() -> None:
    shared = rule(max_consecutive_token_repeats=2, max_object_keys=1)
    first, second = shared.guard(), shared.guard()
    assert not first.push(1)
    assert not second.push(1)
    assert first.push(1)


def rollout(tokens: Sequence[int], stop: int | None) -> Rollout:
    reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
    logprobs = (-0.1,) * len(tokens)
    stop_logprob = None if stop is None else 0.0
    return Rollout(
        *(0, 0, "scene", (), tuple(tokens), stop, logprobs, stop_logprob, reason),
        *((), 0, "actor-1", 0, 1, 0.1),
    )


def test_a_stop_token_behind_a_repetition_was_forced_and_has_no_log_probability() -> None:
    marked = mark_forced(rollout([9, 5, 5, 5], 99), rule(max_consecutive_token_repeats=3))
    assert (marked.finish_reason, marked.forced_positions) == (FinishReason.REPETITION, (4,))
    assert (marked.stop_token_id, marked.stop_token_logprob) == (99, None)
    assert marked.logprobs == (-0.1,) * 4, "what was sampled keeps its own"


@pytest.mark.parametrize(
    ("tokens", "stop"), [([9, 5, 5], 99), ([9, 5, 5], None), ([9, 5, 5, 5], None)]
)
def test_other_rollouts_stay_as_they_are(tokens: list[int], stop: int | None) -> None:
    sampled = rollout(tokens, stop)
    assert mark_forced(sampled, rule(max_consecutive_token_repeats=3)) is sampled


def test_a_response_that_goes_on_behind_a_repetition_was_not_guarded() -> None:
    message = "generate on actor-1: sample scene repeats itself after 3 tokens but continues to 5: "
    with pytest.raises(RolloutError, match=message):
        mark_forced(rollout([5, 5, 5, 5, 1], 99), rule(max_consecutive_token_repeats=3))
