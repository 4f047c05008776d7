"""A flood of events becomes a few lines, which count all of them."""

import subprocess
import sys

from slipstream.runtime.logs import LogLimiter, escape_control_characters
from tests.fakes import FakeClock

BURST = 8


def make_limiter() -> tuple[LogLimiter, list, FakeClock]:
    lines, clock = [], FakeClock()
    return LogLimiter(lambda event, **details: lines.append((event, details)), clock=clock), lines, clock


def test_the_first_lines_of_a_kind_are_written_and_the_next_are_counted():
    limiter, lines, clock = make_limiter()
    assert all(limiter.log("refused", "token", peer=number) for number in range(BURST))
    assert not limiter.log("refused", "token", peer="b")
    assert limiter.log("refused", "schema", peer="c")
    assert not limiter.log("refused", "token", peer="d")
    clock.now += 5
    assert limiter.log("refused", "token", peer="e")
    assert lines[BURST:] == [
        ("refused", {"kind": "schema", "peer": "c"}),
        ("refused", {"kind": "token", "peer": "e", "more": 2}),
    ]


def test_a_minute_of_a_flood_gives_a_few_lines_that_add_up():
    limiter, lines, clock = make_limiter()
    for _ in range(6000):
        limiter.log("frame", "malformed", peer="a")
        clock.now += 0.01
        limiter.flush()
    clock.now += 5
    limiter.flush()
    limiter.flush()
    assert len(lines) <= BURST + 13
    assert sum(("peer" in details) + details.get("more", 0) for _, details in lines) == 6000


ROLE = """
import structlog
from slipstream.runtime.logs import configure_logs
configure_logs("role")
"""
FLOOD = f"""{ROLE}
for number in range(1000):
    structlog.get_logger().info("a line that is long enough to fill a buffer soon", number=number)
    print("another one", flush=True)
"""


def test_a_role_outlives_the_disk_of_its_log():
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-c", FLOOD], stdout=full, stderr=full, timeout=30)
    assert done.returncode == 0


def test_what_a_peer_sent_stays_on_its_line_and_moves_no_cursor():
    event = {"event": "left", "reason": "a\n12:00 forged\x1b[2J\u202e", "leases": 3, "peer": "grün"}
    escaped = escape_control_characters(None, "info", event)
    assert escaped == {"event": "left", "reason": "a\\n12:00 forged\\x1b[2J\\u202e", "leases": 3, "peer": "grün"}
    said = f"{ROLE}structlog.get_logger().info('left: forged\\n12:00 \\x1b[2J')"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=30, check=True)
    (line,) = done.stderr.splitlines()
    assert "\\x1b[2J" in line
    assert line.isprintable()
