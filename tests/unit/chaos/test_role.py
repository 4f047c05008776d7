import signal

import pytest

from tests.chaos.role import Action, Recovery, Role, Strike, draw_strikes

GENERATORS = ["generator-0", "generator-1"]


class FakeProcess:
    """A process that records calls as events; the test sets its exit code."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pid = 1
        self.exit_code: int | None = None
        self.last_line = "last line"

    def start(self) -> None:
        self.exit_code = None
        self.events.append("start")

    def send(self, number: signal.Signals) -> None:
        self.events.append(number.name)

    def wait(self, *, timeout_s: float) -> int | None:
        return self.exit_code


@pytest.fixture
def process() -> FakeProcess:
    return FakeProcess()


@pytest.fixture
def role(process: FakeProcess) -> Role:
    role = Role("generator-0", process, initial=(0,))
    role.start(0.0)
    return role


def make_strike(action: Action, *, stopped_s: float = 0.0) -> Strike:
    return Strike("generator-0", action, is_after_recovery=False, gap_s=0.0, stopped_s=stopped_s)


def test_a_killed_role_is_started_again_and_its_recovery_is_timed(role: Role, process: FakeProcess) -> None:
    role.strike(make_strike("kill"), 1.0)
    role.observe((7,), 1.1)
    process.exit_code = -signal.SIGKILL
    role.poll(1.2)
    role.observe((1,), 3.0)
    assert process.events == ["start", "SIGKILL", "start"]
    assert role.recovery.seconds == [2.0]
    assert not role.unexpected_exits


def test_a_stopped_role_continues_after_its_time_or_when_it_is_terminated(role: Role, process: FakeProcess) -> None:
    role.strike(make_strike("stop", stopped_s=2.0), 1.0)
    role.poll(2.9)
    assert process.events == ["start", "SIGSTOP"]
    role.poll(3.0)
    assert process.events == ["start", "SIGSTOP", "SIGCONT"]
    assert role.recovery.is_pending
    role.strike(make_strike("stop", stopped_s=60.0), 4.0)
    role.strike(make_strike("terminate"), 5.0)
    assert process.events[3:] == ["SIGSTOP", "SIGTERM", "SIGCONT"]


def test_a_role_that_ignores_sigterm_is_killed_which_is_a_crash_but_a_stop_extends_its_time(role, process):
    role.strike(make_strike("terminate"), 1.0)
    role.strike(make_strike("stop", stopped_s=5.0), 2.0)
    role.poll(17.0)
    assert (process.events, len(role.crashes)) == (["start", "SIGTERM", "SIGSTOP", "SIGCONT"], 0)
    role.poll(60.0)
    role.poll(60.1)
    assert (process.events[4:], list(role.crashes.values())) == (["SIGKILL"], [1])


def test_an_unexpected_exit_is_counted_once_and_an_uncaught_exception_is_a_crash_even_after_a_sigterm(role, process):
    process.exit_code = 2
    for now in (0.1, 0.2, 1.0):
        role.poll(now)
    assert (role.unexpected_exits, len(role.crashes)) == ({"last line": 1}, 0)
    assert process.events == ["start", "start"]
    role.strike(make_strike("terminate"), 1.0)
    process.exit_code = 1
    role.poll(1.1)
    assert list(role.crashes) == ["generator-0 must not end with exit code 1, last line: last line"]


def test_only_a_role_that_may_finish_is_not_started_again_when_it_ends_well(process: FakeProcess) -> None:
    learner = Role("learner", process, may_finish=True)
    learner.start(0.0)
    process.exit_code = 0
    learner.poll(9.0)
    assert learner.has_finished
    assert process.events == ["start"]


@pytest.mark.parametrize(
    ("before", "seen", "seconds"),
    [
        # From the strike to the first progress.
        (None, [5, 5, 6, 7], [3.0]),
        # Progress that is rolled back must grow again.
        (None, [43, 40, 40, 41], [4.0]),
        # A new process has recovered with its first progress.
        (0, [None, 0, 3], [3.0]),
    ],
)
def test_recovery_lasts_from_the_strike_to_the_first_progress(before, seen, seconds):
    recovery = Recovery()
    recovery.strike(0.0, before=before if before is None else (before,))
    for now, step in enumerate(seen, start=1):
        recovery.observe(step if step is None else (step,), float(now))
    assert (recovery.seconds, recovery.is_pending) == (seconds, False)


def test_a_strike_before_the_recovery_restarts_it_and_a_stop_does_not_count() -> None:
    recovery = Recovery()
    recovery.strike(0.0)
    recovery.strike(5.0)
    recovery.restart(8.0)
    recovery.observe((1,), 8.5)
    recovery.observe((2,), 9.0)
    assert (recovery.seconds, recovery.num_cut_short) == ([1.0], 1)


def test_a_seed_determines_as_many_strikes_as_were_requested_and_every_role_gets_every_action() -> None:
    few, many, other = (
        list(draw_strikes(seed=seed, kills=kills, generators=GENERATORS, max_gap_s=1.0))
        for seed, kills in ((3, 20), (3, 1000), (4, 20))
    )
    assert (many[: len(few)], few == other) == (few, False)
    assert sum(strike.action != "stop" for strike in many) == 1000
    assert all((strike.stopped_s > 0) == (strike.action == "stop") for strike in many)
    roles = ["broker", "learner", "store", *GENERATORS]
    hit = {(strike.role, strike.action) for strike in many}
    assert hit == {(role, action) for role in roles for action in ("kill", "terminate", "stop")}
