import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from slipstream.broker.messages import Nack, Welcome
from slipstream.buffer.accounting import Audit
from slipstream.buffer.records import StepEntry
from tests.cases import cases
from tests.chaos.matrix import Row, _play
from tests.chaos.role import Action, Role, Strike, draw_strikes
from tests.chaos.watched import credit
from tests.chaos.watched.credit import Credit
from tests.chaos.watched.journal import Journal, read_journals

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


def make_strike(action: Action, *, stopped_s: float = 0.0) -> Strike:
    return Strike("generator-0", action, is_after_recovery=False, gap_s=0.0, stopped_s=stopped_s)


@pytest.fixture
def role() -> Role:
    role = Role("generator-0", FakeProcess(), initial=(0,))
    role.start(0.0)
    return role


def test_a_killed_role_is_started_again_and_its_recovery_is_timed_but_not_one_that_has_finished(role: Role) -> None:
    role.strike(make_strike("kill"), 1.0)
    role.observe((7,), 1.1)
    role.process.exit_code = -signal.SIGKILL
    role.poll(1.2)
    role.observe((1,), 3.0)
    assert role.process.events == ["start", "SIGKILL", "start"]
    assert role.recovery.seconds == [2.0]
    assert not role.unexpected_exits
    learner = Role("learner", FakeProcess(), may_finish=True)
    learner.start(0.0)
    learner.process.exit_code = 0
    learner.poll(9.0)
    assert learner.has_finished
    assert learner.process.events == ["start"]


def test_a_stopped_role_continues_after_its_time_or_when_it_is_terminated(role: Role) -> None:
    events = role.process.events
    role.strike(make_strike("stop", stopped_s=2.0), 1.0)
    role.poll(2.9)
    assert events == ["start", "SIGSTOP"]
    role.poll(3.0)
    assert events == ["start", "SIGSTOP", "SIGCONT"]
    assert role.recovery.is_pending
    role.strike(make_strike("stop", stopped_s=60.0), 4.0)
    role.strike(make_strike("terminate"), 5.0)
    assert events[3:] == ["SIGSTOP", "SIGTERM", "SIGCONT"]


def test_a_role_that_ignores_sigterm_for_longer_than_it_was_stopped_and_an_uncaught_exception_are_crashes(role: Role):
    role.process.exit_code = 2
    for now in (0.1, 0.2, 1.0):
        role.poll(now)
    assert (role.unexpected_exits, len(role.crashes)) == ({"last line": 1}, 0)
    assert role.process.events == ["start", "start"]
    role.strike(make_strike("terminate"), 1.0)
    role.strike(make_strike("stop", stopped_s=5.0), 2.0)
    role.poll(17.0)
    assert (role.process.events[2:], len(role.crashes)) == (["SIGTERM", "SIGSTOP", "SIGCONT"], 0)
    role.poll(60.0)
    role.poll(60.1)
    assert (role.process.events[5:], list(role.crashes.values())) == (["SIGKILL"], [1])
    role.process.exit_code = 1
    role.poll(60.2)
    assert [*role.crashes][1:] == ["generator-0 must not end with exit code 1, last line: last line"]


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


SOUND = Audit(accepted=0, buffered=0, claimed=0, used=0, retired=0, rejected=0, expired=0, quarantined=0, lost=0,
              duplicated=0, skipped_prompts=0)  # fmt: skip


class FakeRun:
    """A run that makes a step whenever it is waited for; it is its own store."""

    last_line = "last line"
    path = Path("no-run")

    def __init__(
        self, *, audit: Audit = SOUND, groups: Sequence[str] = ("0",), left: Sequence[str] = (), ended: str = ""
    ) -> None:
        self.step = 3
        self.makes_steps = True
        self._audit, self._groups, self._left, self._ended = audit, groups, [*left], ended

    def wait(self, is_met: Callable[[], bool], *, timeout_s: float) -> bool:
        self.step += self.makes_steps
        return is_met()

    def revive(self) -> str:
        return self._ended

    def open_store(self) -> Any:
        return self

    def close(self) -> None:
        pass

    def audit(self, **_: object) -> Audit:
        return self._audit

    def run_state(self) -> SimpleNamespace:
        return SimpleNamespace(step=self.step)

    def ledger(self, *, first_step: int) -> list[StepEntry]:
        return [StepEntry(n, 0, 1, 0, "", [group], [[]]) for n, group in enumerate(self._groups, 1)]

    def take_leftovers(self) -> list[str]:
        return self._left


