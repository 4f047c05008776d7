import pytest
import torch

from slipstream.learner.algorithms import aggregation, importance
from slipstream.learner.algorithms.inputs import AggregationInputs
from tests.unit.learner.inputs import checked

COUNTS = torch.tensor([2, 0, 6])
LENGTH = 4


def weighing(name):
    """Two trajectories per prompt, unless `groups` says otherwise."""

    def weigh(counts, groups=None):
        groups = torch.arange(len(counts)) // 2 if groups is None else groups
        return checked(aggregation.AGGREGATIONS[name])(AggregationInputs(counts, groups, LENGTH))

    return weigh


WEIGH = {name: weighing(name) for name in aggregation.AGGREGATIONS}
token_mean, seq_mean_token_mean, seq_mean_token_sum, seq_mean_token_sum_norm, prompt_mean = (
    WEIGH[name]
    for name in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean")
)
each_weighing = pytest.mark.parametrize("weigh", WEIGH.values(), ids=WEIGH)


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
    weights = prompt_mean(counts, groups)
    assert weights.tolist() == pytest.approx([1 / 10, 1 / 10, 1 / 10, 1 / 10, 0])
    per_prompt = torch.zeros(4, dtype=torch.float64).index_add(0, groups, weights * counts)
    assert per_prompt.tolist() == pytest.approx([1 / 2, 0, 1 / 2, 0])


@each_weighing
def test_an_update_without_a_token_weighs_nothing(weigh):
    assert weigh(torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert weigh(torch.zeros(0, dtype=torch.int64)).shape == (0,)


@each_weighing
def test_a_sequence_without_a_token_changes_no_weight(weigh):
    with_empty = weigh(torch.tensor([2, 3, 1, 6, 0, 0]))
    assert with_empty[:4].equal(weigh(torch.tensor([2, 3, 1, 6])))


def rejected_update() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts before and after rejection, sequences, and kept tokens: 1 of 2, 2 of 2, none of 4."""
    before, keep = torch.tensor([2, 2, 4]), torch.tensor([True, False, True, True, False, False, False, False])
    sequences = torch.arange(3).repeat_interleave(before)
    return before, importance.num_kept(keep, sequences, num_sequences=3), sequences, keep


@pytest.mark.parametrize("name", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
def test_counts_before_rejection_shrink_the_step_and_counts_after_do_not(name):
    before, after, sequences, keep = rejected_update()
    assert float((WEIGH[name](before)[sequences] * keep).sum()) < 1 - 0.4
    assert float((WEIGH[name](after)[sequences] * keep).sum()) == pytest.approx(1.0)


def test_denominators_before_and_after_rejection_by_hand():
    before, after, _, _ = rejected_update()
    assert token_mean(before).tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 8])
    assert token_mean(after).tolist() == pytest.approx([1 / 3, 1 / 3, 0])
    assert seq_mean_token_sum(before).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert seq_mean_token_sum(after).tolist() == pytest.approx([1 / 2, 1 / 2, 0])
    assert seq_mean_token_mean(after).tolist() == pytest.approx([1 / 2, 1 / 4, 0])
