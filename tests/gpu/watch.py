"""Runs tests in child processes under kill timeouts: a test that hangs or crashes ends with its name, and the rest run.

pytest's own timeout needs Python's interpreter, which a test that blocks in C++ never returns to.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.gpu.reporter import EVENTS_VARIABLE

ROOT = Path(__file__).parents[2]
_START_S = 180.0
"""From the start of a process to its first test: imports."""
_POLL_S = 0.1
_DUMP_S = 5.0
"""For a killed process to write the tracebacks of its threads."""


@dataclass
class Test:
    """A collected test: Test("tests/gpu/test_probe.py::test_every_part", 200.0)"""

    __test__ = False
    name: str
    limit_s: float
    own_process: bool = False

    @property
    def kill_s(self) -> float:
        """Time until it is killed; pytest fails it earlier, with a traceback, if Python still runs."""
        return self.limit_s + max(2.0, 0.1 * self.limit_s)


@dataclass
class Outcome:
    """Outcome("tests/gpu/test_probe.py::test_every_part", "passed", 3.2)"""

    name: str
    verdict: str
    """passed, FAILED, skipped, TIMEOUT, CRASHED, or NOT RUN."""
    seconds: float = 0.0
    message: str = ""
    log: str = ""
    """File with the output, in the folder of the report."""

    @property
    def is_good(self) -> bool:
        return self.verdict in ("passed", "skipped")

    def __str__(self) -> str:
        line = f"{self.verdict:<8} {self.seconds:6.1f} s  {self.name}"
        return line + (f"\n{'':20}{self.message} [{self.log}]" if self.message else "")


@dataclass
class Watched:
    """A pytest process, and what its reporter wrote so far."""

    process: "subprocess.Popen[bytes]"
    events: Path
    tests: dict[str, Test]
    current: str = ""
    since: float = field(default_factory=time.monotonic)
    _read: int = 0

    def new_events(self) -> list[dict[str, object]]:
        lines = self.events.read_text().splitlines(keepends=True) if self.events.exists() else []
        whole = [line for line in lines[self._read :] if line.endswith("\n")]
        self._read += len(whole)
        return [json.loads(line) for line in whole]

    @property
    def ends_at(self) -> float:
        return self.since + (self.tests[self.current].kill_s if self.current else _START_S)


def kill_descendants() -> list[str]:
    """Kill everything that child processes left behind; returns their command lines."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:150])
            process.kill()
            process.wait(timeout=10)
    return found


def run_command(command: Sequence[str], log: Path, *, timeout_s: float) -> str:
    """Run a command with its output in `log` and killed at the limit; returns what went wrong, or nothing."""
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=timeout_s,
                check=False,
            )
            end = _describe(done.returncode) if done.returncode else ""
        except subprocess.TimeoutExpired:
            end = f"killed after {timeout_s:.0f} s"
        except OSError as error:
            end = str(error)
            output.write(f"{end}\n".encode())
    kill_descendants()
    return end


def collect(paths: Sequence[str], folder: Path) -> tuple[list[Test], list[Outcome]]:
    """Collect the tests of these paths; also returns the files that cannot be imported."""
    log = folder / "collect.log"
    events = folder / "collect.events"
    process = _start_pytest(["--collect-only", "-q", *paths], log, events)
    broken: list[Outcome] = []
    try:
        code = process.wait(timeout=_START_S)
        # 5: no tests; 2: some files are broken, which are named below.
        problem = "" if code in (0, 2, 5) else _describe(code)
    except subprocess.TimeoutExpired:
        problem = f"killed after {_START_S:.0f} s"
        _dump_and_kill(process)
    kill_descendants()
    watched = Watched(process, events, {})
    tests = []
    for event in watched.new_events():
        if event["event"] == "collected":
            tests.append(Test(str(event["test"]), float(str(event["limit_s"])), bool(event["own_process"])))
        elif event["event"] == "broken":
            broken.append(Outcome(str(event["test"]), "FAILED", message=str(event["message"]), log=log.name))
    if problem or not (tests or broken):
        broken.append(Outcome(" ".join(paths), "CRASHED", message=problem or "no tests", log=log.name))
    return tests, broken