@contextmanager
def standstill(run: FakeRun) -> Iterator[None]:
    run.makes_steps = False
    yield


ROW = Row("row", "launched", lambda run: nullcontext())


@pytest.mark.parametrize(
    ("run", "row", "finding"),
    [
        (FakeRun(), ROW, (0, 0, 0, 0)),
        (FakeRun(ended="error: no room on the disk"), ROW._replace(ends="no room"), (0, 0, 0, 0)),
        (FakeRun(audit=msgspec.structs.replace(SOUND, lost=2)), ROW, (2, 0, 0, 0)),
        (FakeRun(audit=msgspec.structs.replace(SOUND, skipped_prompts=1)), ROW, (1, 0, 0, 0)),
        (FakeRun(audit=msgspec.structs.replace(SOUND, duplicated=3)), ROW, (0, 3, 0, 0)),
        (FakeRun(groups=["0", "1", "0"]), ROW, (0, 1, 1, 0)),
        (FakeRun(left=["process 7"]), ROW, (0, 0, 0, 1)),
        (FakeRun(ended="error: no room"), ROW, (0, 0, 1, 0)),
        (FakeRun(), ROW._replace(ends="no room"), (0, 0, 1, 0)),
        (FakeRun(), ROW._replace(failure=standstill), (0, 0, 1, 0)),
    ],
)  # fmt: skip
def test_whatever_a_failure_costs_is_in_its_row(run: FakeRun, row: Row, finding: tuple[int, int, int, int]) -> None:
    result = _play(row, run)
    loss = result.loss
    assert result.is_sound == (finding == (0, 0, 0, 0))
    assert (loss.lost, loss.duplicated, len(loss.problems), len(result.left)) == finding


class Watch:
    """An account of credit, and what it has reported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.credit = Credit(Journal(folder, "generator-0"))
        self.credit.welcome(make_welcome("first"))

    def send(self, name: str, size: int) -> None:
        self.credit.add(name, size)
        self.credit.send(name, size)

    def reports(self) -> list[str]:
        for _ in range(credit._CHECKS):
            self.credit.check()
        return [each["k"] for life in read_journals(self._folder) for each in life.entries]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(credit, "_GRACE_S", -1.0)
    return Watch(tmp_path)


def make_welcome(broker: str) -> Welcome:
    return Welcome("run", "{}", "", 0, credit_messages=2, credit_bytes=100, broker_incarnation=broker, num_heldout={})


def test_what_is_sent_beyond_the_credit_is_reported(watch: Watch):
    watch.send("a", 10)
    watch.send("b", 10)
    watch.credit.add("c", 10)
    assert watch.reports() == []
    watch.credit.send("c", 10)
    assert watch.reports() == ["overrun"]


@cases(
    "act",
    lambda kept: kept.acknowledge(["a"]),
    # Trajectories sent to the previous broker are sent to a new one; deferred ones become due.
    lambda kept: kept.welcome(make_welcome("second")),
    lambda kept: kept.reject(Nack("a", "store_full", False, retry_after_s=0.0)),
)
def test_what_waits_although_it_may_be_sent_is_reported(watch: Watch, act: Callable[[Credit], None]):
    watch.send("a", 90)
    watch.credit.add("b", 90)
    watch.credit.welcome(make_welcome("first"))
    assert watch.reports() == []
    act(watch.credit)
    assert watch.reports() == ["overdue"]


def test_what_was_put_off_is_not_due_before_the_time_that_was_asked_for(watch: Watch):
    watch.send("a", 90)
    watch.credit.reject(Nack("a", "store_full", False, retry_after_s=60.0))
    assert watch.reports() == []
