"""Status of a run: its roles, their waits, admission and events."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from slipstream.buffer.records import Event
from slipstream.buffer.trajectory import Reward, Trajectory
from slipstream.observe.run_status import Monitor, RunStatus, Wait
from slipstream.observe.terminal import LiveView, draw_status, sparkline
from tests.builders import make_run, make_trajectory
from tests.cases import cases
from tests.fakes import STATUS_ROW, make_gauges, make_reports, status_of
from tests.memory_store.store import MemoryStore
from tests.unit.slipstream.observe.catalog.test_catalog import byte_tokenizer

SHORT = "waiting for the 2 groups of step 4: 1 of 2 groups are ready"
DEFERRED = {"reason": "trajectories are deferred: store_full", "waits_for": "store"}
STORE = {"reason": "the store at x for 3 s of 60 s", "waits_for": "store"}


def role(status, name):
    return next(each for each in status.roles if each.name == name)


def test_roles_are_alive_silent_or_gone_and_a_generator_has_its_figures_whatever_the_types_of_its_gauges():
    status = status_of()
    names = ["broker", "launcher", "learner", "generator-0", "generator-1", "generator-2"]
    assert [each.name for each in status.roles] == names
    assert [each.liveness for each in status.roles[3:]] == ["alive", "silent", "gone"]
    assert role(status, "generator-1").report_age_s == 90.0
    first = role(status_of(), "generator-0")
    assert (first.version, first.version_lag, first.tokens_per_s) == (2, 1, 5210.25)
    assert (first.running, first.capacity, first.restarts) == (32, 64, 2)
    assert (first.host, first.pid, first.progress_age_s) == ("node", 7, 0.5)
    assert role(status_of(), "learner").version_lag is None
    for wrong in ("fast", float("nan"), [1], None):
        names = ("tokens_per_s", "running", "max_concurrency", "progressed_at")
        found = role(status_of({"g": (0, make_gauges(version=-1, **dict.fromkeys(names, wrong)))}), "g")
        assert (found.version, found.version_lag, found.progress_age_s) == (None, None, None)
        assert (found.tokens_per_s, found.running, found.capacity) == (None, None, 64)
    assert role(status_of({"g": (0, make_gauges(max_concurrency=16))}), "g").capacity == 16, "as reported"
    # The peer timeout comes from the run.
    for age_s, liveness in ((8.0, "alive"), (8.01, "silent"), (-60.0, "silent")):
        assert role(status_of({"generator-0": (age_s, make_gauges())}), "generator-0").liveness == liveness
    broker = {"role": "broker", "state": "ready", "address": "tcp://10.0.0.5:20000"}
    for age_s, address in ((0.5, "tcp://10.0.0.5:20000"), (90.0, "")):
        assert status_of({"broker": (age_s, broker)}).address == address


def test_paced_generators_and_those_with_room_wait_for_the_learner_and_all_for_dead_silent_and_missing_roles():
    assert status_of().waits == [Wait("generator-0", "the learner", "pacing: wait")]
    reported = make_reports() | {"generator-0": (0, make_gauges())}
    waits = status_of(reported, phase="finishing").waits
    assert waits == [Wait("the generators", "the learner", "the run is finishing")]
    reported["generator-0"] = (0, make_gauges(running=64))
    assert status_of(reported, phase="finishing").waits == []
    reported = make_reports() | {"broker": (43.0, make_reports()["broker"][1])}
    assert status_of(reported).waits[0] == Wait("all roles", "the broker", "the broker has been silent for 43 s")
    reported = make_reports()
    reported["learner"] = (20.0, reported["learner"][1])
    del reported["generator-0"]
    found = [(wait.waiter, wait.blocked_on) for wait in status_of(reported).waits]
    assert found == [("the generators", "the learner"), ("the learner", "the generators")]
    assert status_of({}).waits == [Wait("all roles", "the broker", "no broker has joined yet")]
    assert status_of({}, phase="finished").waits == []


@cases(
    "changes, waits",
    ({"learner": {"reason": SHORT, "waits_for": "groups"}}, [("learner", "the generators")]),
    ({"broker": DEFERRED, "learner": STORE}, [("broker", "the store"), ("learner", "the store")]),
)
def test_roles_wait_for_what_they_report(changes, waits):
    reports = {name: (0, {"role": name, "state": "ready"} | gauges) for name, gauges in changes.items()}
    found = {(wait.waiter, wait.blocked_on): wait.reason for wait in status_of(make_reports() | reports).waits}
    assert set(waits) <= found.keys()
    assert [found[wait] for wait in waits] == [gauges["reason"] for gauges in changes.values()]


def test_ready_groups_events_fractions_admission_and_a_full_disk_are_in_the_status():
    status = status_of(ready_versions={0: 1, 3: 5, 2: 4}, events=[Event(990.0, "generator-1", "died")])
    assert list(status.ready_by_lag.items()) == [(0, 5), (1, 4), (3, 1)]
    (event,) = status.events
    assert (event.age_s, event.role, event.text) == (10.0, "generator-1", "died")
    status = status_of(rows=(STATUS_ROW, STATUS_ROW))
    assert status.learner_wait_fraction == pytest.approx(0.25)
    assert status.generators_busy_fraction == 0.5, "of the only living generator"
    assert status_of({}).learner_wait_fraction is None
    assert status_of({}).generators_busy_fraction is None
    assert status_of().admission.reason == ""
    assert status_of(phase="finishing").admission.reason == "the run is finishing"
    lagging = make_run(staleness={"max_lag": 1})
    assert status_of(run=lagging).admission.limit == 2 * lagging.learner.prompts_per_step
    (wait,) = status_of(full_disk="/data (0 MiB of 9 MiB free), which holds runs/x/store").waits
    assert (wait.waiter, wait.blocked_on) == ("all roles", "the disk")
    assert "/data (0 MiB of 9 MiB free)" in wait.reason
    assert status_of(phase="finished", full_disk="/data").waits == []


ROW = {
    "time_s": 65.0,
    "learner/reward_mean": 0.5,
    "lag/mean": 1.5,
    "lag/max": 2,
    "lag/histogram": {1: 50, 2: 50},
    "generators/tokens_per_s": 1000.0,
    "learner/tokens_per_s": 900.0,
    "learner/wait_s": 0.1,
    "learner/train_s": 0.4,
}


class Scene:
    """A run in a store, with its live view on a console."""

    def __init__(self, *, is_terminal, width=120, model: Path | None = None, answers: list[Trajectory] | None = None):
        """`model` has the tokenizer of `answers`, those of every step."""
        run = make_run(model={"path": str(model)}) if model else make_run()
        self.store = MemoryStore()
        self.store.open_run("test", config_json="{}", num_rows=1, seed=0)
        self.monitor = Monitor(self.store, make_run())
        self._output = io.StringIO()
        console = Console(file=self._output, force_terminal=is_terminal, width=width)
        self.view = LiveView(run, console=console, read_answers=lambda _: answers or [])

    def append(self, step: int, **values: Any) -> None:
        self.store.append_metrics({"step": step, "version": step} | values)

    def report(self, name: str, **gauges: Any) -> None:
        self.store.report_role(name, {"role": name.partition("-")[0], "state": "ready"} | gauges)

    def show(self) -> None:
        self.view.show(self.monitor.poll())

    def text(self) -> str:
        """All that was shown; a panel comes with the end of the view."""
        return self._output.getvalue()


@pytest.fixture
def scene() -> Scene:
    return Scene(is_terminal=False)


def test_each_step_is_one_plain_line(scene):
    scene.show()
    for step in (1, 2):
        scene.append(step, **ROW)
    scene.show()
    assert "accuracy" not in scene.text(), "nothing was measured"
    scene.append(3, **ROW, **{"eval/accuracy_sampled": 0.25, "eval/accuracy_greedy": 0.5})
    scene.show()
    lines = [line for line in scene.text().splitlines() if line.startswith("step")]
    assert len(lines) == 3
    assert "reward 0.500" in lines[2]
    assert "0.250 sampled 0.500 greedy" in lines[2]
    assert "1m05s" in lines[2]


def test_the_panel_shows_progress_lag_roles_and_waits():
    scene = Scene(is_terminal=True)
    with scene.view.shown():
        scene.show()
        scene.append(3, **ROW)
        scene.report("generator-0", version=3, reason="pacing", waits_for="prompts")
        scene.show()
    for part in ("step 0/4", "1: 50%  2: 50%", "generator-0", "pacing", "1,000 generated"):
        assert part in scene.text()
    assert sparkline([0.0, 0.5, 1.0], low=0, high=1) == "▁▅█"
    assert sparkline([0.5], low=0.5, high=0.5) == "▁"


def test_the_eta_is_the_recent_pace_times_the_remaining_steps_and_that_since_a_rollback(scene):
    assert scene.monitor.poll().eta_s is None
    for step in (1, 2, 3):
        scene.append(step, time_s=2.0 * step)
    assert scene.monitor.poll().eta_s == 2.0
    scene.append(1, time_s=100.0)
    assert scene.monitor.poll().eta_s is None
    scene.append(2, time_s=105.0)
    assert scene.monitor.poll().eta_s == 10.0


def test_rows_are_new_once_even_if_the_store_has_dropped_older_ones(scene):
    for step in range(1, 1003):
        scene.append(step, time_s=1.0)
    assert len(scene.monitor.poll().new_rows) == 1000
    assert scene.monitor.poll().new_rows == []
    scene.append(1003, time_s=1.0)
    snapshot = scene.monitor.poll()
    assert [row["step"] for row in snapshot.new_rows] == [1003]
    assert [row["step"] for row in snapshot.rows] == list(range(4, 1004)), "as many as the store keeps"


@cases(
    "step, unsignaled, size, has_answers",
    (1, 0.5, {"is_terminal": False}, True),
    (2, 0.5, {"is_terminal": False}, False),
    (2, 1.0, {"is_terminal": False}, True),
    (3, 1.0, {"is_terminal": False}, False),
    (11, 0.5, {"is_terminal": True, "width": 120}, True),
    (11, 0.5, {"is_terminal": True, "width": 90}, False),
)
def test_answers_are_shown_at_times_and_without_a_signal(tmp_path, step, unsignaled, size, has_answers):
    byte_tokenizer(tmp_path / "model", *"abcdefghijkl")
    answers = [make_trajectory("0", index, reward=Reward(total)) for index, total in enumerate((0.5, 0.0, 1.0))]
    scene = Scene(model=tmp_path / "model", answers=answers, **size)
    scene.append(step, **ROW, **{"learner/advantage_zero_fraction": unsignaled})
    scene.show()
    shown = [f"answer of step {step}: reward {reward}  abcdef -> ghijkl" for reward in ("1.000", "0.000")]
    assert [line in scene.text().splitlines() for line in shown] == [has_answers] * 2
    assert ("almost no learning signal" in scene.text()) == (has_answers and unsignaled == 1.0)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_dead_end_is_shown_in_the_panel_and_printed_once(is_terminal):
    scene = Scene(is_terminal=is_terminal)
    sentence = "dead end: no generator is alive: start one"
    with scene.view.shown():
        scene.append(1, **ROW)
        for missing in ("1 is ready", "2 are ready"):
            waits = {"reason": f"waiting for 4 groups: {missing}", "waits_for": "groups"}
            scene.report("learner", dead_end=sentence.removeprefix("dead end: "), **waits)
            scene.show()
    assert sentence in scene.text()
    assert is_terminal or scene.text().count(sentence) == 1


def test_before_the_first_step_each_change_of_the_waits_is_printed_once(scene):
    for _ in range(2):
        scene.show()
    for state in ("ready", "ready", "gone"):
        scene.report("generator-0", state=state, reason="loading", waits_for="weights")
        scene.show()
    waits = ["no role waits", "generator-0: loading", "no role waits"]
    assert scene.text().splitlines() == [f"starting: {each}" for each in waits]


def drawn(status: RunStatus, *, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(draw_status(status))
    return console.file.getvalue()


def test_each_living_role_and_the_newest_departed_ones_have_a_line_and_a_broker_the_command_that_joins():
    lines = [" ".join(line.split()) for line in drawn(status_of()).splitlines()]
    rows = {line.partition(" ")[0]: line for line in reversed(lines)}
    assert rows["generator-0"] == "generator-0 node:7 2 1 5,210 32/64 0s 2 0s ready"
    assert rows["generator-1"].endswith(" 1m30s SILENT, was ready")
    assert rows["generator-2"].endswith(" 5m00s gone: left")
    assert rows["learner"].endswith(" ready: training step 4")
    nothing = drawn(status_of({}))
    assert "no role has reported yet" in nothing
    assert "all roles for the broker" in nothing
    gone = {f"generator-{age}": (age, {"role": "generator", "state": "gone"}) for age in range(1, 10)}
    text = drawn(status_of(gone))
    assert ("generator-4 " in text, "generator-5 " in text, "and 5 more that are gone" in text) == (True, False, True)
    text = drawn(status_of({"broker": (0.5, {"role": "broker", "state": "ready", "address": "tcp://10.0.0.5:20000"})}))
    command = "SLIPSTREAM_TOKEN=... python -m slipstream.generators broker.address=tcp://10.0.0.5:20000"
    assert f"{command}, with the token of the run" in text
    assert "join" not in drawn(status_of())


def test_waits_queue_events_and_groups_rejected_by_a_filter_are_shown():
    events = [Event(988.0, "learner", "evicted generator-1")]
    status = status_of(ready_versions={3: 5, 1: 2}, events=events, rows=(STATUS_ROW,))
    shown = drawn(status)
    for part in (
        *("generator-0 for the learner: pacing: wait", "waited 25% of its last steps", "lag 0: 5, lag 2: 2"),
        *("12s ago  learner  evicted generator-1", "reward 0.500, lag 1.5 (max 2)", "0 committed, 3 being published"),
        "0 of 0 complete groups carried no signal (0.0%)",
    ):
        assert part in shown
    reasons = {"rejected: zero_advantage": 20, "rejected: too_hard": 4, "expired: on_stale": 9}
    skipped = {"skipped_too_easy": 3, "skipped_too_hard": 41, "rows": 97}
    counts = msgspec.structs.replace(status.counts, became_ready=72, reasons=reasons, curriculum=skipped)
    shown = drawn(msgspec.structs.replace(status, counts=counts))
    assert "24 of 96 complete groups carried no signal (25.0%)" in shown
    assert "97 rows, 41 skipped_too_hard, 3 skipped_too_easy" in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_reported_text_cannot_add_markup_or_control_characters(width):
    hostile = {"role": "generator", "state": "\x1b[2J[bold]", "reason": "[/nonsense]\x07"}
    status = status_of(make_reports() | {"[red]g": (0, hostile)}, events=[Event(0, "x", "\x1b[31m[/]")])
    assert not {"\x1b", "\x07"} & set(drawn(status, width=width))
