"""What an error says, here and behind a process boundary."""

from __future__ import annotations

import pickle

import pytest

from shared.errors import StorageError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            StorageError("/run/a", "no space"),
            "cannot write /run/a: no space; free space or permit writing there, or choose another folder with telemetry.run_dir",
        ),
        (StorageError("/run/a", "no permission", action="delete", remedy="permit deleting it"), "cannot delete /run/a: no permission; permit deleting it"),
    ],
)
def test_what_cannot_be_written_or_deleted_is_said_with_its_remedy_in_every_process(error: StorageError, said: str) -> None:
    assert str(error) == said
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.path, other.reason) == (said, error.path, error.reason)
