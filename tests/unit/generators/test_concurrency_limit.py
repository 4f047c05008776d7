"""ConcurrencyLimit: the number of concurrent trajectories follows the engine's load."""

from collections.abc import Iterable

import pytest

from slipstream.generators.engines.engine import EngineLoad
from slipstream.generators.generator import ConcurrencyLimit


def limits(loads: Iterable[EngineLoad], *, least: int = 8, most: int = 64, running: int | None = None) -> list[int]:
    """Return the limit after each observation; `running` is the limit itself unless given."""
    concurrency = ConcurrencyLimit(least=least, most=most)
    observed = []
    for load in loads:
        concurrency.observe(load, running=concurrency.limit if running is None else running)
        observed.append(concurrency.limit)
    return observed


def test_the_limit_starts_at_its_maximum_and_stays_there_without_pressure():
    assert ConcurrencyLimit(least=8, most=64).limit == 64
    assert limits([EngineLoad()] * 3) == [64, 64, 64]
    assert limits([EngineLoad(kv_usage=0.99)] * 3) == [64, 64, 64]


def test_each_observation_of_new_preemptions_takes_a_quarter_off():
    full = [EngineLoad(kv_usage=0.95, num_preempted=total) for total in (0, 1, 5, 5, 6)]
    # 64 * 3/4 = 48, 48 * 3/4 = 36; an unchanged total means no new preemption; 36 * 3/4 = 27.
    assert limits(full) == [64, 48, 36, 36, 27]


def test_the_limit_stays_between_a_group_and_its_maximum():
    falling = [EngineLoad(kv_usage=0.95, num_preempted=total) for total in range(1, 12)]
    assert limits(falling)[-1] == 8
    assert limits(falling, least=8, most=4)[-1] == 4


def test_preemptions_in_a_cache_with_room_are_ignored():
    assert limits([EngineLoad(kv_usage=0.5, num_preempted=total) for total in (0, 60, 120)]) == [64, 64, 64]


def test_requests_that_stay_queued_are_subtracted():
    waiting = [EngineLoad(kv_usage=0.5, num_waiting=number) for number in (20, 20, 0)]
    # Queued twice in a row: 64 - 20. Then one group more per observation.
    assert limits(waiting) == [64, 44, 52]


def test_a_shrinking_queue_is_ignored_and_a_growing_one_counts_at_its_former_length():
    shrinking = [EngineLoad(kv_usage=0.5, num_waiting=number) for number in (60, 40, 10)]
    assert limits(shrinking) == [64, 64, 64]
    growing = [EngineLoad(kv_usage=0.5, num_waiting=number) for number in (4, 30)]
    assert limits(growing) == [64, 60]


def test_the_limit_grows_by_a_group_while_there_is_room_and_demand():
    cut = [EngineLoad(kv_usage=0.95, num_preempted=1)]
    assert limits([*cut, *[EngineLoad(kv_usage=0.79, num_preempted=1)] * 4]) == [48, 56, 64, 64, 64]
    assert limits([*cut, *[EngineLoad(kv_usage=0.81, num_preempted=1)] * 2]) == [48, 48, 48]
    assert limits([*cut, EngineLoad(kv_usage=0.5, num_waiting=1, num_preempted=1)]) == [48, 48]


def test_the_limit_does_not_grow_while_it_is_not_reached():
    concurrency = ConcurrencyLimit(least=8, most=64)
    concurrency.observe(EngineLoad(kv_usage=0.95, num_preempted=1), running=64)
    for running, limit in ((40, 48), (41, 56)):
        concurrency.observe(EngineLoad(kv_usage=0.1, num_preempted=1), running=running)
        assert concurrency.limit == limit


def test_a_decrease_starts_from_what_was_running():
    assert limits([EngineLoad(kv_usage=0.95, num_preempted=1)], running=32) == [24]


def test_observations_before_a_decrease_takes_effect_are_ignored():
    concurrency = ConcurrencyLimit(least=8, most=64)
    for total, running, limit in ((1, 64, 48), (2, 60, 48), (3, 50, 48), (3, 48, 48), (4, 48, 36)):
        concurrency.observe(EngineLoad(kv_usage=0.95, num_preempted=total), running=running)
        assert concurrency.limit == limit


@pytest.mark.parametrize("room", [100, 250])
def test_the_limit_settles_below_the_capacity_of_an_engine(room: int):
    """The engine's cache holds `room` sequences; it preempts the excess, visible one observation later."""
    concurrency, preempted, seen = ConcurrencyLimit(least=8, most=256), 0, []
    for _ in range(100):
        running = concurrency.limit
        preempted += max(0, running - room)
        concurrency.observe(
            EngineLoad(min(1.0, running / room), num_waiting=max(0, running - room), num_preempted=preempted),
            running=running,
        )
        seen.append(concurrency.limit)
    assert max(seen[20:]) <= room
    assert min(seen[20:]) >= 0.7 * room
