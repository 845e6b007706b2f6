"""What an error says, here and behind a process boundary."""

from __future__ import annotations

import pickle

import pytest

from shared.errors import StorageError, Timeout, ended, late


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            StorageError("/run/a", "no space"),
            (
                "cannot write /run/a: no space; free space or permit writing there, or choose"
                " another folder with telemetry.run_dir"
            ),
        ),
        (
            StorageError("/run/a", "no permission", action="delete", remedy="permit deleting it"),
            "cannot delete /run/a: no permission; permit deleting it",
        ),
    ],
)
def test_what_cannot_be_written_or_deleted_is_said_with_its_remedy_in_every_process(
    error: StorageError, said: str
) -> None:
    assert str(error) == said
    other = pickle.loads(pickle.dumps(error))
    assert (str(other), other.path, other.reason) == (said, error.path, error.reason)


def test_a_late_answer_and_an_ended_process_are_said_in_one_way_with_what_to_check() -> None:
    assert (
        late("actor-1", Timeout(1260.0, "timeouts.generate_s"), "its log")
        == "no answer from actor-1 after timeouts.generate_s = 1260 s; check its log"
    )
    assert (
        late("it", Timeout(0.5, "timeouts.learn_s"), "its log")
        == "no answer from it after timeouts.learn_s = 0.5 s; check its log"
    )
    assert (
        ended("rank 1's", "exit code 9")
        == "rank 1's process has ended (exit code 9); check its log and the machine's memory"
    )
    assert (
        ended("the engine's")
        == "the engine's process has ended; check its log and the machine's memory"
    )
