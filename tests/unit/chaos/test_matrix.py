from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from slipstream.buffer.accounting import Audit
from slipstream.buffer.records import StepEntry
from tests.chaos.matrix import Result, Row, _as_markdown, _play
from tests.chaos.matrix_runs import Loss

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
