import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from learner.algorithms import aggregation

token_mean, seq_mean_token_mean, seq_mean_token_sum = (
    jaxtyped(f, typechecker=beartype)
    for f in (aggregation.token_mean, aggregation.seq_mean_token_mean, aggregation.seq_mean_token_sum)
)
COUNTS = torch.tensor([2, 0, 6])


def test_weights_by_hand():
    assert token_mean(COUNTS).tolist() == pytest.approx([1 / 8, 0, 1 / 8])
    assert seq_mean_token_mean(COUNTS).tolist() == pytest.approx([1 / 4, 0, 1 / 12])
    assert seq_mean_token_sum(COUNTS).tolist() == pytest.approx([1 / 2, 0, 1 / 2])


@pytest.mark.parametrize("weigh", [token_mean, seq_mean_token_mean])
def test_the_weights_of_a_mean_sum_to_one(weigh):
    assert float((weigh(COUNTS) * COUNTS).sum()) == pytest.approx(1.0)


def test_with_equal_lengths_the_two_means_agree():
    counts = torch.tensor([4, 4, 4])
    assert torch.allclose(token_mean(counts), seq_mean_token_mean(counts))


@pytest.mark.parametrize("weigh", [token_mean, seq_mean_token_mean, seq_mean_token_sum])
def test_an_update_without_a_token_weighs_nothing(weigh):
    assert weigh(torch.tensor([0, 0])).tolist() == [0.0, 0.0]


def test_a_long_sequence_weighs_less_per_token_only_in_the_sequence_mean():
    assert seq_mean_token_mean(COUNTS)[2] < seq_mean_token_mean(COUNTS)[0]
    assert token_mean(COUNTS)[2] == token_mean(COUNTS)[0]
