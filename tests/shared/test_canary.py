"""The canary says whether an engine agrees, and where it does not."""

from __future__ import annotations

import math

import pytest

from shared.canary import CanaryProbe
from shared.errors import WeightSyncError

PROBE = CanaryProbe(token_ids=(1, 50, 2), images=(), expanded_token_ids=(1, 50, 50, 2), expected_logprobs=(-1.0, -2.0, -3.0), tolerance=1e-4)


def test_agreement_gives_the_largest_difference() -> None:
    assert PROBE.check("actor", [1, 50, 50, 2], [-1.0, -2.00005, -3.0]) == pytest.approx(5e-5)


@pytest.mark.parametrize("wrong", [-2.1, math.nan, -math.inf])
def test_a_difference_names_the_actor_and_the_first_token(wrong: float) -> None:
    with pytest.raises(WeightSyncError, match=r"canary on actor-1: .*first at token 2 \(id 50\): learner -2.000000") as caught:
        PROBE.check("actor-1", [1, 50, 50, 2], [-1.0, wrong, -4.0])
    assert (caught.value.actor, caught.value.phase, caught.value.quantity) == ("actor-1", "canary", "canary log-probability")


def test_other_expanded_tokens_are_a_difference_of_their_own() -> None:
    with pytest.raises(WeightSyncError, match=r"to 3 tokens, the learner to 4, first difference at token 2") as caught:
        PROBE.check("actor-1", [1, 50, 2], [-1.0, -2.0])
    assert caught.value.quantity == "canary token ids"


def test_a_probe_needs_one_log_probability_per_token_but_the_first() -> None:
    with pytest.raises(ValueError, match="4 canary tokens need one log-probability less"):
        CanaryProbe((1, 50, 2), (), (1, 50, 50, 2), (-1.0,), 1e-4)
