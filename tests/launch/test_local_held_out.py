"""Finished rollouts that do not arrive end an evaluation with what to check (DESIGN 3: every wait
has a timeout).
"""

import pytest
from ray.exceptions import GetTimeoutError, ObjectLostError

from launch.evaluate import LocalHeldOut
from shared.config.job import TimeoutsSection
from shared.errors import RolloutError


class Scores:
    """What `LocalHeldOut` uses of `HeldOut`."""

    def score(self, rollouts):
        return [f"scene of {rollout}" for rollout in rollouts]


def local(answer, asked):
    """With this from Ray: rollouts, or an error. `asked` takes the timeouts."""

    def fetch(refs, *, timeout):
        asked.append(timeout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return LocalHeldOut(Scores(), TimeoutsSection(generate_s=7.0), fetch=fetch)


def test_the_shares_are_scored_in_order_within_the_timeout():
    asked = []
    assert local([["a", "b"], ["c"]], asked).score([[None, None]]) == [
        "scene of a",
        "scene of b",
        "scene of c",
    ]
    assert asked == [7.0]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            GetTimeoutError("late"),
            (
                r"collect on rollout engines: no answer from .* after timeouts\.generate_s = 7 s;"
                r" check .*, or raise timeouts\.generate_s"
            ),
        ),
        (
            ObjectLostError("ab" * 28, None, ""),
            r"collect on rollout engines: finished rollouts were lost \(.*\); check",
        ),
    ],
)
def test_rollouts_that_are_late_or_lost_are_an_error_with_what_to_check(error, message):
    with pytest.raises(RolloutError, match=f"(?s){message}"):
        local(error, []).score([[None]])
