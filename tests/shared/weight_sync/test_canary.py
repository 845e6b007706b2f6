"""The canary says whether an engine agrees, and where it does not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import canary_noise
import numpy as np
import pytest
from canary_noise import published_noise

from shared.errors import ConfigError, WeightSyncError
from shared.weight_sync.canary import (
    EFFECT_OVER_NOISE,
    NOISE_FILE,
    CanaryProbe,
    Differences,
    Scores,
)

IDS = (1, 50, 50, 2)
PROBE = CanaryProbe((1, 50, 2), (), IDS, expected_logprobs=(-1.0, -2.0, -3.0), tolerance=1e-4)
WITH_IMAGE = replace(PROBE, placeholder_ids=(50,))


def test_agreement_gives_the_largest_difference() -> None:
    assert PROBE.check("actor", IDS, (-1.0, -2.00005, -3.0)).largest == pytest.approx(5e-5)


def test_image_placeholders_are_no_part_of_the_comparison() -> None:
    """The token behind them is: what the engine makes of the image shows there."""
    assert WITH_IMAGE.check("actor", IDS, (-9.0, math.nan, -3.0)) == Differences(0.0, 0.0)


TOKEN_2 = r"2 of 3 .*first at token 2 \(id 50\): learner -2\.000000"
TOKEN_3 = r"1 of 1 log-probabilities differ .*first at token 3 \(id 2\)"
FEWER = "to 3 tokens, the learner to 4, first difference at token 2"
OTHERS = "to 4 tokens, the learner to 4, first difference at token 2"


@pytest.mark.parametrize(
    ("probe", "token_ids", "logprobs", "told", "quantity", "size"),
    [
        (PROBE, IDS, (-1.0, -2.1, -4.0), TOKEN_2, "canary log-probability", 1.0),
        (PROBE, IDS, (-1.0, math.nan, -4.0), TOKEN_2, "canary log-probability", math.nan),
        (PROBE, IDS, (-1.0, -math.inf, -4.0), TOKEN_2, "canary log-probability", math.inf),
        (WITH_IMAGE, IDS, (-1.0, -2.0, -3.1), TOKEN_3, "canary log-probability", 0.1),
        (PROBE, (1, 50, 2), (-1.0, -2.0), FEWER, "canary token ids", 2.0),
        (PROBE, (1, 50, 51, 2), PROBE.expected_logprobs, OTHERS, "canary token ids", 1.0),
    ],
    ids=[
        "other",
        "nan",
        "infinite",
        "behind an image",
        "fewer tokens",
        "other tokens, as probable",
    ],
)
def test_a_difference_names_the_actor_and_the_first_token(
    probe: CanaryProbe, token_ids: Any, logprobs: Any, told: str, quantity: str, size: float
) -> None:
    with pytest.raises(WeightSyncError, match=f"canary on actor-1: .*{told}") as caught:
        probe.check("actor-1", token_ids, logprobs)
    error = caught.value
    assert (error.actor, error.phase, error.quantity) == ("actor-1", "canary", quantity)
    assert error.size == pytest.approx(size, nan_ok=True)


def test_in_float32_the_noise_of_a_large_model_raises_the_tolerance_but_not_one_that_is_set() -> (
    None
):
    probe = replace(PROBE, is_raised_by_noise=True)
    assert probe.needs_noise and not PROBE.needs_noise
    noise = probe.measure("actor", (IDS, (-1.0, -2.00009, -3.0)))
    assert noise is not None and noise.largest == pytest.approx(9e-5)
    raised = replace(probe, noise=noise)
    assert not raised.needs_noise
    raised.check("actor", IDS, (-1.0, -2.00026, -3.0))
    for one, wrong in ((raised, 2.8e-4), (replace(probe, noise=Differences(0.0, 1e-6)), 1.1e-4)):
        with pytest.raises(WeightSyncError, match="1 of 3 log-probabilities differ"):
            one.check("actor", IDS, (-1.0, -2.0 - wrong, -3.0))


def test_in_float32_more_than_rounding_is_no_noise() -> None:
    """An engine with a wrong share has it from the start: the bound stays, and the sync fails."""
    probe = replace(PROBE, is_raised_by_noise=True)
    assert probe.measure("actor", (IDS, (-1.0, -2.0011, -3.0))) is None
    assert probe.measure("actor", (IDS, (-1.0, math.nan, -3.0))) is None


@pytest.mark.parametrize("field", ["expected_logprobs", "base_logprobs"])
def test_a_probe_needs_one_log_probability_per_token_but_the_first(field: str) -> None:
    with pytest.raises(ValueError, match=r"4 canary tokens need 3 log-probabilities .*, not 1"):
        replace(PROBE, **{field: (-1.0,)})


LEARNERS = tuple(-0.02 * i for i in range(100))
HALF = CanaryProbe(tuple(range(101)), (), tuple(range(101)), LEARNERS, tolerance=None)
"""A probe of 100 log-probabilities in bfloat16."""


def engines(*, everywhere: float = 0.0, some: float = 0.0, num_some: int = 0) -> list[float]:
    """Return the learner's, a little off at all tokens and more at some."""
    off = [everywhere + some] * num_some + [everywhere] * (100 - num_some)
    return [logprob + distance for logprob, distance in zip(LEARNERS, off, strict=True)]


