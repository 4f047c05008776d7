"""The live view shows a run on a terminal and as plain lines."""

import io

import pytest
from rich.console import Console

from slipstream.buffer.role_reports import role_statuses
from slipstream.observe.run_status import Monitor
from slipstream.observe.terminal import LiveView, sparkline
from tests.builders import make_run
from tests.memory_store.store import MemoryStore

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


def make_monitor() -> tuple[Monitor, MemoryStore]:
    store = MemoryStore()
    store.open_run("test", config_json="{}", num_rows=1, seed=0)
    return Monitor(store, make_run()), store


def show(*, is_terminal: bool) -> str:
    monitor, store = make_monitor()
    output = io.StringIO()
    view = LiveView(make_run(), console=Console(file=output, force_terminal=is_terminal, width=120))
    with view.shown():
        view.show(monitor.poll())
        for step in (1, 2):
            store.append_metrics({"step": step, "version": step, **ROW})
        store.append_metrics(
            {"step": 3, "version": 3, "eval/accuracy_sampled": 0.25, "eval/accuracy_greedy": 0.5, **ROW}
        )
        store.report_role(
            "generator-0",
            {"role": "generator", "state": "ready", "version": 3, "reason": "pacing", "waits_for": "prompts"},
        )
        view.show(monitor.poll())
    return output.getvalue()


def test_each_step_is_one_plain_line():
    lines = [line for line in show(is_terminal=False).splitlines() if line.startswith("step")]
    assert len(lines) == 3
    assert "reward 0.500" in lines[2]
    assert "0.250 sampled 0.500 greedy" in lines[2]
    assert "1m05s" in lines[2]


def test_the_panel_shows_progress_lag_roles_and_waits():
    panel = show(is_terminal=True)
    for part in ("step 0/4", "1: 50%  2: 50%", "generator-0", "pacing", "1,000 generated"):
        assert part in panel


def test_a_sparkline_spans_its_range():
    assert sparkline([0.0, 0.5, 1.0], low=0, high=1) == "▁▅█"
    assert sparkline([0.5], low=0.5, high=0.5) == "▁"


def test_the_eta_is_the_recent_pace_times_the_remaining_steps():
    monitor, store = make_monitor()
    assert monitor.poll().eta_s is None
    for step in (1, 2, 3):
        store.append_metrics({"step": step, "time_s": 2.0 * step})
    assert monitor.poll().eta_s == 2.0


def test_after_a_rollback_the_eta_is_the_pace_of_the_steps_since():
    monitor, store = make_monitor()
    for step, time_s in ((1, 100.0), (2, 200.0), (3, 300.0), (1, 100.0)):
        store.append_metrics({"step": step, "time_s": time_s})
    assert monitor.poll().eta_s is None
    store.append_metrics({"step": 2, "time_s": 105.0})
    assert monitor.poll().eta_s == 10.0


def test_rows_are_new_once_even_if_the_store_has_dropped_older_ones():
    monitor, store = make_monitor()
    for step in range(1, 1003):
        store.append_metrics({"step": step, "time_s": 1.0 * step})
    assert len(monitor.poll().new_rows) == 1000
    assert monitor.poll().new_rows == []
    store.append_metrics({"step": 1003, "time_s": 1003.0})
    snapshot = monitor.poll()
    assert snapshot.new_rows == [{"step": 1003, "time_s": 1003.0}]
    assert [row["step"] for row in snapshot.rows] == list(range(4, 1004)), "as many as the store keeps"


def show_dead_end(*, is_terminal: bool) -> str:
    monitor, store = make_monitor()
    output = io.StringIO()
    view = LiveView(make_run(), console=Console(file=output, force_terminal=is_terminal, width=120))
    with view.shown():
        for missing in ("1 is ready", "2 are ready"):
            store.append_metrics({"step": 1, "version": 1, **ROW})
            waits = {"reason": f"waiting for 4 groups: {missing}", "waits_for": "groups"}
            dead_end = {"dead_end": "no generator is alive: start one"}
            store.report_role("learner", {"role": "learner", "state": "ready", **waits, **dead_end})
            view.show(monitor.poll())
    return output.getvalue()


def test_a_dead_end_is_printed_once():
    lines = show_dead_end(is_terminal=False).splitlines()
    assert lines.count("dead end: no generator is alive: start one") == 1


def test_the_panel_shows_a_dead_end():
    assert "dead end: no generator is alive: start one" in show_dead_end(is_terminal=True)


def test_before_the_first_step_each_change_of_the_waits_is_printed_once():
    monitor, store = make_monitor()
    output = io.StringIO()
    view = LiveView(make_run(), console=Console(file=output, width=120))
    for _ in range(2):
        view.show(monitor.poll())
    waits = {"state": "ready", "reason": "loading", "waits_for": "weights"}
    for state in ("ready", "ready", "gone"):
        store.report_role("generator-0", {"role": "generator"} | waits | {"state": state})
        view.show(monitor.poll())
    assert output.getvalue().splitlines() == [
        "starting: no role waits",
        "starting: generator-0: loading",
        "starting: no role waits",
    ]


@pytest.mark.parametrize("value", ["fast", float("nan"), [1]])
def test_gauges_that_are_no_numbers_are_left_out(value: object):
    monitor, store = make_monitor()
    gauges = dict.fromkeys(("tokens_per_s", "running", "max_concurrency", "progressed_at"), value)
    store.report_role("generator-0", {"role": "generator", "state": "ready"} | gauges)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    view = LiveView(make_run(), console=console)
    with view.shown():
        view.show(monitor.poll())
    (role,) = role_statuses(store.roles(), run=make_run(), now=store.now(), announced_version=0)
    assert (role.tokens_per_s, role.running, role.progress_age_s) == (None, None, None)
