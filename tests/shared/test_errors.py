"""The texts of errors, here and behind a process boundary."""

from __future__ import annotations

import pickle

import pytest

from shared.errors import StorageError, Timeout, ended, late


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StorageError("/a", "no space"), f"cannot write /a: no space; {StorageError.REMEDY}"),
        (
            StorageError("/a", "no permission", action="delete", remedy="permit deleting it"),
            "cannot delete /a: no permission; permit deleting it",
        ),
    ],
)
def test_what_cannot_be_written_or_deleted_is_said_with_its_remedy_in_every_process(error, message):
    other = pickle.loads(pickle.dumps(error))
    assert str(error) == str(other) == message
    assert (other.path, other.reason) == (error.path, error.reason)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            late("actor-1", Timeout(1260.0, "timeouts.generate_s"), "its log"),
            "no answer from actor-1 after timeouts.generate_s = 1260 s; check its log",
        ),
        (
            late("it", Timeout(0.5, "timeouts.learn_s"), "its log"),
            "no answer from it after timeouts.learn_s = 0.5 s; check its log",
        ),
        (
            ended("rank 1's", "exit code 9"),
            "rank 1's process has ended (exit code 9); check its log and the machine's memory",
        ),
        (
            ended("the engine's"),
            "the engine's process has ended; check its log and the machine's memory",
        ),
    ],
)
def test_a_late_answer_and_an_ended_process_are_said_in_one_way_with_what_to_check(
    message, expected
):
    assert message == expected
