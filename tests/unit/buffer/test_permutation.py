"""The endless sequence of rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.buffer.sampling import row_of


@given(num_rows=st.integers(1, 50), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 100))
def test_every_row_comes_exactly_once_per_epoch(num_rows, seed, epoch):
    ordinals = range(epoch * num_rows, (epoch + 1) * num_rows)
    assert sorted(row_of(n, num_rows=num_rows, seed=seed) for n in ordinals) == list(range(num_rows))


def test_epochs_and_seeds_are_shuffled_differently():
    def epoch(number: int, seed: int) -> list[int]:
        return [row_of(number * 100 + n, num_rows=100, seed=seed) for n in range(100)]

    assert epoch(0, 1) != epoch(1, 1)
    assert epoch(0, 1) != epoch(0, 2)
    assert epoch(0, 1) == epoch(0, 1)
    assert epoch(0, 1) != list(range(100))


def test_the_sequence_is_fixed_for_good():
    sequence = [row_of(n, num_rows=7, seed=3) for n in range(14)]
    assert sequence == [0, 4, 1, 5, 6, 3, 2, 0, 6, 2, 1, 3, 4, 5]


def test_places_before_the_first_are_refused():
    with pytest.raises(ValueError, match="ordinal must be >= 0"):
        row_of(-1, num_rows=7, seed=3)
    with pytest.raises(ValueError, match="num_rows >= 1"):
        row_of(0, num_rows=0, seed=3)
