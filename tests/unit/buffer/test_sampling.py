"""What a step claims, and why it must wait."""

import pytest

from slipstream.buffer.sampling import Candidate, NotReady, Queue, Sample, SamplingRules, evict, sample, sample_oldest
from slipstream.configs.buffer import ReuseConfig, StalenessConfig, UniformConfig


def candidates(*versions: int, first: int = 0) -> list[Candidate]:
    """One for each oldest version, numbered from `first`."""
    return [
        Candidate(str(first + place), first + place, version, 2, 1.0, 1.0) for place, version in enumerate(versions)
    ]


def queue(ready=(), reusable=(), *, num_arrived=100, num_uses=0) -> Queue:
    return Queue(candidates(*ready), candidates(*reusable, first=50), num_arrived, num_uses)


def rules(on_stale="mask", max_lag=2, **reuse) -> SamplingRules:
    return SamplingRules(reuse=ReuseConfig(**reuse), staleness=StalenessConfig(max_lag, on_stale))


def drawn(what: Queue, how: SamplingRules, num_groups: int) -> Sample | NotReady:
    return sample(what, how, num_groups=num_groups, seed=0, step=1)


def test_only_plain_rules_may_skip_reading_the_queue():
    assert rules().only_oldest
    others = [rules("drop"), rules(max_uses=2), SamplingRules(UniformConfig())]
    assert not any(other.only_oldest for other in [*others, rules(samples_per_insert=1.0)])


def test_the_oldest_are_drawn_or_nothing():
    assert sample_oldest(["3", "4"], num_groups=2, num_ready=9).group_ids == ["3", "4"]
    assert sample_oldest(["3"], num_groups=2, num_ready=1) == NotReady("1 of 2 groups are ready", ready_needed=2)


@pytest.mark.parametrize(("on_stale", "expired"), [("mask", []), ("drop", ["0"])])
def test_a_group_beyond_the_bound_leaves_the_queue_as_the_policy_says(on_stale, expired):
    evictions = evict(queue(ready=[2, 3, 5]), rules(on_stale), version=5)
    assert evictions.expired == expired
    assert evictions.is_empty == (not expired)


def test_groups_are_let_go_when_they_are_too_old_or_too_many():
    what = queue(reusable=[3, 1, 4, 5])
    assert evict(what, rules(max_uses=2, max_age=3), version=5).released == ["51"]
    assert evict(what, rules(max_uses=2, max_groups=2), version=5).released == ["50", "51"]


@pytest.mark.parametrize(
    ("num_ready", "num_reusable", "num_fresh", "num_reused"),
    [(9, 9, 2, 2), (9, 1, 3, 1), (1, 9, 1, 3), (9, 0, 4, 0), (0, 9, 0, 4)],
)
def test_used_groups_fill_up_what_fresh_ones_leave(num_ready, num_reusable, num_fresh, num_reused):
    what = queue(ready=[5] * num_ready, reusable=[4] * num_reusable)
    claim = drawn(what, rules(max_uses=4, fresh_fraction=0.5), 4)
    assert isinstance(claim, Sample)
    assert claim.reused == [False] * num_fresh + [True] * num_reused
    assert len(set(claim.group_ids)) == 4


def test_a_shortage_tells_how_many_there_are_and_how_many_more_it_takes():
    found = drawn(queue(ready=[5], reusable=[4]), rules(max_uses=2), 4)
    assert found == NotReady("1 of 4 groups are ready, 1 may be used again", ready_needed=3)


def test_no_more_is_trained_on_than_samples_per_insert_times_what_arrived():
    limited = rules(max_uses=4, samples_per_insert=2.0)
    assert isinstance(drawn(queue(ready=[5] * 4, num_arrived=10, num_uses=16), limited, 4), Sample)
    found = drawn(queue(ready=[5] * 4, num_arrived=10, num_uses=17), limited, 4)
    assert found == NotReady(
        "17 + 4 uses are more than samples_per_insert (2) x 10 groups that arrived", ready_needed=5
    )
