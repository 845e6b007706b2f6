"""When a sequence repeats itself, and is ended: the one rule for transformers and vLLM (spec: repeat termination)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RepeatGuardSettings:
    """`rollout_matching.repeat_terminate`, whose keys these are."""

    min_new_tokens: int
    max_consecutive_token_repeats: int
    ngram_size: int
    ngram_repeats: int
    max_object_keys: int | None
