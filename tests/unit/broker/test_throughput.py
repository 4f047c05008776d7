"""Throughput is measured from leases and from trajectories that were stored."""

from math import inf, isnan
from typing import NamedTuple

import pytest

from slipstream.broker.fair_share import Throughput


class Pace(NamedTuple):
    group_s: float
    groups_per_s: float
    in_flight: int


def pace(throughput: Throughput) -> Pace:
    return Pace(*throughput.measured, throughput.in_flight)


def groups(*numbers: int) -> dict[str, list[int]]:
    """Leases of two members each."""
    return {f"{number}-0": [0, 1] for number in numbers}


def store(throughput: Throughput, *numbers: int, now: float) -> None:
    for number in numbers:
        throughput.record_stored(f"{number}-0-0", now=now)
        throughput.record_stored(f"{number}-0-1", now=now)


def test_concurrent_groups_share_the_time_they_take():
    throughput = Throughput()
    throughput.record_lease(groups(0, 1, 2, 3), now=10.0)
    store(throughput, 0, 1, 2, 3, now=12.0)
    # Four in two seconds.
    assert pace(throughput) == Pace(group_s=2.0, groups_per_s=2.0, in_flight=0)


def test_a_steady_flow_measures_like_a_burst():
    throughput = Throughput()
    throughput.record_lease(groups(0), now=0.0)
    throughput.record_lease(groups(1), now=1.0)
    for number in range(2, 40):
        store(throughput, number - 2, now=float(number))
        throughput.record_lease(groups(number), now=float(number))
    # Two are always out, each for two seconds: one a second.
    assert pace(throughput) == Pace(group_s=2.0, groups_per_s=1.0, in_flight=2)


def test_idle_time_does_not_count():
    throughput = Throughput()
    for start in (0.0, 1000.0):
        throughput.record_lease(groups(int(start)), now=start)
        store(throughput, int(start), now=start + 0.5)
    assert pace(throughput) == Pace(group_s=0.5, groups_per_s=2.0, in_flight=0)


def test_a_group_is_complete_with_its_last_member_and_duplicates_change_nothing():
    throughput = Throughput()
    throughput.record_lease({"7-2": [1, 3]}, now=0.0)
    for _ in range(3):
        throughput.record_stored("7-2-1", now=1.0)
    assert (throughput.in_flight, throughput.is_measured) == (1, False)
    throughput.record_stored("7-2-3", now=4.0)
    throughput.record_stored("7-2-3", now=9.0)
    assert pace(throughput) == Pace(group_s=4.0, groups_per_s=0.25, in_flight=0)


@pytest.mark.parametrize("trajectory_id", ["8-2-1", "7-1-1", "", "-", "x-y-z", "7-2"])
def test_a_trajectory_of_no_recorded_lease_is_ignored(trajectory_id: str):
    throughput = Throughput()
    throughput.record_lease({"7-2": [1]}, now=0.0)
    throughput.record_stored(trajectory_id, now=1.0)
    assert (throughput.in_flight, throughput.is_measured) == (1, False)


def test_one_long_response_does_not_make_a_generator_slow():
    throughput = Throughput()
    for number in range(9):
        throughput.record_lease(groups(number), now=0.0)
        store(throughput, number, now=100.0 if number == 4 else 1.0)
    assert pace(throughput) == Pace(group_s=1.0, groups_per_s=1.0, in_flight=0)


def test_only_the_newest_groups_count():
    throughput = Throughput()
    for number in range(64):
        throughput.record_lease(groups(number), now=0.0)
        store(throughput, number, now=10.0 if number < 32 else 2.0)
    assert pace(throughput).group_s == 2.0


def test_an_unmeasured_generator_has_no_pace_but_groups_in_flight():
    throughput = Throughput()
    assert throughput.leased_at == inf
    throughput.record_lease(groups(0, 1), now=5.0)
    assert (isnan(pace(throughput).group_s), throughput.in_flight, throughput.leased_at) == (True, 2, 5.0)


def test_the_groups_in_flight_have_the_age_of_their_median():
    throughput = Throughput()
    for at in (1.0, 2.0, 30.0):
        throughput.record_lease(groups(int(at)), now=at)
    assert throughput.leased_at == 2.0
    store(throughput, 1, now=31.0)
    assert throughput.leased_at == 16.0


def test_old_leases_that_the_holder_does_not_list_are_dropped():
    throughput = Throughput()
    throughput.record_lease(groups(0, 1), now=0.0)
    throughput.record_lease(groups(2), now=5.0)
    throughput.drop_lost(["1-0"], leased_before=5.0)
    assert throughput.in_flight == 2
    store(throughput, 0, now=6.0)
    assert not throughput.is_measured


def test_after_a_restart_the_next_group_replaces_all_measurements():
    throughput = Throughput()
    for number in range(20):
        throughput.record_lease(groups(number), now=0.0)
        store(throughput, number, now=10.0)
    throughput.restart()
    assert pace(throughput).group_s == 10.0
    for number, took_s in ((20, 1.0), (21, 3.0)):
        throughput.record_lease(groups(number), now=20.0)
        store(throughput, number, now=20.0 + took_s)
    assert pace(throughput) == Pace(group_s=2.0, groups_per_s=pytest.approx(0.5), in_flight=0)
