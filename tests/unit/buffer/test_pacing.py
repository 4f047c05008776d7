"""Pacer: the target lag that the learner chooses from its waits and the ready groups that its claims leave."""

import pytest

from slipstream.buffer.pacing import Pacer
from tests.builders import make_run

GROUPS = 4


def make_pacer(target_lag="auto", *, max_lag: int = 4, **settings) -> Pacer:
    staleness = {"max_lag": max_lag, "target_lag": target_lag}
    return Pacer(make_run(staleness=staleness, learner={"prompts_per_step": GROUPS}, **settings))


def record(pacer: Pacer, steps: int, *, waited_s: float = 0.0, num_spare: int = 0) -> list[float]:
    """Return the lag after every step of one second."""
    lags = []
    for _ in range(steps):
        pacer.record_step(waited_s=waited_s, step_s=1.0, num_spare=num_spare)
        lags.append(pacer.lag)
    return lags


@pytest.mark.parametrize(
    ("waited_s", "expected"),
    [
        # Two steps have prompts from before the first choice. A step without the wait takes 0.5 s, so a version more.
        (0.5, [1, 1, 2, 2, 2, 2, 3]),
        (0.15, [1, 1, 1.25, 1.25, 1.25, 1.25, 1.5]),
        # Less than 1 % of eight steps.
        (0.009, [1] * 40),
    ],
)
def test_the_lag_grows_by_the_mean_wait_of_a_step(waited_s, expected):
    assert record(make_pacer(), len(expected), waited_s=waited_s) == expected


def test_a_learner_that_always_waits_ends_at_the_largest_lag_and_a_short_wait_changes_nothing():
    pacer = make_pacer(max_lag=3)
    assert record(pacer, 40, waited_s=0.4)[-1] == 3
    assert max(record(pacer, 40, waited_s=0.4)) == 3
    pacer = make_pacer()
    for _ in range(3):
        record(pacer, 15)
        record(pacer, 1, waited_s=0.07)
    assert pacer.lag == 1


@pytest.mark.parametrize(("num_spare", "expected"), [(0, 3), (1, 3), (2, 2.75), (4, 2.25), (40, 1)])
def test_groups_that_no_step_needed_lower_the_lag_but_for_a_reserve(num_spare, expected):
    pacer = make_pacer()
    record(pacer, 7, waited_s=0.5)
    assert pacer.lag == 3
    assert record(pacer, 4 + 16, num_spare=num_spare)[-2:] == [3, expected]


def test_one_step_that_needed_all_groups_keeps_the_lag_and_a_version_of_several_steps_counts_as_one():
    pacer = make_pacer()
    record(pacer, 7, waited_s=0.5)
    for _ in range(5):
        record(pacer, 15, num_spare=8)
        record(pacer, 1)
    assert pacer.lag == 3
    pacer = make_pacer(weights={"publish_every_steps": 2})
    assert record(pacer, 5, waited_s=0.5) == [1, 1, 1, 1, 2]
    record(pacer, 6)
    assert record(pacer, 16, num_spare=GROUPS)[-1] == 1.75


@pytest.mark.parametrize(
    ("pacer", "lag"),
    [
        (make_pacer(2.5), 2.5),
        (make_pacer(mode="serial", weights={"transport": "memory"}), 4),
        (make_pacer(max_lag=0), 0),
    ],
)
def test_a_given_lag_a_serial_run_and_a_synchronous_run_keep_theirs(pacer, lag):
    assert record(pacer, 60, waited_s=0.5) == [lag] * 60
    assert record(pacer, 60, num_spare=40) == [lag] * 60
