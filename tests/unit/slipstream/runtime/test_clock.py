"""Speeds over a window, from two threads; what counters that come and go have growth by."""

from threading import Thread

from slipstream.runtime.clock import Growth, Rate
from tests.fakes import FakeClock


def test_a_rate_is_over_the_window_or_the_shorter_life_time():
    clock = FakeClock()
    rate = Rate(window_s=5.0, clock=clock)
    clock.now += 2
    rate.add(10.0)
    assert rate.per_s == 5.0
    clock.now += 6
    rate.add(20.0)
    assert (rate.per_s, rate.total) == (4.0, 30.0)


def test_reading_a_rate_from_two_threads_drops_each_event_once():
    asking: list[Thread] = []

    class Moment(float):
        """While it is compared for the first time, another thread asks too."""

        def __lt__(self, other: float) -> bool:
            if not asking:
                asking.append(Thread(target=lambda: rate.per_s))
                asking[0].start()
                asking[0].join(timeout=0.1)
            return float(self) < other

    clock = FakeClock()
    rate = Rate(window_s=5.0, clock=lambda: Moment(clock.now))
    rate.add(1.0)
    clock.now += 10
    assert rate.per_s == 0.0
    asking[0].join(timeout=10)
    assert not asking[0].is_alive()


def test_growth_is_that_of_all_counters_also_of_those_that_vanish_or_restart_from_0():
    growth = Growth({"a": 500.0, "b": 10.0})
    growth.update({"a": 700.0, "b": 10.0, "new": 100.0})
    assert growth.total == 300.0
    growth.update({"b": 30.0})
    growth.update({"a": 40.0, "b": 30.0})
    growth.update({"a": 45.0})
    assert growth.total == 300.0 + 20.0 + 40.0 + 5.0