def run_tests(tests: Sequence[Test], folder: Path, *, ends_at: float, show: Callable[[Outcome], None]) -> list[Outcome]:
    """Run the tests of a file in one process, continuing in a new one after a test that hangs or crashes.

    `ends_at`: monotonic time after which no process goes on. `show`: called with each outcome as it comes.
    """
    left, outcomes, number = list(tests), [], 0
    while left and time.monotonic() < ends_at:
        batch = _first_batch(left)
        number += 1
        stem = f"{Path(batch[0].name.split('::')[0]).stem}-{number}"
        found = _run_batch(batch, folder / stem, ends_at=ends_at, show=show)
        outcomes += found
        done = {each.name for each in found}
        left = [test for test in left if test.name not in done]
    for test in left:
        outcomes.append(Outcome(test.name, "NOT RUN", message="no time was left"))
        show(outcomes[-1])
    return outcomes


def _first_batch(tests: Sequence[Test]) -> list[Test]:
    if tests[0].own_process:
        return [tests[0]]
    file = tests[0].name.split("::")[0]
    return [test for test in tests if test.name.split("::")[0] == file and not test.own_process]


def _run_batch(batch: Sequence[Test], stem: Path, *, ends_at: float, show: Callable[[Outcome], None]) -> list[Outcome]:
    log, events = stem.with_suffix(".log"), stem.with_suffix(".events")
    watched = Watched(
        _start_pytest(["-vv", *(test.name for test in batch)], log, events), events, {test.name: test for test in batch}
    )
    outcomes: dict[str, Outcome] = {}
    killed = ""
    while True:
        code = watched.process.poll()
        _take_events(watched, outcomes, log=log, show=show)
        if code is not None:
            break
        if time.monotonic() >= min(ends_at, watched.ends_at):
            killed = f"killed after {time.monotonic() - watched.since:.0f} s"
            killed += "" if watched.current else " in its imports"
            killed += ", the end of this stage" if time.monotonic() >= ends_at else ""
            _dump_and_kill(watched.process)
            break
        time.sleep(_POLL_S)
    left_behind = kill_descendants()
    if left_behind:
        with log.open("a") as output:
            output.write("\n".join(["left behind, and killed:", *left_behind, ""]))
    name = watched.current or next((test.name for test in batch if test.name not in outcomes), "")
    if name and (killed or len(outcomes) < len(batch)):
        message = killed or _describe(watched.process.returncode)
        if said := last_nccl_message(log):
            message += f"; NCCL: {said}"
        seconds = time.monotonic() - watched.since
        outcomes[name] = Outcome(name, "TIMEOUT" if killed else "CRASHED", seconds, message, log.name)
        show(outcomes[name])
    return list(outcomes.values())


def _take_events(watched: Watched, outcomes: dict[str, Outcome], *, log: Path, show: Callable[[Outcome], None]) -> None:
    """Update what runs and what has ended."""
    for event in watched.new_events():
        name = str(event.get("test"))
        if event["event"] == "start":
            watched.current, watched.since = name, time.monotonic()
        elif event["event"] == "result" and not (name in outcomes and outcomes[name].verdict == "FAILED"):
            verdict = {"passed": "passed", "failed": "FAILED", "skipped": "skipped"}[str(event["outcome"])]
            outcomes[name] = Outcome(name, verdict, message=str(event["message"]), log=log.name)
        elif event["event"] == "end" and name in outcomes:
            outcomes[name].seconds = time.monotonic() - watched.since
            watched.current, watched.since = "", time.monotonic()
            show(outcomes[name])


def _start_pytest(arguments: Sequence[str], log: Path, events: Path) -> "subprocess.Popen[bytes]":
    # Uncaptured, because what a killed process has captured is lost.
    options = ["--capture=no", "--tb=long", "--showlocals", "--no-summary", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-p", "tests.gpu.reporter", f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), "--timeout=200"]
    variables = os.environ | {
        EVENTS_VARIABLE: str(events),
        # Not on stdout, which some tests read.
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "INFO"),
        "NCCL_DEBUG_FILE": str(log.with_suffix(".nccl.%p")),
        "TORCH_SHOW_CPP_STACKTRACES": "1",
    }
    output: IO[bytes]
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *arguments],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _dump_and_kill(process: "subprocess.Popen[bytes]") -> None:
    """Let faulthandler write the tracebacks of all threads, which works within C++, then kill the process."""
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_DUMP_S)
    process.kill()
    process.wait(timeout=10)


def _describe(code: int) -> str:
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def last_nccl_message(log: Path) -> str:
    """The last line that NCCL wrote in the processes of this log, warnings first; empty without one."""
    files = sorted(log.parent.glob(f"{log.stem}.nccl.*"), key=lambda file: file.stat().st_mtime)
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    warnings = [line for line in lines if re.search(r"\bNCCL WARN\b", line)]
    return (warnings or lines or [""])[-1].strip()