@pytest.mark.parametrize(
    ("noise", "mean", "beyond"),
    [
        (None, 0.1, 0.5),  # not measured
        (Differences(0.02, 0.15), 0.06, 0.45),  # three times as much
        (Differences(0.0, 0.0), 0.01, 0.1),  # never nothing
        (Differences(0.09, 0.4), 0.1, 0.5),  # never more than the usual ones
        (Differences(0.2, 3.0), 0.1, 0.5),
    ],
)
def test_in_bfloat16_mean_and_share_are_bounded_by_the_noise_and_no_single_token_is(
    noise: Differences | None, mean: float, beyond: float
) -> None:
    probe, ids = replace(HALF, noise=noise), HALF.expanded_token_ids
    few = engines(some=0.3 * 100 * mean, num_some=3)
    assert probe.check("actor", ids, few).largest > beyond, "three of a hundred may be anything"
    assert probe.check("actor", ids, engines(everywhere=0.99 * mean)).mean == pytest.approx(
        0.99 * mean
    )
    with pytest.raises(
        WeightSyncError,
        match=rf"0 of 100 .*mean difference is {1.01 * mean:.4f} \({mean:.4f} is allowed\)",
    ):
        probe.check("actor", ids, engines(everywhere=1.01 * mean))
    with pytest.raises(
        WeightSyncError,
        match=rf"4 of 100 .* more than {beyond:g}, .*token 1 ",
    ):
        probe.check("actor", ids, engines(some=1.01 * beyond, num_some=4))


def test_of_a_short_probe_too_three_tokens_may_be_anything() -> None:
    ids = tuple(range(40))
    short = CanaryProbe(ids, (), ids, LEARNERS[:39], tolerance=None)
    found = short.check("actor", ids, engines(some=0.6, num_some=3)[:39])
    assert found.largest == pytest.approx(0.6)
    with pytest.raises(WeightSyncError, match=r"4 of 39 .* more than 0\.5"):
        short.check("actor", ids, engines(some=0.6, num_some=4)[:39])


def test_the_noise_drawn_here_has_the_published_figures() -> None:
    noise = published_noise(np.random.default_rng(0), 50, canary_noise.NUM_TOKENS)
    assert noise.std() == pytest.approx(canary_noise.STANDARD_DEVIATION, rel=0.05)
    assert np.median(np.abs(noise).max(axis=1)) == pytest.approx(canary_noise.LARGEST, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "most_stopped"), [(39, 1), (100, 0)])
