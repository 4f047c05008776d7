"""Trace, merge, TimeAccount, and ProcessorTime."""

import gzip
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from slipstream.runtime.clock import Growth, Rate
from slipstream.runtime.trace import MARKS, PUBLISH, SPANS, ProcessorTime, TimeAccount, Trace, merge, parts_of
from tests.cases import cases
from tests.fakes import FakeClock, no_file_above


def merged(folder: Path) -> dict[str, Any]:
    merge(folder)
    with gzip.open(folder / "trace.json.gz") as file:
        return json.load(file)


def complete(folder: Path, each: str, *, version: int = 3) -> None:
    """Have three roles record the whole life of a trajectory."""
    names = {"leased": "broker", "stored": "broker", "claimed": "learner", "committed": "learner"}
    roles = {name: Trace(name, folder) for name in ("broker", "generator-0", "learner")}
    for role in roles.values():
        role.obey("events")
    for number, mark in enumerate(MARKS[:-1]):
        arguments = {"step": 7, "version": version} if mark == "committed" else {}
        roles[names.get(mark, "generator-0")].mark(mark, each, at_ns=10**18 + 1000 * number, **arguments)
    with roles["learner"].timed(PUBLISH, version=version):
        pass
    for role in roles.values():
        role.obey("end")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "profile"


def test_the_spans_of_a_trajectory_follow_each_other_under_its_id(folder: Path) -> None:
    complete(folder, "1-0-3")
    events = [event for event in merged(folder)["traceEvents"] if event.get("cat") == "trajectory"]
    assert [(event["ph"], event["name"]) for event in events] == [(ph, name) for name in SPANS for ph in "be"]
    assert {event["id"] for event in events} == {"1-0-3"}
    assert [event["ts"] for event in events[:6]] == [0, 1, 1, 2, 2, 3]
    assert events[10]["args"] == {"id": "1-0-3", "step": 7, "version": 3}
    assert not parts_of(folder).exists()


@cases(
    "role, mark, changed, missing",
    # A claim that was recorded before the insert does not turn time back.
    ("broker", r'(?<="stored","1-0-3",)\d+', str(10**18 + 10**5), ()),
    # Without a moment, the spans beside it are left out.
    ("generator-0", r',\["scored"[^]]*\]', "", ("reward", "put")),
    # A version that was replaced arrives with the next.
    ("learner", r'(?<={)"version":3}]]', '"version":5}]]', ()),
)
def test_marks_that_are_late_or_lacking_and_a_version_that_was_replaced(folder, role, mark, changed, missing) -> None:
    complete(folder, "1-0-3")
    path = parts_of(folder) / f"{role}.json"
    text, count = re.subn(mark, changed, path.read_text())
    assert count == 1
    path.write_text(text)
    events = [event for event in merged(folder)["traceEvents"] if event.get("cat") == "trajectory"]
    assert [event["name"] for event in events if event["ph"] == "b"] == [name for name in SPANS if name not in missing]
    times = [event["ts"] for event in events]
    assert times == sorted(times)


def test_phases_of_a_role_are_slices_of_its_track(folder: Path) -> None:
    trace = Trace("learner", folder)
    account = TimeAccount("rest", trace=trace)
    trace.obey("events")
    with account.phase("batch"), account.phase("compute"):
        time.sleep(0.01)
    trace.obey("end")
    events = merged(folder)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in slices] == ["rest", "batch", "compute", "batch"]
    assert slices[2]["dur"] >= 10_000
    ends = [event["ts"] + event["dur"] for event in slices]
    assert all(end <= later["ts"] + 200 for end, later in zip(ends, slices[1:], strict=False))
    named = [event for event in events if event["ph"] == "M"]
    names = {(event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in named}
    for event in slices:
        assert names["process_name", event["pid"], 0].startswith("learner (")
        assert names["thread_name", event["pid"], event["tid"]] == "learner"


def test_a_trace_of_torch_is_merged_on_the_same_clock_under_its_own_name(folder: Path, tmp_path: Path) -> None:
    trace = Trace("learner", folder)
    trace.obey("events")
    began_ns = time.time_ns()
    trace.span("compute", seconds=0.0)
    profile = {
        "baseTimeNanoseconds": began_ns - 5_000_000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 12, "tid": 0, "ts": 1, "args": {"name": "python"}},
            {"ph": "X", "name": "aten::mm", "pid": 12, "tid": 12, "ts": 5000.0, "dur": 7.5, "args": {}},
        ],
    }
    (tmp_path / "made.json").write_text(json.dumps(profile))
    trace.adopt([tmp_path / "made.json"])
    trace.obey("end")
    events = merged(folder)["traceEvents"]
    matmul, compute = (next(e for e in events if e["name"] == name) for name in ("aten::mm", "compute"))
    assert abs(matmul["ts"] - compute["ts"]) < 1_000_000, "1 s of a busy machine"
    assert matmul["dur"] == 7.5
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names[matmul["pid"]] == "learner torch (12)"


