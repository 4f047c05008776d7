"""Which ranks a step draws."""

from collections import Counter

import pytest

from buffer.samplers import draw_ranks, fifo, uniform
from configs.buffer import FifoConfig, UniformConfig


def test_fifo_takes_the_oldest_first():
    assert fifo(num_groups=3) == [0, 1, 2]
    assert draw_ranks(FifoConfig(), num_ready=9, num_groups=3, seed=1, step=1) == [0, 1, 2]


def test_uniform_repeats_itself_for_the_same_seed_and_step_only():
    drawn = uniform(num_ready=50, num_groups=10, seed=3, step=4)
    assert drawn == uniform(num_ready=50, num_groups=10, seed=3, step=4)
    assert drawn != uniform(num_ready=50, num_groups=10, seed=3, step=5)
    assert drawn != uniform(num_ready=50, num_groups=10, seed=4, step=4)
    assert drawn == draw_ranks(UniformConfig(), num_ready=50, num_groups=10, seed=3, step=4)


def test_uniform_is_fixed_for_good():
    assert uniform(num_ready=12, num_groups=5, seed=3, step=4) == [8, 5, 9, 10, 3]


def test_uniform_draws_without_repetition():
    drawn = uniform(num_ready=20, num_groups=20, seed=0, step=0)
    assert sorted(drawn) == list(range(20))


def test_uniform_gives_every_rank_the_same_chance():
    counts = Counter(rank for step in range(4000) for rank in uniform(num_ready=10, num_groups=2, seed=0, step=step))
    # 800 expected each, standard deviation 25: five of them.
    assert all(abs(counts[rank] - 800) < 125 for rank in range(10))


@pytest.mark.parametrize("sampler", [FifoConfig(), UniformConfig()])
def test_more_than_there_are_cannot_be_drawn(sampler):
    with pytest.raises(ValueError, match=r"num_groups must be <= num_ready \(2\), got 3"):
        draw_ranks(sampler, num_ready=2, num_groups=3, seed=0, step=0)
