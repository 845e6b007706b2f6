"""One sync as several engines report it."""

import pytest

from shared.rollouts import SyncReport


def report(effect: float | None) -> SyncReport:
    return SyncReport(version=3, bytes=10, phase_s={"load": 0.5}, canary_max_abs=1e-6, mode="adapter", adapter_effect=effect)


@pytest.mark.parametrize(("effects", "expected"), [((1.01, 0.9, 1.05), 0.9), ((1.01, 1.2), 1.2), ((1.0, None), None), ((None,), None)])
def test_the_adapters_effect_is_that_of_the_engine_farthest_from_the_learner(effects: tuple[float | None, ...], expected: float | None) -> None:
    assert SyncReport.of_slowest([report(effect) for effect in effects]).adapter_effect == expected
