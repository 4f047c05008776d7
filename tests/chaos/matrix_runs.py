"""Runs of the failure matrix: one under the real launcher, observed from outside, and the light run of the harness."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from slipstream.buffer.archive.archive import Archive, whole_ledger
from slipstream.buffer.archive.index import is_archive
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.base import Record
from slipstream.runtime.credentials import TOKEN_VARIABLE
from slipstream.runtime.run_folder import parse_row
from tests import runs
from tests.chaos.acts import Acts
from tests.chaos.harness import Harness
from tests.chaos.stage import NAME as CHAOS_NAME
from tests.chaos.stage import PACES, Stage
from tests.runs import ROOT, SMALL, processes_of

_NAME = "matrix"
_SETTINGS = (
    *(word for word in SMALL if not word.startswith("generators")),
    # Not the scripted engine, because its answers are not samples of the policy, and a guest would be expelled.
    *("generators/engine=hf", "model.path=models/tiny", "model.lora.rank=4", "broker.shards=2", "generators.count=2"),
    *("learner.prompts_per_step=16", "cluster.untrusted_generators.names=[guest]", "learner.max_steps=100000"),
    f"name={_NAME}",
)
_DIGITS = ("--task=reverse", "--digits=5", "--out=data/digits")
_TINY = ("--layers=1", "--width=32", "--out=models/tiny")
_DISKS = {"runs": "192m", "tmp": "4m"}
"""Folder -> size of the separate disk that it gets, if this process may mount one."""
_SITE = """
import os, time
def _shifted(read, scale):
    def shifted():
        try:
            return read() + int(open(os.environ["CHAOS_CLOCK"]).read()) * scale
        except (OSError, ValueError):
            return read()
    return shifted
time.time, time.time_ns = _shifted(time.time, 1), _shifted(time.time_ns, 10**9)
"""
"""A sitecustomize module that sets Python's clock ahead by the seconds in a file. Redis keeps the machine's clock."""
START_TIMEOUT_S = 150.0
STEP_TIMEOUT_S = 120.0
"""Longest wait for a step after a failure: longer than the lease of an abandoned claim."""
END_TIMEOUT_S = 30.0
_LEFT_TIMEOUT_S = 8.0
_TICK_S = 0.1
_LAST_STEPS = 5
_TAIL_BYTES = 1 << 18
_DRAFTS = ("**/draft*", "**/*.new", "**/*.tmp", "sockets/*")
"""Patterns of files that only a running process needs."""


class Loss(Record):
    """Damage found by an audit. Example: Loss(lost=0, duplicated=0, problems=[])."""

    lost: int = 0
    duplicated: int = 0
    """Trajectories in two places, and groups trained on twice."""
    problems: list[str] = []


class Scene:
    """A run in which failures are caused. Life: start -> (failure -> revive -> wait -> read_books)* -> close."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def take_leftovers(self) -> list[str]:
        left, self._left = self._left, []
        return left


