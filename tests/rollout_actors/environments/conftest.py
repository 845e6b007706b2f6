"""What an environment actor needs that is no Ray actor, but an object of this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer as a model's folder has it."""
    from scripted_engines import demo_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    demo_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def collector() -> Iterator[None]:
    """An actor sets the garbage collector of its process, which is this one here."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
