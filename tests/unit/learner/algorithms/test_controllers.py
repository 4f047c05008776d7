import math

import pytest

from slipstream.learner.algorithms.controllers import adaptive_kl_coefficient, ess_learning_rate_scale


def step(coefficient: float, kl: float, *, num_sequences: int = 100) -> float:
    return adaptive_kl_coefficient(coefficient, kl=kl, target=6.0, num_sequences=num_sequences, horizon=1000)


def test_the_coefficient_by_hand():
    assert step(0.1, 6.6) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert step(0.1, 5.4) == pytest.approx(0.1 * (1 - 0.1 * 0.1))


def test_on_target_the_coefficient_stays():
    assert step(0.1, 6.0) == 0.1


@pytest.mark.parametrize(("kl", "error"), [(600.0, 0.2), (math.inf, 0.2), (0.0, -0.2), (-50.0, -0.2)])
def test_no_measurement_moves_it_further_than_a_fifth_of_its_share(kl, error):
    assert step(0.1, kl) == pytest.approx(0.1 * (1 + error * 0.1))


def test_a_step_larger_than_the_horizon_keeps_it_positive():
    assert step(0.1, 0.0, num_sequences=1_000_000) == pytest.approx(0.08)


def test_a_kl_that_is_no_number_leaves_it_as_it_is():
    assert step(0.1, math.nan) == 0.1


def test_it_finds_the_coefficient_whose_kl_is_the_target():
    coefficient = 10.0
    for _ in range(2000):
        coefficient = step(coefficient, 3.0 / coefficient)
    assert coefficient == pytest.approx(0.5, rel=1e-3)


def test_the_learning_rate_follows_the_root_of_the_sample_size():
    assert ess_learning_rate_scale(1.0, floor=0.1) == 1.0
    assert ess_learning_rate_scale(0.25, floor=0.1) == 0.5
    assert ess_learning_rate_scale(0.25, power=1.0, floor=0.1) == 0.25


@pytest.mark.parametrize("ess", [0.0, 1e-9, -1.0, math.nan])
def test_the_learning_rate_never_falls_below_its_floor(ess):
    assert ess_learning_rate_scale(ess, floor=0.1) == 0.1


def test_a_share_rounded_above_one_raises_nothing():
    assert ess_learning_rate_scale(1.0000001, floor=0.0) == 1.0
