"""The status of a run as text is complete and free of control characters at any width."""

import io

import msgspec
import pytest
from rich.console import Console

from slipstream.buffer.records import Event
from slipstream.observe.run_status import RunStatus
from slipstream.observe.terminal import draw_status
from tests.fakes import STATUS_ROW, make_reports, status_of


def drawn(status: RunStatus, *, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(draw_status(status))
    return console.file.getvalue()


def row_of(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_each_role_has_a_line():
    text = drawn(status_of())
    assert " ".join(row_of(text, "generator-0")) == "generator-0 node:7 2 1 5,210 32/64 0s 2 0s ready"
    assert row_of(text, "generator-1")[-4:] == ["1m30s", "SILENT,", "was", "ready"]
    assert row_of(text, "generator-2")[-3:] == ["5m00s", "gone:", "left"]
    assert row_of(text, "learner")[-4:] == ["ready:", "training", "step", "4"]


def test_waits_queue_and_errors_are_shown():
    text = drawn(
        status_of(
            ready_versions={3: 5, 1: 2}, events=[Event(988.0, "learner", "evicted generator-1")], rows=(STATUS_ROW,)
        )
    )
    for part in (
        "generator-0 for the learner: pacing: wait",
        "waited 25% of its last steps",
        "lag 0: 5, lag 2: 2",
        "12s ago  learner  evicted generator-1",
        "reward 0.500, lag 1.5 (max 2)",
        "0 committed, 3 being published",
    ):
        assert part in text


def test_groups_rejected_by_a_filter_are_shown():
    status = status_of()
    counts = {"reasons": {"rejected: zero_signal": 20, "rejected: too_hard": 4, "expired: on_stale": 9}}
    counts = msgspec.structs.replace(status.counts, became_ready=72, **counts)
    assert "24 of 96 complete groups carried no signal (25.0%)" in drawn(msgspec.structs.replace(status, counts=counts))
    assert "0 of 0 complete groups carried no signal (0.0%)" in drawn(status)


def test_prompts_that_the_curriculum_skipped_are_shown():
    counted = {"skipped_too_easy": 3, "skipped_too_hard": 41, "rows": 97}
    counts = msgspec.structs.replace(status_of().counts, curriculum=counted)
    text = drawn(msgspec.structs.replace(status_of(), counts=counts))
    assert "97 rows, 41 skipped_too_hard, 3 skipped_too_easy" in text


def test_a_run_without_roles_is_shown():
    text = drawn(status_of({}))
    assert "no role has reported yet" in text
    assert "all roles for the broker" in text


def test_only_the_newest_departed_roles_are_shown():
    gone = {f"generator-{age}": (age, {"role": "generator", "state": "gone"}) for age in range(1, 10)}
    text = drawn(status_of(gone))
    assert "generator-4 " in text
    assert "generator-5 " not in text
    assert "and 5 more that are gone" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_reported_text_cannot_add_markup_or_control_characters(width):
    reports = make_reports() | {
        "[red]g": (0, {"role": "generator", "state": "\x1b[2J[bold]", "reason": "[/nonsense]\x07"})
    }
    text = drawn(status_of(reports, events=[Event(0, "x", "\x1b[31m[/]")]), width=width)
    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_broker_that_other_machines_reach_is_shown_with_the_command_that_joins():
    broker = {"role": "broker", "state": "ready", "address": "tcp://10.0.0.5:20000"}
    text = drawn(status_of({"broker": (0.5, broker)}))
    assert (
        "SLIPSTREAM_TOKEN=... python -m generators broker.address=tcp://10.0.0.5:20000, with the token of the run"
        in text
    )
    assert "join" not in drawn(status_of())
