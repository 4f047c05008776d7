import signal

import pytest

from tests.chaos.role import Role
from tests.chaos.strikes import Blow, Strike


class ListedProcess:
    """A process that only lists what is done to it; its end is said by the test."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pid = 1
        self.exit_code: int | None = None
        self.last_line = "said last"

    def start(self) -> None:
        self.exit_code = None
        self.events.append("start")

    def send(self, number: signal.Signals) -> None:
        self.events.append(number.name)

    def wait(self, *, timeout_s: float) -> int | None:
        return self.exit_code


@pytest.fixture
def process() -> ListedProcess:
    return ListedProcess()


@pytest.fixture
def role(process: ListedProcess) -> Role:
    role = Role("generator-0", process, newborn=(0,))
    role.start(0.0)
    return role


def make_strike(blow: Blow, *, stopped_s: float = 0.0) -> Strike:
    return Strike("generator-0", blow, is_sparing=False, gap_s=0.0, stopped_s=stopped_s)


def test_a_killed_role_is_started_again_and_its_recovery_is_timed(role: Role, process: ListedProcess) -> None:
    role.strike(make_strike("kill"), 1.0)
    role.look((7,), 1.1)
    process.exit_code = -signal.SIGKILL
    role.poll(1.2)
    role.look((1,), 3.0)
    assert process.events == ["start", "SIGKILL", "start"]
    assert role.recovery.seconds == [2.0]
    assert not role.own_ends


def test_a_stopped_role_goes_on_after_its_time(role: Role, process: ListedProcess) -> None:
    role.strike(make_strike("stop", stopped_s=2.0), 1.0)
    role.poll(2.9)
    assert process.events == ["start", "SIGSTOP"]
    role.poll(3.0)
    assert process.events == ["start", "SIGSTOP", "SIGCONT"]
    assert role.recovery.is_down


def test_a_stopped_role_that_is_terminated_goes_on_so_that_it_hears_it(role: Role, process: ListedProcess) -> None:
    role.strike(make_strike("stop", stopped_s=60.0), 1.0)
    role.strike(make_strike("terminate"), 2.0)
    assert process.events == ["start", "SIGSTOP", "SIGTERM", "SIGCONT"]


def test_a_role_deaf_to_sigterm_is_killed_and_that_is_a_bug(role: Role, process: ListedProcess) -> None:
    role.strike(make_strike("terminate"), 1.0)
    role.poll(60.0)
    role.poll(60.1)
    assert process.events == ["start", "SIGTERM", "SIGKILL"]
    assert list(role.crashes.values()) == [1]


def test_a_role_stopped_while_it_ends_has_the_longer(role: Role, process: ListedProcess) -> None:
    role.strike(make_strike("terminate"), 1.0)
    role.strike(make_strike("stop", stopped_s=5.0), 2.0)
    role.poll(17.0)
    assert process.events == ["start", "SIGTERM", "SIGSTOP", "SIGCONT"]
    assert not role.crashes


def test_an_end_nobody_asked_for_is_counted_once_with_its_last_words(role: Role, process: ListedProcess) -> None:
    process.exit_code = 2
    role.poll(0.1)
    role.poll(0.2)
    role.poll(1.0)
    assert role.own_ends == {"said last": 1}
    assert not role.crashes
    assert process.events == ["start", "start"]


def test_an_uncaught_exception_is_a_crash_even_after_a_sigterm(role: Role, process: ListedProcess) -> None:
    role.strike(make_strike("terminate"), 1.0)
    process.exit_code = 1
    role.poll(1.1)
    assert list(role.crashes) == ["generator-0 must not end with exit code 1, said: said last"]


def test_only_a_role_that_may_finish_is_not_started_again_when_it_ends_well(process: ListedProcess) -> None:
    learner = Role("learner", process, may_finish=True)
    learner.start(0.0)
    process.exit_code = 0
    learner.poll(9.0)
    assert learner.has_finished
    assert process.events == ["start"]