def test_at_the_noise_published_for_gpus_runs_of_a_thousand_syncs_are_not_stopped(
    num_tokens: int, most_stopped: int
) -> None:
    """Of 200 runs, each with the bounds of its own noise at version 0. 39 tokens has the canary of
    an environment of text, which is the shortest.
    """
    draws = np.random.default_rng(0)
    ids = tuple(range(num_tokens + 1))
    at_start = CanaryProbe(ids, (), ids, (0.0,) * num_tokens, tolerance=None)
    num_stopped = 0
    for _ in range(200):
        noise = at_start.measure("actor", (ids, list(published_noise(draws, num_tokens))))
        assert noise is not None
        probe = replace(at_start, noise=noise)
        sizes = np.abs(published_noise(draws, 1000, num_tokens))
        # Of all syncs, that with the largest mean, and that with most tokens beyond any bound.
        worst = {sizes.mean(axis=1).argmax(), np.sort(sizes, axis=1)[:, -4].argmax()}
        try:
            for sync in worst:
                probe.check("actor", ids, list(sizes[sync]))
        except WeightSyncError:
            num_stopped += 1
    assert num_stopped <= most_stopped


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_in_bfloat16_too_a_single_token_that_is_no_number_is_a_difference(wrong: float) -> None:
    with pytest.raises(WeightSyncError, match="1 of 100"):
        HALF.check("actor", HALF.expanded_token_ids, [wrong, *LEARNERS[1:]])


def test_noise_is_measured_and_more_than_rounding_makes_is_none() -> None:
    ids = HALF.expanded_token_ids
    noise = HALF.measure("actor", (ids, engines(everywhere=0.09, some=0.4, num_some=1)))
    assert noise is not None
    assert (noise.mean, noise.largest) == (pytest.approx(0.094), pytest.approx(0.49))
    assert HALF.measure("actor", (ids, engines(everywhere=0.11))) is None
    assert HALF.measure("actor", (ids, engines(everywhere=math.nan))) is None
    with pytest.raises(WeightSyncError, match="first difference at token 0"):
        HALF.measure("actor", (ids[1:], engines()))


NOISE_OF_A_BAD_ENGINE = Differences.worst([Differences(0.005, 0.1), Differences(0.09, 4.0)])


@pytest.mark.parametrize(
    ("everywhere", "noise"),
    [
        (0.2, HALF.measure("actor", (HALF.expanded_token_ids, engines(everywhere=0.2)))),
        (0.11, NOISE_OF_A_BAD_ENGINE),
    ],
    ids=["measured with the fault", "of several engines, one of them bad"],
)
def test_a_fault_that_is_there_before_the_first_sync_is_not_measured_away(
    everywhere: float, noise: Differences | None
) -> None:
    told = rf"mean difference is {everywhere:.4f} \(0\.1000 is allowed\)"
    with pytest.raises(WeightSyncError, match=told):
        replace(HALF, noise=noise).check(
            "actor", HALF.expanded_token_ids, engines(everywhere=everywhere)
        )


def test_a_runs_folder_keeps_the_noise_to_the_bit(tmp_path: Path) -> None:
    assert Differences.load(tmp_path) is None
    noise = Differences(0.1 + 0.2, 1 / 3)
    (tmp_path / NOISE_FILE).write_text(noise.as_json())
    assert Differences.load(tmp_path) == noise


@pytest.mark.parametrize(
    ("written", "wrong"),
    [
        ('{"mean": 1}', "largest: Field required"),
        ('{"mean": -0.1, "largest": 1}', "mean: Input should be greater than or equal to 0"),
        ('{"mean": 0.1, "largest": Infinity}', "largest: Input should be a finite number"),
        ("", "Invalid JSON"),
    ],
)
def test_a_damaged_record_of_the_noise_names_file_and_field(
    tmp_path: Path, written: str, wrong: str
) -> None:
    (tmp_path / NOISE_FILE).write_text(written)
    with pytest.raises(ConfigError) as caught:
        Differences.load(tmp_path)
    told = str(caught.value)
    assert told.startswith(f"telemetry.run_dir: {tmp_path}/{NOISE_FILE} cannot be read ({wrong}")
    assert told.endswith("; restore it, or remove it")


NUM_TOKENS = 101


