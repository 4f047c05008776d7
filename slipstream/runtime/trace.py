"""Trace: events of a role; merge: one Perfetto file of all roles; TimeAccount: seconds by phase.

Roles and profilers write to `profile/parts/` in the run folder. Times are from `time.time_ns`, so roles on one machine
share a timeline.
"""

import gzip
import os
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import psutil
import structlog

from slipstream.runtime.clock import Clock

MARKS = ("leased", "started", "generated", "scored", "stored", "claimed", "committed", "published")
"""Moments in a trajectory's life, in order."""
SPANS = ("lease", "generate", "reward", "put", "buffered", "train", "publish")
"""Spans between consecutive moments."""
PUBLISH = "publish version"
_MAX_EVENTS = 200_000
"""Events kept per role, about 30 MB; the rest is counted."""
_MAX_PROFILE_BYTES = 2**28
"""Larger torch profiles stay separate files."""

log = structlog.get_logger(__name__)


class TracePart(msgspec.Struct):
    """Events of one role."""

    role: str
    pid: int
    marks: list[tuple[str, str, int, dict[str, Any]]]
    """(mark, id of the trajectory, nanoseconds, arguments)."""
    spans: list[tuple[str, str, int, int, dict[str, Any]]]
    """(lane, name, start, duration in nanoseconds, arguments)."""
    dropped: int = 0


class Trace:
    """Records events in memory until written. Thread-safe.

    Life: (obey("events") -> (mark | span)* -> obey("end"))*. While off, a mark or span costs 0.1 microseconds.
    """

    def __init__(self, role: str, folder: Path | None = None, *, limit: int = _MAX_EVENTS) -> None:
        """`folder`: `profile` in the run folder; None writes nothing."""
        self._role = role
        self._folder = folder
        self._limit = limit
        self._events = TracePart(role, os.getpid(), [], [])
        self.is_on = False

    def obey(self, stage: str) -> None:
        """`events` starts recording, `end` writes the file."""
        if stage == "events" and not self.is_on:
            self._events, self.is_on = TracePart(self._role, os.getpid(), [], []), True
        elif stage == "end" and self.is_on:
            self.is_on = False
            try:
                draft = self._part(".new")
                draft.write_bytes(msgspec.json.encode(self._events))
                # Atomic, because the merging role polls for the file.
                draft.replace(self._part(".json"))
            except OSError as error:
                log.warning("profile_not_written", role=self._role, reason=str(error))

    def mark(self, name: str, *ids: str, at_ns: int = 0, **arguments: Any) -> None:
        if self.is_on:
            at_ns = at_ns or time.time_ns()
            for each in ids:
                if self._has_room():
                    self._events.marks.append((name, each, at_ns, arguments))

    def span(self, name: str, *, seconds: float, lane: str = "", **arguments: Any) -> None:
        """Record a span until now. Spans of a lane must not overlap."""
        if self.is_on and self._has_room():
            duration = int(1e9 * seconds)
            self._events.spans.append((lane, name, time.time_ns() - duration, duration, arguments))

    @contextmanager
    def timed(self, name: str, **arguments: Any) -> Iterator[None]:
        """Record the block as a span, in a lane of that name."""
        began_at = time.perf_counter()
        try:
            yield
        finally:
            self.span(name, seconds=time.perf_counter() - began_at, lane=name, **arguments)

    def adopt(self, profiles: Sequence[Path]) -> None:
        """Move files of torch's profiler into `profile/parts/`. Raises OSError."""
        for number, path in enumerate(profiles):
            shutil.move(path, self._part(f"-{number}.torch" if number else ".torch"))

    def _part(self, suffix: str) -> Path:
        if self._folder is None or not self._folder.parent.is_dir():
            raise FileNotFoundError(f"there is no run folder for {self._folder} on this machine")
        parts_of(self._folder).mkdir(parents=True, exist_ok=True)
        return parts_of(self._folder) / f"{self._role}{suffix}"

    def _has_room(self) -> bool:
        has_room = len(self._events.marks) + len(self._events.spans) < self._limit
        self._events.dropped += not has_room
        return has_room


def parts_of(folder: Path) -> Path:
    """Folder of unmerged events."""
    return folder / "parts"


def merge(folder: Path) -> None:
    """Merge the parts in a `profile` folder into `trace.json.gz`; delete them. Raises OSError."""
    parts = [msgspec.json.decode(path.read_bytes(), type=TracePart) for path in sorted(_files(folder, ".json"))]
    names = {f"{part.role} ({part.pid})": part for part in parts}
    pids = count(1)
    events = _trajectory_events(parts, pid=next(pids))
    for name, part in names.items():
        pid = next(pids)
        lanes = {lane: tid for tid, lane in enumerate(dict.fromkeys(span[0] for span in part.spans), start=1)}
        events += [_name("process", pid, name)]
        events += [_name("thread", pid, lane or part.role, tid) for lane, tid in lanes.items()]
        for lane, each, at, took, arguments in part.spans:
            where = {"pid": pid, "tid": lanes[lane]}
            events.append({"ph": "X", "name": each, "ts": at, "dur": took / 1000, **where, "args": arguments})
    profiles = _files(folder, ".torch")
    left = [path for path in profiles if path.stat().st_size > _MAX_PROFILE_BYTES]
    for path in left:
        path.replace(folder / f"{path.stem}.torch.json")
    for path in sorted(set(profiles) - set(left)):
        events += _profiler_events(msgspec.json.decode(path.read_bytes()), path.stem, pids)
    began_at = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            # A float cannot hold absolute microseconds with fractions.
            event["ts"] = (event["ts"] - began_at) / 1000
    dropped = {name: part.dropped for name, part in names.items() if part.dropped}
    not_merged = [f"{path.stem}.torch.json" for path in left]
    facts = {"began_at_ns": began_at, "dropped_events": dropped, "not_merged": not_merged}
    draft = folder / "trace.json.gz.new"
    with gzip.open(draft, "wb", compresslevel=4) as file:
        file.write(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}))
    draft.replace(folder / "trace.json.gz")
    shutil.rmtree(parts_of(folder))


