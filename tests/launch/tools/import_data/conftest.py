"""Imports as a user makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from import_support import imported

from launch.tools.import_data.__main__ import main
from shared.dataset import Dataset


@pytest.fixture
def run(tmp_path) -> Callable[..., tuple[Dataset, dict[str, Any]]]:
    """Import; return the records as a run loads them, and the counts."""

    def run(format: str, **options: object) -> tuple[Dataset, dict[str, Any]]:
        records = tmp_path / "out" / "train.jsonl"
        main([f"format={format}", f"out={records}", *(f"{k}={v}" for k, v in options.items())])
        return imported(records)

    return run


@pytest.fixture
def refused(tmp_path, capsys) -> Callable[..., str]:
    """Import what cannot be imported; return the message."""

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main([f"out={tmp_path / 'out' / 'train.jsonl'}", *arguments])
        assert caught.value.code == 2
        assert list(tmp_path.glob("out/*.json*")) == []
        return capsys.readouterr().err

    return refused
