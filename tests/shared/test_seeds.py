"""One seed per request, from its place in the run alone."""

from __future__ import annotations

from itertools import product

from shared.seeds import request_seed


def test_a_seed_is_the_same_wherever_and_whenever_it_is_asked_for() -> None:
    """Else a run that is gone on with, or repeated, would sample something else."""
    assert request_seed(17, 0, 0) == 735456734
    assert request_seed(17, 3, 2, 1, "+1") == 382694218


def test_no_two_places_of_a_run_share_a_seed_nor_do_runs() -> None:
    indices = list(product(range(3), range(3), range(3), range(3), ("", "+1")))
    assert len({request_seed(*index) for index in indices}) == len(indices) == 162


def test_a_seed_is_positive_and_fits_into_32_bits_with_a_sign() -> None:
    seeds = [request_seed(17, step, position) for step in range(50) for position in range(50)]
    assert all(1 <= seed < 2**31 for seed in seeds)
