import pytest

from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.engines.optimizer import learning_rate


def rates(**settings) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **settings)
    return [learning_rate(update, config=config, total_updates=8) for update in range(10)]


def test_a_constant_rate_warms_up_and_stays():
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, *[1.0] * 6]


def test_without_warm_up_the_first_update_has_the_full_rate():
    assert rates()[0] == 1.0


def test_linear_falls_to_zero_at_the_end_and_stays_there():
    assert rates(schedule="linear", warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0, 0])


def test_cosine_is_half_way_in_the_middle():
    values = rates(schedule="cosine")
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.5)
    assert values[8:] == pytest.approx([0, 0])
    assert values == sorted(values, reverse=True)
