import pytest
import torch

from slipstream.learner.algorithms import segments
from tests.unit.learner.inputs import checked, whole, wide

whiten, standardized = checked(segments.whiten), checked(segments.standardized)

EPSILON = 1e-8


def test_hand_computed_values_even_far_from_zero():
    assert whiten(wide(1, 3), epsilon=1e-12).tolist() == pytest.approx([-1, 1])
    assert whiten(wide(0, 0, 0, 4), epsilon=1e-12).tolist() == pytest.approx([-(3**-0.5)] * 3 + [3**0.5])
    assert whiten(wide(0, 2), epsilon=3.0).tolist() == [-0.25, 0.25]
    assert whiten(wide(1, 2), epsilon=EPSILON, weights=wide(0, 0)).tolist() == [0, 0]
    values = standardized(wide(1, 3, 100, 500, 9), whole(0, 0, 1, 1, 2), epsilon=1e-12)
    assert values.tolist() == pytest.approx([-1, 1, -1, 1, 0])
    values = whiten(torch.tensor([10000.0, 10001.0, 10002.0, 10003.0]), epsilon=EPSILON)
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0]) / 5**0.5
    assert torch.allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e6 / 7, 1e-30])
def test_equal_values_give_exactly_zero(value, dtype):
    values = torch.full((1001,), value, dtype=dtype)
    assert whiten(values, epsilon=1e-30).eq(0).all()
    assert whiten(values, epsilon=EPSILON, weights=torch.arange(1001, dtype=dtype)).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_is_zero_exactly_where_it_equals_the_mean_of_its_segment(dtype):
    # Rewards in thirds, fifths and tenths, against rational arithmetic.
    for denominator in (3, 5, 10):
        numerators = torch.randint(0, denominator + 1, (2000, 8), generator=torch.Generator().manual_seed(denominator))
        rewards, rows = (numerators.to(dtype) / denominator).flatten(), torch.arange(2000).repeat_interleave(8)
        centered = segments.centered(rewards, rows)
        assert (centered == 0).equal((8 * numerators == numerators.sum(1, keepdim=True)).flatten())


def test_shift_and_scale_do_not_matter_and_a_sign_does():
    torch.manual_seed(0)
    values = torch.randn(1000, dtype=torch.float64)
    whitened = whiten(values, epsilon=EPSILON)
    assert whitened.mean().abs() < 1e-12
    assert whitened.var(correction=0) == pytest.approx(1)
    assert torch.allclose(whitened, whiten(9 * values - 4, epsilon=EPSILON), atol=1e-6)
    assert torch.allclose(whiten(-values, epsilon=EPSILON), -whitened, atol=1e-12)


def test_a_weight_is_a_number_of_repetitions():
    values, lengths = wide(3, -1, 4, 1), torch.tensor([2, 7, 1, 8])
    tokens = whiten(values.repeat_interleave(lengths), epsilon=EPSILON)
    trajectories = whiten(values, epsilon=EPSILON, weights=lengths.double())
    assert torch.allclose(trajectories.repeat_interleave(lengths), tokens, atol=1e-12)


@pytest.mark.parametrize("poison", [1e30, float("inf"), float("nan")])
def test_a_value_without_weight_changes_nothing_and_becomes_zero(poison):
    values, weights = wide(3, -1, 4), wide(1, 2, 3)
    more = whiten(torch.cat([values, wide(poison)]), epsilon=EPSILON, weights=torch.cat([weights, wide(0)]))
    assert torch.allclose(more[:3], whiten(values, epsilon=EPSILON, weights=weights), atol=1e-12)
    assert more[3] == 0
