"""A flood becomes a line now and then, and the lines add up to the flood."""

from slipstream.runtime.logs import LogLimiter
from tests.fakes import FakeClock

BURST = 8


def make_throttle() -> tuple[LogLimiter, list, FakeClock]:
    said: list = []
    clock = FakeClock()
    return LogLimiter(lambda event, **details: said.append((event, details)), clock=clock), said, clock


def test_the_first_of_a_kind_are_said_at_once_and_the_next_are_counted():
    throttle, said, clock = make_throttle()
    assert all(throttle.log("refused", "token", peer=number) for number in range(BURST))
    assert not throttle.log("refused", "token", peer="b")
    assert throttle.log("refused", "schema", peer="c")
    assert not throttle.log("refused", "token", peer="d")
    clock.now += 5
    assert throttle.log("refused", "token", peer="e")
    assert said[BURST:] == [
        ("refused", {"kind": "schema", "peer": "c"}),
        ("refused", {"kind": "token", "peer": "e", "more": 2}),
    ]


def test_what_was_left_out_at_the_end_is_said_when_the_quiet_is_over():
    throttle, said, clock = make_throttle()
    for _ in range(1000):
        throttle.log("frame", "malformed")
    throttle.flush()
    assert len(said) == BURST
    clock.now += 5
    throttle.flush()
    throttle.flush()
    assert said[BURST:] == [("frame", {"kind": "malformed", "more": 1000 - BURST})]


def test_a_flood_of_a_minute_is_a_few_lines_which_add_up():
    throttle, said, clock = make_throttle()
    for _ in range(6000):
        throttle.log("frame", "malformed", peer="a")
        clock.now += 0.01
        throttle.flush()
    clock.now += 5
    throttle.flush()
    assert len(said) <= BURST + 13
    assert sum(("peer" in details) + details.get("more", 0) for _, details in said) == 6000
