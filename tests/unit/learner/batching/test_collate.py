import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.batching.collate import (
    Layout,
    bundle_by_prompt,
    bundle_singly,
    collate,
    distribute,
    pack,
    row_length,
)
from tests.unit.learner.builders import (
    make_groups,
    make_policy,
    make_response,
    make_sample,
    make_samples,
    measure,
    measure_alone,
    members_of,
)

ROWS = Layout("shared_rows", microbatch_tokens=4096)
NARROW_ROWS = Layout("shared_rows", microbatch_tokens=40, row_tokens=20)
ONE_ROW = Layout("one_row", 4096, 4096)
ONE_PER_ROW = Layout("one_per_row", microbatch_tokens=64)
LAYOUTS = [ROWS, NARROW_ROWS, ONE_ROW, ONE_PER_ROW]


def random_samples(seed: int = 0, num_groups: int = 6):
    return make_samples(members_of(make_groups(num_groups=num_groups, seed=seed)))


def siblings(num: int, **overrides):
    return [make_sample(make_response(0, i, **({"response": (5, 6, 7)} | overrides))) for i in range(num)]


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_changes_no_log_probability(layout):
    policy, samples = make_policy(), random_samples()
    assert torch.allclose(measure(policy, samples, layout), measure_alone(policy, samples), atol=1e-5)


def test_a_shared_prompt_is_computed_once_and_a_rank_without_samples_has_its_microbatch():
    (shared,), (alone,), (rows,) = (collate(siblings(8), layout=layout) for layout in (ROWS, ONE_ROW, ONE_PER_ROW))
    assert shared.num_tokens == 4 + 8 * 2
    assert alone.num_tokens == 8 * (4 + 2)
    assert rows.token_ids.shape == (8, 4 + 2)
    assert rows.spans is None
    assert rows.position_ids is None
    trajectory = make_response(0, 0, prompt=(4, 8), response=(5, 6))
    (microbatch,) = collate([make_sample(trajectory, first_index=48)], layout=ROWS)
    assert microbatch.targets.tolist() == [5, 6]
    assert microbatch.token_ids.flatten()[microbatch.sources].tolist() == [8, 5]
    assert microbatch.indices.tolist() == [48, 49]
    assert microbatch.temperatures.tolist() == [1.0, 1.0]
    samples = [make_sample(make_response())]
    (empty,) = collate(samples, layout=ROWS, rank=1, num_ranks=2)
    assert len(empty.targets) == 0
    make_policy()(empty)["logprobs"].sum().backward()
    assert collate([], layout=ROWS) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_get_everything_once_and_equally_many_microbatches(layout):
    samples = random_samples()
    shares = [collate(samples, layout=layout, rank=rank, num_ranks=3) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    indices = sorted(index for share in shares for m in share for index in m.indices.tolist())
    assert indices == list(range(sum(len(sample.trained) for sample in samples)))
    loads = [sum(m.num_tokens for m in share) for share in shares]
    assert max(loads) < 1.5 * min(loads)


def identities(samples):
    return sorted((sample.group_id, sample.token_ids.tolist()) for sample in samples)


def test_a_group_shares_its_prompt_and_the_longest_bundle_goes_to_the_least_loaded_rank():
    samples = siblings(3, prompt=(4, 8, 2))
    (bundle,) = bundle_by_prompt(samples, max_tokens=64)
    assert bundle.num_shared == 3
    assert bundle.num_tokens == 3 + 3 * 2  # the last token of a response is predicted but is not an input
    assert [b.num_tokens for b in bundle_by_prompt(samples, max_tokens=7)] == [7, 5]
    assert [b.num_tokens for b in bundle_by_prompt(samples, max_tokens=1)] == [5, 5, 5]
    different = [make_sample(make_response(0, i, prompt=(4, 8, i))) for i in range(2)]
    assert [bundle.num_shared for bundle in bundle_by_prompt(different, max_tokens=64)] == [0]
    samples = [make_sample(make_response(i, 0, prompt=(4,), response=(5,) * n)) for i, n in enumerate((9, 5, 4, 3, 1))]
    loads = [sum(b.num_tokens for b in share) for share in distribute(bundle_singly(samples), num_ranks=2)]
    assert sorted(loads) == [10, 12]


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), row=st.integers(1, 40), budget=st.integers(1, 200), ranks=st.integers(1, 4))
def test_packing_keeps_every_sample_once_and_its_budgets(seed, row, budget, ranks):
    samples = random_samples(seed, num_groups=5)
    shares = distribute(bundle_by_prompt(samples, max_tokens=row), num_ranks=ranks)
    packed = [pack(share, row_tokens=row, microbatch_tokens=budget) for share in shares]
    microbatches = list(itertools.chain(*packed))
    kept = [sample for m in microbatches for r in m for b in r for sample in b.samples]
    assert identities(kept) == identities(samples)
    for rows in microbatches:
        longest = max(map(row_length, rows))
        assert len(rows) * longest <= budget or len(rows) == 1
        assert all(row_length(r) <= row or len(r) == 1 for r in rows)