def test_events_beyond_the_limit_are_counted_only(folder: Path) -> None:
    trace = Trace("broker", folder, limit=3)
    trace.obey("events")
    trace.mark("leased", *"abcde")
    trace.span("idle", seconds=1.0)
    trace.obey("end")
    found = merged(folder)
    assert list(found["otherData"]["dropped_events"].values()) == [3]


def test_a_full_disk_or_another_machine_costs_the_file_only(folder: Path, tmp_path: Path) -> None:
    elsewhere = Trace("generator-0", tmp_path / "no-run" / "profile")
    for trace in (elsewhere, Trace("generator-1", folder)):
        trace.obey("events")
        trace.mark("leased", *map(str, range(1000)))
        with no_file_above(1024):
            trace.obey("end")
        assert not trace.is_on
    assert not list(parts_of(folder).glob("*.json"))


def test_a_trace_that_is_off_costs_next_to_nothing_and_keeps_nothing(folder: Path) -> None:
    trace, began_at = Trace("broker", folder), time.process_time()
    for _ in range(100_000):
        trace.mark("leased", "1-0-3")
    assert (time.process_time() - began_at) / 100_000 < 5e-6
    trace.obey("end")
    assert not folder.exists()


def test_the_phases_sum_to_the_wall_time_and_interrupt_each_other_and_a_restart_forgets_them() -> None:
    clock = FakeClock()
    account = TimeAccount("rest", clock=clock)
    for seconds, phase in ((1.0, "waiting"), (2.0, "training"), (4.0, "waiting")):
        clock.now += seconds
        account.switch(phase)
    clock.now += 8.0
    assert account.totals() == {"rest": 1.0, "waiting": 10.0, "training": 4.0}
    account.restart()
    clock.now += 0.5
    assert account.totals() == {"waiting": 0.5}
    assert account.gauges() == {"time/waiting": 0.5}
    account = TimeAccount("rest", clock=clock)

    def train() -> None:
        clock.now += 1.0
        with account.phase("optimizer"):
            clock.now += 2.0
            with account.phase("optimizer"):
                clock.now += 4.0
        clock.now += 8.0
        raise ValueError

    with pytest.raises(ValueError), account.phase("training"):
        train()
    clock.now += 16.0
    assert account.totals() == {"training": 9.0, "optimizer": 6.0, "rest": 16.0}


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


def test_a_rate_is_over_the_window_and_growth_that_of_all_counters_also_of_those_that_vanish_or_restart():
    clock = FakeClock()
    rate = Rate(window_s=5.0, clock=clock)
    clock.now += 2
    rate.add(10.0)
    assert rate.per_s == 5.0
    clock.now += 6
    rate.add(20.0)
    assert (rate.per_s, rate.total) == (4.0, 30.0)
    growth = Growth({"a": 500.0, "b": 10.0})
    growth.update({"a": 700.0, "b": 10.0, "new": 100.0})
    assert growth.total == 300.0
    growth.update({"b": 30.0})
    growth.update({"a": 40.0, "b": 30.0})
    growth.update({"a": 45.0})
    assert growth.total == 300.0 + 20.0 + 40.0 + 5.0


def test_reading_a_rate_from_two_threads_drops_each_event_once():
    asking: list[Thread] = []

    class Moment(float):
        """While it is compared for the first time, another thread asks too."""

        def __lt__(self, other: float) -> bool:
            if not asking:
                asking.append(Thread(target=lambda: rate.per_s))
                asking[0].start()
                asking[0].join(timeout=0.1)
            return float(self) < other

    clock = FakeClock()
    rate = Rate(window_s=5.0, clock=lambda: Moment(clock.now))
    rate.add(1.0)
    clock.now += 10
    assert rate.per_s == 0.0
    asking[0].join(timeout=10)
    assert not asking[0].is_alive()
