"""Which accounts of an update a receiver accepts, and what it says of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_actors.weight_sync.receiver import LoadReport, check_load_reports
from shared.errors import WeightSyncError
from shared.weight_sync.phases import SyncPhase

GOOD = LoadReport([1, 2], [1, 2], [], [], load_s=0.0, verify_s=0.0, logprobs=[])

BAD = [
    (
        {"checksums": [1, 3]},
        "buckets [1] of 2 did not arrive as they were sent",
        "bucket checksums",
        1,
    ),
    (
        {"checksums": [3, 2]},
        "buckets [0] of 2 did not arrive as they were sent",
        "bucket checksums",
        1,
    ),
    (
        {"checksums": [2, 1]},
        "buckets [0, 1] of 2 did not arrive as they were sent",
        "bucket checksums",
        2,
    ),
    ({"checksums": [1]}, "1 buckets arrived with 2 checksums", "number of buckets", None),
    ({"missing": ["a"]}, "not loaded: a", "set of loaded names", 1),
    ({"unexpected": ["b"]}, "not a parameter: b", "set of loaded names", 1),
    (
        {"missing": ["a", "c"], "unexpected": ["b", "d"]},
        "not loaded: a, not loaded: c, not a parameter: b, ...",
        "set of loaded names",
        4,
    ),
]


def test_workers_that_have_loaded_everything_as_it_was_sent_are_believed() -> None:
    check_load_reports([GOOD, GOOD], "actor-0")


@pytest.mark.parametrize("place", [0, 1], ids=["of the first worker", "of another worker"])
@pytest.mark.parametrize(
    ("changes", "told", "quantity", "size"), BAD, ids=[told for _, told, _, _ in BAD]
)
def test_an_account_that_is_not_as_it_should_be_is_an_error_that_names_what_differs(
    changes: dict[str, Any], told: str, quantity: str, size: int | None, place: int
) -> None:
    receipts = [GOOD, GOOD]
    receipts[place] = replace(GOOD, **changes)
    with pytest.raises(WeightSyncError) as caught:
        check_load_reports(receipts, "actor-0")
    assert caught.value.message.startswith(told)
    assert (caught.value.actor, caught.value.phase, caught.value.quantity, caught.value.size) == (
        "actor-0",
        SyncPhase.VERIFY,
        quantity,
        size,
    )
