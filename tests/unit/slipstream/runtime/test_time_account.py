"""TimeAccount and ProcessorTime, with a clock of the test."""

import subprocess
import sys
import time

import pytest

from slipstream.runtime.trace import ProcessorTime, TimeAccount
from tests.fakes import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_the_phases_sum_to_the_wall_time_with_the_current_one_included(clock: FakeClock) -> None:
    account = TimeAccount("rest", clock=clock)
    for seconds, phase in ((1.0, "waiting"), (2.0, "training"), (4.0, "waiting")):
        clock.now += seconds
        account.switch(phase)
    clock.now += 8.0
    assert account.totals() == {"rest": 1.0, "waiting": 10.0, "training": 4.0}
    assert sum(account.totals().values()) == clock.now - 1000.0


def test_a_phase_within_another_interrupts_it(clock: FakeClock) -> None:
    account = TimeAccount("rest", clock=clock)
    with account.phase("training"):
        clock.now += 1.0
        with account.phase("optimizer"):
            clock.now += 2.0
            with account.phase("optimizer"):
                clock.now += 4.0
        clock.now += 8.0
    clock.now += 16.0
    assert account.totals() == {"training": 9.0, "optimizer": 6.0, "rest": 16.0}


def test_a_phase_ends_with_the_exception_that_ends_its_block(clock: FakeClock) -> None:
    account = TimeAccount("rest", clock=clock)
    with pytest.raises(ZeroDivisionError), account.phase("training"):
        clock.now += 1 / (clock.now - 1000.0)
    assert account.switch("waiting") == "rest"
    assert "training" in account.totals()


def test_a_restart_forgets_everything_but_the_phase(clock: FakeClock) -> None:
    account = TimeAccount("rest", clock=clock)
    clock.now += 1.0
    account.switch("waiting")
    clock.now += 1.0
    account.restart()
    clock.now += 0.5
    assert account.totals() == {"waiting": 0.5}
    assert account.gauges() == {"time/waiting": 0.5}


def test_a_switch_takes_a_few_microseconds() -> None:
    account, started_at = TimeAccount("rest"), time.process_time()
    for _ in range(10_000):
        with account.phase("training"):
            pass
    assert (time.process_time() - started_at) / 10_000 < 50e-6


def test_processor_time_counts_children_that_run_and_those_that_ended() -> None:
    processor = ProcessorTime()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    before = processor.seconds
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    processor.list_children()
    running = processor.seconds
    assert running - before >= 0.25
    child.communicate(b"\n")
    assert running <= processor.seconds < running + 0.25