class LaunchedRun(Scene):
    """A run under `run_async.py`, observed from outside."""

    def __init__(self, folder: Path, _: int) -> None:
        super().__init__()
        self.folder = folder
        self.path = folder / "runs" / _NAME
        self.launcher: subprocess.Popen[bytes] | None = None
        self._guest: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Build the run. Raises TimeoutError."""
        for name, size in _DISKS.items():
            (self.folder / name).mkdir()
            if can_mount():
                mount("-t", "tmpfs", "-o", f"size={size}", "none", self.folder / name)
        (self.folder / "site").mkdir()
        (self.folder / "site" / "sitecustomize.py").write_text(_SITE)
        runs.run_script(self.folder, "slipstream.scripts.make_digits_data", *_DIGITS)
        runs.run_script(self.folder, "slipstream.scripts.init_random_model", *_TINY)
        self.revive()
        if not self.wait(lambda: self.step > 0, timeout_s=START_TIMEOUT_S):
            raise TimeoutError(f"a first step must be made within {START_TIMEOUT_S:g} s, last line: {self.last_line}")

    def launch(self, *overrides: str, prefix: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        environment = {"TMPDIR": f"{self.folder}/tmp", "CHAOS_CLOCK": f"{self.folder}/clock", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = f"{self.folder}/site:{ROOT}"
        command = [*prefix, *runs.command(*_SETTINGS, "resume=auto", *overrides)]
        return self._start("launcher", command, environment, start_new_session=True)

    def _start(self, name: str, command: list[str], environment: dict[str, str], **more: bool) -> Any:
        with (self.folder / f"{name}.log").open("ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            return subprocess.Popen(command, cwd=self.folder, env=os.environ | environment, **streams, **more)

    @property
    def printed(self) -> str:
        log = self.folder / "launcher.log"
        return log.read_text(errors="replace") if log.exists() else ""

    @property
    def last_line(self) -> str:
        return (self.printed.strip().splitlines() or ["(nothing)"])[-1]

    @property
    def is_running(self) -> bool:
        return self.launcher is not None and self.launcher.poll() is None

    @property
    def step(self) -> int:
        with suppress(OSError), (self.path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            rows = [row for line in file.read().splitlines(keepends=True) if (row := parse_row(line))]
            return rows[-1]["step"] if rows else 0
        return 0

    def wait(self, is_met: Callable[[], bool], *, timeout_s: float) -> bool:
        """Watch the run until the condition holds; return whether it did in time."""
        ends_at = time.monotonic() + timeout_s
        while not is_met():
            if time.monotonic() > ends_at:
                return False
            token = self.path / "guests" / "guest"
            if self.is_running and token.exists() and (self._guest is None or self._guest.poll() is not None):
                self._guest = self._start_guest(token.read_text().strip())
            time.sleep(_TICK_S)
        return True

    def _start_guest(self, token: str) -> "subprocess.Popen[bytes]":
        address = f"broker.address=ipc://{self.path}/sockets/broker.sock"
        command = [sys.executable, "-m", "slipstream.generators", address, "runs_dir=elsewhere"]
        environment = {TOKEN_VARIABLE: token, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return self._start("guest", command, environment)

    def revive(self) -> str:
        """Resume an ended run as a user would; return how it ended, or an empty string."""
        if self.is_running:
            return ""
        ended = self.last_line if self.launcher else ""
        self.launcher = self.launch()
        return ended

    def process(self, role: str) -> psutil.Process:
        if role == "store":
            return psutil.Process(int((self.path / "store" / "redis.pid").read_text()))
        with closing(self.open_store()) as store:
            return psutil.Process(int(store.roles()[role]["pid"]))

    def open_store(self) -> RedisStore:
        return open_run_store(self.path, timeout_s=END_TIMEOUT_S)

    def stop(self) -> None:
        """Ask the launcher to end, and record processes that are left behind."""
        for process in (self.launcher, self._guest):
            if process is None:
                continue
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._left.append(f"process that ignores SIGTERM: {' '.join(map(str, process.args))[:80]}")
                runs.kill_tree(process)
        self.launcher = None
        self.wait(lambda: not processes_of(self.folder), timeout_s=_LEFT_TIMEOUT_S)
        self._left += [f"process {each.pid}: {' '.join(each.cmdline()[:4])}" for each in processes_of(self.folder)]
        runs.kill_processes_of(self.folder)

    def close(self) -> Loss:
        """Resume the run, let it finish, and audit it. Files that remain afterwards count as left behind."""
        self.stop()
        try:
            self.launcher = self.launch(f"learner.max_steps={self.step + _LAST_STEPS}")
            self.wait(lambda: not self.is_running, timeout_s=START_TIMEOUT_S)
            problems = [] if self.launcher.poll() == 0 else [f"the run must finish, last line: {self.last_line}"]
            self.stop()
            files = [path for pattern in _DRAFTS for path in self.path.glob(pattern)]
            files += [path for path in (self.folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]
            self._left += [str(path.relative_to(self.folder)) for path in files]
            with closing(open_run_store(self.path, timeout_s=END_TIMEOUT_S, starts_server=True)) as store:
                loss, counts = read_books(store, self.path / "archive"), store.counts()
            archive = Archive(self.path / "archive")
            check, steps = archive.check(), [entry.step for entry in archive.steps()]
            writers = {stored.trajectory.generator_id for stored in archive.read()}
            problems += [*loss.problems, *check.problems]
            problems += [f"the ledger must hold every step once, got {steps}"] * (steps != [*range(1, len(steps) + 1)])
            problems += [f"nothing may be unarchived, got {counts.unarchived}"] * bool(counts.unarchived)
            problems += ["the launcher printed a traceback"] * ("Traceback (most recent" in self.printed)
            problems += [f"the guest must have answered, got {sorted(writers)}"] * ("guest" not in writers)
            return Loss(loss.lost + check.missing, loss.duplicated + check.duplicated, problems)
        finally:
            shutil.copytree(self.path / "logs", self.folder / "logs", dirs_exist_ok=True)
            for name in _DISKS:
                if (self.folder / name).is_mount():
                    subprocess.run(["umount", "-l", self.folder / name], check=False)


class LightRun(Scene):
    def __init__(self, folder: Path, num_rows: int) -> None:
        super().__init__()
        stage = Stage(folder, seed=0, steps=max(12, 4 * num_rows), pace=PACES["light"])
        self.harness = Harness(stage, num_generators=3, is_cold=False)
        self.acts = Acts(self.harness, seed=0)
        self.wait = self.harness.poll_until

    def start(self) -> None:
        self.harness.stage.build()
        self.harness.start(timeout_s=START_TIMEOUT_S)

    @property
    def step(self) -> int:
        return self.harness.newest_step

    def revive(self) -> str:
        return ""

    @property
    def last_line(self) -> str:
        return self.harness.last_lines

    @property
    def path(self) -> Path:
        return self.harness.stage.run_folder

    def open_store(self) -> RedisStore:
        return open_run_store(self.harness.stage.store.url, CHAOS_NAME, timeout_s=END_TIMEOUT_S)

    def close(self) -> Loss:
        try:
            outcome, problems = self.harness.verdict(timeout_s=STEP_TIMEOUT_S)
        finally:
            self.harness.end()
        checkpoints = self.path / "checkpoints"
        self._left = [f"process {each.pid}" for each in processes_of(self.harness.stage.folder)]
        self._left += [str(path) for path in checkpoints.glob("draft*")]
        return Loss(outcome.audit.lost, outcome.audit.duplicated, problems) if outcome else Loss(problems=problems)


def read_books(store: RedisStore, archive: Path) -> Loss:
    """Audit a store, live or not: every trajectory in one place, every group trained on once."""
    audit = runs.audited(store, archive)
    ledger = whole_ledger(store, Archive(archive) if is_archive(archive) else None)
    uses = Counter(group for entry in ledger for group in entry.group_ids)
    again = [group for group, times in uses.items() if times > 1]
    problems = [*audit.problems, *(f"group {group} was trained on {uses[group]} times" for group in again[:3])]
    return Loss(audit.lost + audit.skipped_prompts, audit.duplicated + len(again), problems)


@cache
def can_mount() -> bool:
    # In a separate namespace, which ends with the program.
    attempt = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", tempfile.gettempdir()]
    return subprocess.run(attempt, capture_output=True, check=False).returncode == 0


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)
