import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.batching.collate import bundle_by_prompt, bundle_singly, distribute, pack, row_length
from tests.unit.learner.builders import make_groups, make_response, make_sample


def samples_of(groups):
    return [make_sample(member) for group in groups for member in group]


def identity(sample):
    return sample.group_id, sample.token_ids.tolist()


def ids(bundles):
    return sorted(identity(sample) for bundle in bundles for sample in bundle.samples)


def test_a_group_shares_its_prompt():
    samples = [make_sample(make_response(0, i, prompt=(4, 8, 2), response=(5, 6, 7))) for i in range(3)]
    (bundle,) = bundle_by_prompt(samples, max_tokens=64)
    assert bundle.num_shared == 3
    assert bundle.num_tokens == 3 + 3 * 2  # the last token of a response is predicted but is not an input


def test_a_bundle_that_grows_too_long_is_split_and_repeats_the_prompt():
    samples = [make_sample(make_response(0, i, prompt=(4, 8, 2), response=(5, 6, 7))) for i in range(3)]
    assert [b.num_tokens for b in bundle_by_prompt(samples, max_tokens=7)] == [7, 5]
    assert [b.num_tokens for b in bundle_by_prompt(samples, max_tokens=1)] == [5, 5, 5]


def test_different_beginnings_are_not_shared():
    samples = [make_sample(make_response(0, i, prompt=(4, 8, i))) for i in range(2)]
    (bundle,) = bundle_by_prompt(samples, max_tokens=64)
    assert bundle.num_shared == 0


def test_the_longest_bundle_goes_to_the_least_loaded_rank():
    samples = [make_sample(make_response(i, 0, prompt=(4,), response=(5,) * n)) for i, n in enumerate((9, 5, 4, 3, 1))]
    loads = [sum(b.num_tokens for b in share) for share in distribute(bundle_singly(samples), num_ranks=2)]
    assert sorted(loads) == [10, 12]


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), row=st.integers(1, 40), budget=st.integers(1, 200), ranks=st.integers(1, 4))
def test_packing_keeps_every_sample_once_and_its_budgets(seed, row, budget, ranks):
    samples = samples_of(make_groups(num_groups=5, seed=seed))
    bundles = bundle_by_prompt(samples, max_tokens=row)
    shares = distribute(bundles, num_ranks=ranks)
    packed = [pack(share, row_tokens=row, microbatch_tokens=budget) for share in shares]
    microbatches = list(itertools.chain(*packed))
    assert ids(b for m in microbatches for r in m for b in r) == sorted(map(identity, samples))
    for rows in microbatches:
        longest = max(map(row_length, rows))
        assert len(rows) * longest <= budget or len(rows) == 1
        assert all(row_length(r) <= row or len(r) == 1 for r in rows)