class TwoSides:
    """A learner and an engine, both sound and both rounding: they differ by `noise` nats at a
    token, with the adapter or without.
    """

    def __init__(self, *, effect: float, noise: float, seed: int = 0) -> None:
        draws = np.random.default_rng(seed)
        self._base = draws.uniform(-6.0, -1.0, NUM_TOKENS - 1)
        self._effect = effect * draws.normal(size=NUM_TOKENS - 1)
        self._rounding = lambda: noise * draws.standard_t(4, size=NUM_TOKENS - 1)
        self.ids = tuple(range(NUM_TOKENS))
        adapted = tuple(self._base + self._effect + self._rounding())
        base = tuple(self._base + self._rounding())
        self.probe = CanaryProbe(self.ids, (), self.ids, adapted, 0.5, base)
        self.base = (self.ids, list(self._base + self._rounding()))

    def adapted(self, scale: float = 1.0) -> Scores:
        """Score like an engine that applies the adapter so many times."""
        return self.ids, list(self._base + scale * self._effect + self._rounding())


BFLOAT16 = 5e-3
"""Mean difference of two sound implementations, docs/explanation/performance.md."""


@pytest.mark.parametrize("seed", range(20))
def test_an_adapter_that_is_applied_as_the_learner_does_passes_in_bfloat16(seed: int) -> None:
    sides = TwoSides(effect=0.1, noise=BFLOAT16, seed=seed)
    adapted = sides.adapted()
    sides.probe.check("actor", *adapted)
    slope = sides.probe.check_adapter("actor", adapted, sides.base)
    assert slope == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("scale", "shown"),
    [(0.0, r"is -?0\.\d+ times"), (0.5, r"is 0\.\d+ times"), (2.0, r"is [12]\.\d+ times")],
)
def test_an_adapter_that_is_held_and_not_applied_or_scaled_wrongly_is_found_though_every_token_is_within_the_tolerance(
    scale: float, shown: str, seed: int
) -> None:
    sides = TwoSides(effect=0.1, noise=BFLOAT16, seed=seed)
    adapted = sides.adapted(scale)
    sides.probe.check("actor", *adapted)
    with pytest.raises(
        WeightSyncError, match=rf"canary on actor: the adapter's effect .* {shown} the learner's"
    ) as caught:
        sides.probe.check_adapter("actor", adapted, sides.base)
    assert (caught.value.phase, caught.value.quantity) == ("canary", "effect of the adapter")


def test_an_engine_that_answers_to_the_bit_as_the_base_model_has_not_applied_it() -> None:
    sides = TwoSides(effect=0.1, noise=BFLOAT16)
    with pytest.raises(WeightSyncError, match=r"is 0\.00 times"):
        sides.probe.check_adapter("actor", sides.base, sides.base)


@pytest.mark.parametrize(
    ("effect", "noise"),
    [(0.0, BFLOAT16), (BFLOAT16, BFLOAT16), (0.0, 0.0), (1e-6, 0.0), (1e-6, 1e-7)],
)
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_an_effect_below_the_noise_floor_proves_nothing_and_nothing_is_asked_of_it(
    effect: float, noise: float, scale: float
) -> None:
    sides = TwoSides(effect=effect, noise=noise)
    assert sides.probe.check_adapter("actor", sides.adapted(scale), sides.base) is None


def test_noise_that_works_against_a_right_adapter_with_all_its_might_is_no_alarm() -> None:
    """The worst that the rule allows for: engine and learner differ by as much with the adapter as
    without, each time in the worst direction.
    """
    sides = TwoSides(effect=0.1, noise=0.0)
    base, adapted = np.array(sides.base[1]), np.array(sides.adapted()[1])
    noise = (adapted - base) / (EFFECT_OVER_NOISE * 1.001)
    scores = [(sides.ids, list(logprobs)) for logprobs in (adapted - noise, base + noise)]
    assert sides.probe.check_adapter("actor", *scores) is not None


def test_an_engine_with_other_base_weights_under_the_adapter_is_found() -> None:
    sides = TwoSides(effect=0.1, noise=BFLOAT16)
    wrong = [logprob - 0.6 for logprob in sides.base[1]]
    with pytest.raises(WeightSyncError, match="without the adapter"):
        sides.probe.check_adapter("actor", sides.adapted(), (sides.ids, wrong))
