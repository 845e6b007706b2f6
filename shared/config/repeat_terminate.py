"""`rollout_matching.repeat_terminate`: the one source of the repeat guard's settings, for transformers and vLLM alike."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from shared.config.base import Section
from shared.repeat_guard import RepeatGuardSettings


class RepeatTerminateSection(Section):
    enabled: bool = False
    """End a sequence that repeats itself: its next token is the stop token."""

    min_new_tokens: NonNegativeInt = 64
    """New tokens before the guard looks."""

    max_consecutive_token_repeats: PositiveInt = 32
    """The same token this many times in a row is a repetition."""

    ngram_size: PositiveInt = 16
    """Length of the sequences of tokens that are compared."""

    ngram_repeats: Annotated[int, Field(ge=2)] = 4
    """The same sequence of `ngram_size` tokens this many times, one after the other, is a repetition."""

    max_object_keys: PositiveInt | None = None
    """More `object_{n}` keys than this are a repetition; null: no limit."""

    def settings(self) -> RepeatGuardSettings | None:
        """What a guard is made with; None where it is off."""
        if not self.enabled:
            return None
        return RepeatGuardSettings(self.min_new_tokens, self.max_consecutive_token_repeats, self.ngram_size, self.ngram_repeats, self.max_object_keys)
