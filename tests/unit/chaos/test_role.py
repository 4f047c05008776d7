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
from tests.chaos.matrix import Result, Row, _as_markdown, _play
from tests.chaos.matrix_runs import Loss
from tests.chaos.role import Action, Recovery, Role, Strike, draw_strikes
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


def test_a_run_that_continues_is_sound_and_one_that_ends_as_it_must_is_too() -> None:
    assert _play(ROW, FakeRun()).is_sound
    ends = ROW._replace(ends="no room")
    assert _play(ends, FakeRun(ended="error: no room on the disk")).is_sound


@pytest.mark.parametrize(
    ("run", "row", "finding"),
    [
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
    assert not result.is_sound
    assert (loss.lost, loss.duplicated, len(loss.problems), len(result.left)) == finding


def test_a_row_of_the_document_has_what_was_found() -> None:
    result = Result("full disk", outcome="continues", loss=Loss(2, 1), left=["a|b"], next_step_s=0.44)
    assert _as_markdown([result]).splitlines()[2].startswith("| full disk | continues | 2 | 1 | a/b | 0.4 s | `tests/")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Credit:
    monkeypatch.setattr(credit, "_GRACE_S", -1.0)
    made = Credit(Journal(tmp_path, "generator-0"))
    made.welcome(make_welcome("first"))
    return made


def make_welcome(broker: str) -> Welcome:
    return Welcome("run", "{}", "", 0, credit_messages=2, credit_bytes=100, broker_incarnation=broker, num_heldout={})


def reports(folder: Path) -> list[str]:
    return [each["k"] for life in read_journals(folder) for each in life.entries]


def check_often(kept: Credit) -> None:
    for _ in range(credit._CHECKS):
        kept.check()


def test_what_is_sent_within_the_credit_is_in_order_and_beyond_it_is_reported(kept: Credit, tmp_path: Path):
    for name in ("a", "b"):
        kept.add(name, 10)
        kept.send(name, 10)
    kept.add("c", 10)
    check_often(kept)
    assert reports(tmp_path) == []
    kept.send("c", 10)
    assert reports(tmp_path) == ["overrun"]


def test_what_waits_though_an_acknowledgment_has_freed_credit_is_reported(kept: Credit, tmp_path: Path):
    kept.add("a", 90)
    kept.send("a", 90)
    kept.add("b", 90)
    check_often(kept)
    assert reports(tmp_path) == []
    kept.acknowledge(["a"])
    check_often(kept)
    assert reports(tmp_path) == ["overdue"]


def test_what_was_sent_to_a_broker_that_was_replaced_is_due_again(kept: Credit, tmp_path: Path):
    kept.add("a", 40)
    kept.send("a", 40)
    kept.welcome(make_welcome("first"))
    check_often(kept)
    assert reports(tmp_path) == []
    kept.welcome(make_welcome("second"))
    check_often(kept)
    assert reports(tmp_path) == ["overdue"]


def test_what_was_put_off_is_due_after_the_time_that_was_asked_for(kept: Credit, tmp_path: Path):
    kept.add("a", 40)
    for retry_after_s, expected in ((60.0, []), (0.0, ["overdue"])):
        kept.send("a", 40)
        kept.reject(Nack("a", "store_full", False, retry_after_s=retry_after_s))
        check_often(kept)
        assert reports(tmp_path) == expected
