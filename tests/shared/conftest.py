from __future__ import annotations

from typing import Any

import pytest
from small_tokenizers import FastTokenizer, byte_level_bpe, small_codecs

from shared.tokens.hf_codec import HFTokenCodec


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    """A fresh tokenizer without coord tokens, as a factory."""
    return lambda: FastTokenizer(byte_level_bpe())


@pytest.fixture(scope="session")
def codecs() -> dict[str, HFTokenCodec]:
    """Tokenizers that cut the same text differently, by name."""
    return small_codecs()


@pytest.fixture(scope="session")
def codec(codecs: dict[str, HFTokenCodec]) -> HFTokenCodec:
    return codecs["gpt2 words"]
