"""How fast a generator is, by what it was leased and what came back."""

import pytest

from slipstream.broker.fair_share import Pace, Throughput

TYPICAL = Pace(group_s=3.0, groups_per_s=2.0, in_flight=0)


def groups(*numbers: int) -> dict[str, list[int]]:
    """Leases of two members each."""
    return {f"{number}-0": [0, 1] for number in numbers}


def bring(speed: Throughput, *numbers: int, now: float) -> None:
    for number in numbers:
        speed.accept(f"{number}-0-0", now=now)
        speed.accept(f"{number}-0-1", now=now)


def test_groups_that_run_together_share_the_time_they_take():
    speed = Throughput()
    speed.lease(groups(0, 1, 2, 3), now=10.0)
    bring(speed, 0, 1, 2, 3, now=12.0)
    # Four in two seconds.
    assert speed.pace(now=12.0) == Pace(group_s=2.0, groups_per_s=2.0, in_flight=0)


def test_a_steady_flow_measures_like_a_burst():
    speed = Throughput()
    speed.lease(groups(0), now=0.0)
    speed.lease(groups(1), now=1.0)
    for number in range(2, 40):
        bring(speed, number - 2, now=float(number))
        speed.lease(groups(number), now=float(number))
    # Two are always out, each for two seconds: one a second. The age of those out is (1 + 0) / 2.
    assert speed.pace(now=39.0) == Pace(group_s=2.0, groups_per_s=1.0, in_flight=2)


def test_idle_time_does_not_count():
    speed = Throughput()
    for start in (0.0, 1000.0):
        speed.lease(groups(int(start)), now=start)
        bring(speed, int(start), now=start + 0.5)
    assert speed.pace(now=5000.0) == Pace(group_s=0.5, groups_per_s=2.0, in_flight=0)


def test_a_group_is_back_with_its_last_member_and_a_repeat_changes_nothing():
    speed = Throughput()
    speed.lease({"7-2": [1, 3]}, now=0.0)
    for _ in range(3):
        speed.accept("7-2-1", now=1.0)
    assert (speed.in_flight, speed.is_measured) == (1, False)
    speed.accept("7-2-3", now=4.0)
    speed.accept("7-2-3", now=9.0)
    assert speed.pace(now=9.0) == Pace(group_s=4.0, groups_per_s=0.25, in_flight=0)


@pytest.mark.parametrize("stranger", ["8-2-1", "7-1-1", "", "-", "x-y-z", "7-2"])
def test_what_answers_no_lease_is_passed_over(stranger: str):
    speed = Throughput()
    speed.lease({"7-2": [1]}, now=0.0)
    speed.accept(stranger, now=1.0)
    assert (speed.in_flight, speed.is_measured) == (1, False)


def test_one_long_response_does_not_make_a_generator_slow():
    speed = Throughput()
    for number in range(9):
        speed.lease(groups(number), now=0.0)
        bring(speed, number, now=100.0 if number == 4 else 1.0)
    assert speed.pace(now=100.0) == Pace(group_s=1.0, groups_per_s=1.0, in_flight=0)


def test_only_the_newest_groups_count():
    speed = Throughput()
    for number in range(64):
        speed.lease(groups(number), now=0.0)
        bring(speed, number, now=10.0 if number < 32 else 2.0)
    assert speed.pace(now=10.0).group_s == 2.0


def test_one_that_was_never_measured_counts_as_typical_and_gets_slower_while_nothing_comes_back():
    speed = Throughput()
    assert speed.pace(now=0.0, typical=TYPICAL) == TYPICAL
    speed.lease(groups(0, 1), now=0.0)
    assert speed.pace(now=2.0, typical=TYPICAL) == Pace(3.0, 2.0, 2)
    assert speed.pace(now=7.0, typical=TYPICAL) == Pace(7.0, 2.0, 2)


def test_one_that_hangs_gets_slower_with_every_second():
    speed = Throughput()
    speed.lease(groups(0), now=0.0)
    bring(speed, 0, now=1.0)
    speed.lease(groups(1, 2, 3), now=1.0)
    assert speed.pace(now=1.5).group_s == 1.0
    assert speed.pace(now=31.0) == Pace(group_s=30.0, groups_per_s=1.0, in_flight=3)


def test_leases_its_holder_does_not_name_are_not_held_once_they_are_old():
    speed = Throughput()
    speed.lease(groups(0, 1), now=0.0)
    speed.lease(groups(2), now=5.0)
    speed.keep(["1-0"], leased_before=5.0)
    assert speed.in_flight == 2
    bring(speed, 0, now=6.0)
    assert not speed.is_measured


def test_measured_anew_the_next_group_replaces_all_before():
    speed = Throughput()
    for number in range(20):
        speed.lease(groups(number), now=0.0)
        bring(speed, number, now=10.0)
    speed.replace()
    assert speed.pace(now=10.0).group_s == 10.0
    for number, took_s in ((20, 1.0), (21, 3.0)):
        speed.lease(groups(number), now=20.0)
        bring(speed, number, now=20.0 + took_s)
    assert speed.pace(now=30.0) == Pace(group_s=2.0, groups_per_s=pytest.approx(0.5), in_flight=0)
