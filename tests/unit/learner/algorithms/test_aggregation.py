from typing import get_args, get_type_hints

import pytest
import torch

from slipstream.configs.algorithm import AlgorithmConfig
from slipstream.learner.algorithms import find
from slipstream.learner.algorithms.inputs import AggregationInputs
from tests.unit.learner.inputs import checked

COUNTS = torch.tensor([2, 0, 6])
LENGTH = 4


def weighing(name):
    """Two trajectories per prompt, unless `groups` says otherwise."""

    def weigh(counts, groups=None):
        groups = torch.arange(len(counts)) // 2 if groups is None else groups
        return checked(find(f"aggregation.{name}"))(AggregationInputs(counts, groups, LENGTH))

    return weigh


WEIGH = {name: weighing(name) for name in get_args(get_type_hints(AlgorithmConfig)["loss_aggregation"])}


def test_weights_by_hand():
    weights = {name: weigh(COUNTS).tolist() for name, weigh in WEIGH.items()}
    assert weights["token_mean"] == pytest.approx([1 / 8, 0, 1 / 8])
    assert weights["token_sum"] == [1, 0, 1]
    assert weights["seq_mean_token_mean"] == pytest.approx([1 / 4, 0, 1 / 12])
    assert weights["seq_mean_token_sum"] == pytest.approx([1 / 2, 0, 1 / 2])
    assert weights["seq_mean_token_sum_norm"] == pytest.approx([1 / 8, 0, 1 / 8])
    assert weights["prompt_mean"] == pytest.approx([1 / 4, 0, 1 / 12])


def test_prompts_count_the_same_and_so_do_the_tokens_of_one():
    counts, groups = torch.tensor([1, 3, 5, 1, 0]), torch.tensor([2, 2, 0, 2, 3])
    weights = WEIGH["prompt_mean"](counts, groups)
    assert weights.tolist() == pytest.approx([1 / 10, 1 / 10, 1 / 10, 1 / 10, 0])
    per_prompt = torch.zeros(4, dtype=torch.float64).index_add(0, groups, weights * counts)
    assert per_prompt.tolist() == pytest.approx([1 / 2, 0, 1 / 2, 0])


@pytest.mark.parametrize("weigh", WEIGH.values(), ids=WEIGH)
def test_without_a_token_an_update_weighs_nothing_and_a_sequence_changes_no_weight(weigh):
    assert weigh(torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert weigh(torch.zeros(0, dtype=torch.int64)).shape == (0,)
    with_empty = weigh(torch.tensor([2, 3, 1, 6, 0, 0]))
    assert with_empty[:4].equal(weigh(torch.tensor([2, 3, 1, 6])))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("token_mean", [1 / 8, 1 / 8, 1 / 8], [1 / 3, 1 / 3, 0]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 2, 0]),
        ("seq_mean_token_mean", [1 / 6, 1 / 6, 1 / 12], [1 / 2, 1 / 4, 0]),
        ("prompt_mean", [1 / 8, 1 / 8, 1 / 8], [1 / 3, 1 / 3, 0]),
    ],
)
def test_counts_before_rejection_shrink_the_step_and_counts_after_do_not(name, before, after):
    """Rejection keeps 1 token of 2, 2 of 2, and none of 4."""
    counts, kept = torch.tensor([2, 2, 4]), torch.tensor([1, 2, 0])
    assert WEIGH[name](counts).tolist() == pytest.approx(before)
    assert WEIGH[name](kept).tolist() == pytest.approx(after)
    if name != "seq_mean_token_sum":
        assert float(WEIGH[name](counts) @ kept.double()) < 0.6
        assert float(WEIGH[name](kept) @ kept.double()) == pytest.approx(1.0)
