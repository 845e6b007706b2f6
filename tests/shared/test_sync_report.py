"""One sync as several engines report it."""

import pytest

from shared.rollouts import SyncReport
from shared.weight_sync.canary import Differences


@pytest.mark.parametrize(
    ("effects", "expected"),
    [((1.01, 0.9, 1.05), 0.9), ((1.01, 1.2), 1.2), ((1.0, None), None), ((None,), None)],
)
def test_the_adapters_effect_is_that_of_the_engine_farthest_from_the_learner(effects, expected):
    reports = [SyncReport(3, 10, {}, 1e-6, mode="adapter", adapter_effect=e) for e in effects]
    slowest = SyncReport.of_slowest(reports)
    assert (slowest.adapter_effect, slowest.canary_noise) == (expected, None)


def test_the_canary_is_that_of_the_engine_farthest_from_the_learner():
    noises = (Differences(0.01, 0.3), Differences(0.02, 0.2))
    reports = [
        SyncReport(3, 10, {}, 0.1 * i, canary_mean_abs=0.2 * i, canary_noise=noise)
        for i, noise in enumerate(noises, 1)
    ]
    several = SyncReport.of_slowest(reports)
    assert (several.canary_max_abs, several.canary_mean_abs) == (0.2, 0.4)
    assert several.canary_noise == Differences(0.02, 0.3)