def _files(folder: Path, suffix: str) -> list[Path]:
    return [path for path in parts_of(folder).glob("*") if path.suffix == suffix]


def _name(kind: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _trajectory_events(parts: Sequence[TracePart], *, pid: int) -> list[dict[str, Any]]:
    moments: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {}
    for mark, each, at_ns, arguments in (mark for part in parts for mark in part.marks):
        moments.setdefault(each, {}).setdefault(mark, (at_ns, arguments))
    spans = [span for part in parts for span in part.spans if span[1] == PUBLISH]
    published = sorted((each["version"], start + duration) for _, _, start, duration, each in spans)
    events = [_name("process", pid, "trajectories")]
    for each, found in moments.items():
        if committed := found.get("committed"):
            # A version that was never sent counts as published with the next.
            ended = next((end for version, end in published if version >= committed[1]["version"]), None)
            found |= {"published": (ended, {})} if ended else {}
        common = {"cat": "trajectory", "id": each, "pid": pid, "tid": 0}
        start = 0
        for name, (first, second) in zip(SPANS, pairwise(MARKS), strict=True):
            if first in found and second in found:
                # Keep times monotonic: clocks differ, and a claim may be recorded before the insert.
                start = max(start, found[first][0])
                end, arguments = max(start, found[second][0]), found[second][1]
                events.append({"ph": "b", "name": name, "ts": start, **common, "args": {"id": each, **arguments}})
                events.append({"ph": "e", "name": name, "ts": end, **common})
                start = end
    return events


def _profiler_events(profile: dict[str, Any], role: str, pids: Iterator[int]) -> list[dict[str, Any]]:
    base, own, events = int(profile.get("baseTimeNanoseconds", 0)), dict[Any, int](), []
    for event in profile["traceEvents"]:
        if event.get("pid", "") == "" or event.get("name") in ("process_name", "process_labels", "process_sort_index"):
            continue
        if event["pid"] not in own:
            own[event["pid"]] = next(pids)
            events.append(_name("process", own[event["pid"]], f"{role} torch ({event['pid']})"))
        event["pid"], at_us = own[event["pid"]], event.pop("ts", None)
        events.append(event if at_us is None or event["ph"] == "M" else event | {"ts": base + int(1000 * at_us)})
    return events


_LIST_EVERY_S = 10.0
"""Scans for child processes read the whole process table."""


class TimeAccount:
    """Seconds by phase, which sum to wall time. One thread switches; any may read `totals`.

    Example: account = TimeAccount("rest")
        with account.phase("forward"): ...       # interrupts `rest`, which resumes afterwards
    """

    def __init__(self, phase: str, *, trace: Trace | None = None, clock: Clock = time.perf_counter) -> None:
        """Measures real time even in a serial run. `trace` records each phase as a span."""
        self.trace = trace
        self._clock = clock
        self._lock = Lock()
        self._totals: dict[str, float] = {}
        self._phase = phase
        self._since = clock()

    def switch(self, phase: str) -> str:
        """Return the previous phase."""
        with self._lock:
            before = self._phase
            if phase != before:
                now = self._clock()
                self._totals[before] = self._totals.get(before, 0.0) + now - self._since
                seconds, self._phase, self._since = now - self._since, phase, now
                if self.trace and self.trace.is_on:
                    self.trace.span(before, seconds=seconds)
            return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def restart(self) -> None:
        with self._lock:
            self._totals, self._since = {}, self._clock()

    def totals(self) -> dict[str, float]:
        with self._lock:
            running = self._totals.get(self._phase, 0.0) + self._clock() - self._since
            return self._totals | {self._phase: running}

    def gauges(self) -> dict[str, float]:
        """`time/PHASE` -> seconds."""
        return {f"time/{phase}": round(seconds, 3) for phase, seconds in self.totals().items()}


class ProcessorTime:
    """CPU seconds of this process and its descendants; never decreases."""

    def __init__(self) -> None:
        self._children: list[psutil.Process] = []
        self._list_at = time.monotonic()
        self._most = 0.0

    @property
    def seconds(self) -> float:
        if time.monotonic() >= self._list_at:
            self.list_children()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = time.process_time() + ended.ru_utime + ended.ru_stime
        for child in self._children:
            # RUSAGE_CHILDREN counts ended children after they are reaped.
            with suppress(psutil.Error):
                total += sum(child.cpu_times()[:4])
        self._most = max(self._most, total)
        return self._most

    def list_children(self) -> None:
        """Scan for child processes; call it after starting one."""
        self._list_at = time.monotonic() + _LIST_EVERY_S
        with suppress(psutil.Error):
            self._children = psutil.Process().children(recursive=True)
