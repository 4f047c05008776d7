"""ConcurrencyLimit: the number of concurrent trajectories follows the engine's load."""

from collections.abc import Iterable

import pytest

from slipstream.generators.engines.engine import EngineLoad
from slipstream.generators.generator import ConcurrencyLimit


def limits(loads: Iterable[EngineLoad], *, most: int = 64) -> list[int]:
    """Return the limit after each observation of a full engine."""
    concurrency = ConcurrencyLimit(least=8, most=most)
    observed = []
    for load in loads:
        concurrency.observe(load, running=concurrency.limit)
        observed.append(concurrency.limit)
    return observed


CUT = (0.95, 0, 1)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        pytest.param([(0.0, 0, 0)] * 3, [64] * 3, id="an idle engine changes nothing"),
        pytest.param([(0.99, 0, 0)] * 3, [64] * 3, id="a full cache alone changes nothing"),
        # 64 * 3/4 = 48, 48 * 3/4 = 36; an unchanged total means no new preemption; 36 * 3/4 = 27.
        pytest.param([(0.95, 0, n) for n in (0, 1, 5, 5, 6)], [64, 48, 36, 36, 27], id="preemptions take a quarter"),
        pytest.param([(0.5, 0, n) for n in (0, 60, 120)], [64] * 3, id="preemptions in a cache with room are ignored"),
        # Queued twice in a row: 64 - 20. Then one group more per observation.
        pytest.param([(0.5, n, 0) for n in (20, 20, 0)], [64, 44, 52], id="a lasting queue is subtracted"),
        pytest.param([(0.5, n, 0) for n in (60, 40, 10)], [64] * 3, id="a shrinking queue is ignored"),
        pytest.param([(0.5, n, 0) for n in (4, 30)], [64, 60], id="a growing queue counts at its former length"),
        pytest.param([CUT, *[(0.79, 0, 1)] * 4], [48, 56, 64, 64, 64], id="with room it grows by a group"),
        pytest.param([CUT, *[(0.81, 0, 1)] * 2], [48] * 3, id="without room it does not grow"),
        pytest.param([CUT, (0.5, 1, 1)], [48] * 2, id="with a queue it does not grow"),
    ],
)
def test_the_limit_follows_cache_queue_and_preemptions(loads: list[tuple[float, int, int]], expected: list[int]):
    assert limits(EngineLoad(*load) for load in loads) == expected


def test_the_limit_stays_between_a_group_and_its_maximum():
    assert ConcurrencyLimit(least=8, most=64).limit == 64
    falling = [EngineLoad(kv_usage=0.95, num_preempted=total) for total in range(1, 12)]
    assert limits(falling)[-1] == 8
    assert limits(falling, most=4)[-1] == 4


@pytest.mark.parametrize(
    "observed",
    [
        pytest.param([(0.95, 1, 32, 24)], id="a decrease starts from what was running"),
        pytest.param([(0.95, 1, 64, 48), (0.1, 1, 40, 48), (0.1, 1, 41, 56)], id="grows only if it is reached"),
        pytest.param(
            [(0.95, 1, 64, 48), (0.95, 2, 60, 48), (0.95, 3, 50, 48), (0.95, 3, 48, 48), (0.95, 4, 48, 36)],
            id="observations before a decrease takes effect are ignored",
        ),
    ],
)
def test_the_limit_follows_what_is_running(observed: list[tuple[float, int, int, int]]):
    concurrency = ConcurrencyLimit(least=8, most=64)
    for usage, total, running, limit in observed:
        concurrency.observe(EngineLoad(kv_usage=usage, num_preempted=total), running=running)
        assert concurrency.limit == limit


@pytest.mark.parametrize("room", [100, 250])
def test_the_limit_settles_below_the_capacity_of_an_engine(room: int):
    """The engine's cache holds `room` sequences; it preempts the excess, visible one observation later."""
    concurrency, preempted, seen = ConcurrencyLimit(least=8, most=256), 0, []
    for _ in range(100):
        running = concurrency.limit
        preempted += max(0, running - room)
        load = EngineLoad(min(1.0, running / room), num_waiting=max(0, running - room), num_preempted=preempted)
        concurrency.observe(load, running=running)
        seen.append(concurrency.limit)
    assert max(seen[20:]) <= room
    assert min(seen[20:]) >= 0.7 * room
