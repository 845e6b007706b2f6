"""Finished rollouts that do not arrive end an evaluation with what to check (DESIGN 3: every wait
has a timeout).
"""

from types import SimpleNamespace

import pytest
from ray.exceptions import ObjectLostError

from launch.evaluate import LocalHeldOut
from rollout_actors.engine import ray_calls
from shared.config.job import TimeoutsSection
from shared.errors import RolloutError

LOST = ObjectLostError("ab" * 28, None, "")


class Scores:
    """The part of `HeldOut` that `LocalHeldOut` uses."""

    def score(self, rollouts):
        return [f"scene of {rollout}" for rollout in rollouts]


@pytest.fixture
def score(monkeypatch):
    """Scores two references with these answers of Ray's; None is late."""

    def score(*answers):
        def wait(refs, *, timeout):
            assert 0 < timeout <= 7
            return [ref for ref in refs if answers[ref] is not None][-1:], refs

        def get(ref):
            if isinstance(answers[ref], Exception):
                raise answers[ref]
            return answers[ref]

        monkeypatch.setattr(ray_calls, "ray", SimpleNamespace(wait=wait, get=get))
        return LocalHeldOut(Scores(), TimeoutsSection(generate_s=7.0)).score([[0, 1]])

    return score


def test_the_shares_are_scored_in_order_within_the_timeout(score):
    assert score(["a", "b"], ["c"]) == ["scene of a", "scene of b", "scene of c"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"no answer from .* after timeouts\.generate_s = 7 s; check that every actor's"),
        (LOST, r"a finished answer was lost \(.*\); check that every actor's"),
    ],
)
def test_rollouts_that_are_late_or_lost_are_an_error_with_what_to_check(score, answer, message):
    with pytest.raises(RolloutError, match=f"(?s)collect on rollout engines: {message}"):
        score(["a", "b"], answer)
