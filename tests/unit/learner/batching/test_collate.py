import pytest
import torch

from slipstream.learner.batching.collate import Layout, collate
from tests.unit.learner.builders import make_groups, make_policy, make_response, make_sample, make_samples

ROWS = Layout("shared_rows", microbatch_tokens=4096)
NARROW_ROWS = Layout("shared_rows", microbatch_tokens=40, row_tokens=20)
ONE_ROW = Layout("one_row", 4096, 4096)
ONE_PER_ROW = Layout("one_per_row", microbatch_tokens=64)
LAYOUTS = [ROWS, NARROW_ROWS, ONE_ROW, ONE_PER_ROW]


def random_samples(seed: int = 0):
    return make_samples([m for group in make_groups(num_groups=6, group_size=4, seed=seed) for m in group])


def logprobs_one_by_one(policy, sample):
    token_ids = torch.from_numpy(sample.token_ids.astype("int64"))[None]
    logits = policy.causal_lm(input_ids=token_ids).logits[0].log_softmax(-1)
    trained = torch.from_numpy(sample.trained)
    return logits[trained - 1].gather(-1, token_ids[0, trained][:, None])[:, 0]


def logprobs_packed(policy, samples, layout):
    """Log-probabilities of the samples' tokens, in sample order."""
    column = torch.zeros(sum(len(sample.trained) for sample in samples))
    for microbatch in collate(samples, layout=layout):
        column[microbatch.indices] = policy(microbatch)["logprobs"]
    return [column[sample.indices] for sample in samples]


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_changes_no_log_probability(layout):
    policy, samples = make_policy(), random_samples()
    for sample, packed in zip(samples, logprobs_packed(policy, samples, layout), strict=True):
        assert torch.allclose(packed, logprobs_one_by_one(policy, sample), atol=1e-5), sample.group_id


@torch.no_grad()
def test_a_response_does_not_see_its_siblings():
    policy = make_policy()
    first = make_response(0, 0, response=(5, 6, 7))
    results = []
    for other in ((9, 9, 9, 9), (30, 31, 32, 33)):
        samples = make_samples([first, make_response(0, 1, response=other)])
        results.append(logprobs_packed(policy, samples, ROWS)[0])
    assert results[0].equal(results[1])


def test_a_shared_prompt_is_computed_once():
    samples = [make_sample(make_response(0, i, response=(5, 6, 7))) for i in range(8)]
    (microbatch,) = collate(samples, layout=ROWS)
    assert microbatch.num_tokens == 4 + 8 * 2
    (alone,) = collate(samples, layout=ONE_ROW)
    assert alone.num_tokens == 8 * (4 + 2)


def test_one_sample_per_row_needs_neither_mask_nor_positions():
    samples = [make_sample(make_response(0, i, response=(5, 6, 7))) for i in range(8)]
    (microbatch,) = collate(samples, layout=ONE_PER_ROW)
    assert microbatch.token_ids.shape == (8, 4 + 2)
    assert microbatch.spans is None
    assert microbatch.position_ids is None


def test_tokens_keep_their_indices():
    trajectory = make_response(0, 0, prompt=(4, 8), response=(5, 6))
    (microbatch,) = collate([make_sample(trajectory, first_index=48)], layout=ROWS)
    assert microbatch.targets.tolist() == [5, 6]
    assert microbatch.token_ids.flatten()[microbatch.sources].tolist() == [8, 5]
    assert microbatch.indices.tolist() == [48, 49]
    assert microbatch.temperatures.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_get_everything_once_and_equally_many_microbatches(layout):
    samples = random_samples()
    shares = [collate(samples, layout=layout, rank=rank, num_ranks=3) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    indices = sorted(index for share in shares for m in share for index in m.indices.tolist())
    assert indices == list(range(sum(len(sample.trained) for sample in samples)))
    loads = [sum(m.num_tokens for m in share) for share in shares]
    assert max(loads) < 1.5 * min(loads)


def test_a_rank_without_samples_still_has_its_microbatch():
    samples = [make_sample(make_response())]
    (empty,) = collate(samples, layout=ROWS, rank=1, num_ranks=2)
    assert len(empty.targets) == 0
    logprobs = make_policy()(empty)["logprobs"]
    logprobs.sum().backward()


def test_nothing_to_train_on_makes_no_microbatch():
    assert collate([], layout=ROWS) == []
