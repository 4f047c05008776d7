"""`python -m tests.chaos --matrix`: cause one failure after another in real runs, and record what each one costs.

Most rows share one run under the real launcher: two brokers, two generators, a guest, the embedded store, and a real
learner that trains a LoRA adapter of a tiny model. The rows of kill -9 share a light run of `acts`, whose learner is
scripted and whose journals are audited. Every row audits the store; the end of a run also audits the archive.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from docs.tools.write_docs import Block, filled
from slipstream.buffer.errors import ReplayBufferError
from slipstream.configs.base import Record
from tests import runs
from tests.chaos import matrix_runs
from tests.chaos.matrix_runs import LaunchedRun, LightRun, Loss, can_mount, mount, read_books
from tests.runs import ROOT, processes_of

_PAGE = Path("docs/reliability.md")
_TEST = "`tests/integration/test_chaos.py::test_every_failure_of_the_matrix_is_survived`"


class Row(NamedTuple):
    """One failure. Example: Row("SIGSTOP of the learner", "launched", partial(_stopped, role="learner"), hold_s=30)."""

    name: str
    scene: str
    failure: Callable[[Any], AbstractContextManager[list[str] | None]]
    """Causes the failure when entered and undoes it when left; may yield problems."""
    hold_s: float = 0.0
    ends: str = ""
    """Expected part of the error that ends the run; empty if the run must continue."""
    finds: str = ""
    """Finding that the failure itself must produce."""
    needs_mounts: bool = False


class Result(Record):
    """Cost of one failure. Example: Result("full disk: /tmp", outcome="continues", next_step_s=0.4)."""

    name: str
    outcome: str = ""
    """Behavior of the run, or the reason for which the row was skipped."""
    loss: Loss = Loss()
    left: list[str] = []
    next_step_s: float | None = None
    """Time from undoing the failure to the next step."""
    is_stuck: bool = False

    @property
    def is_sound(self) -> bool:
        return not (self.loss.lost or self.loss.duplicated or self.loss.problems or self.left)


@contextmanager
def _full(run: LaunchedRun, folder: str) -> Iterator[None]:
    ballast = run.folder / folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def _read_only(run: LaunchedRun) -> Iterator[None]:
    mount("--bind", run.path, run.path)
    mount("-o", "remount,bind,ro", run.path)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", run.path], check=True)


@contextmanager
def _few_descriptors(run: LaunchedRun) -> Iterator[None]:
    """No process of the run can open another file, socket, or pipe."""
    limits = {}
    for process in processes_of(run.folder):
        limits[process] = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), limits[process][1]))
    yield
    for process, limit in limits.items():
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_NOFILE, limit)


@contextmanager
def _started_with_few_descriptors(run: LaunchedRun) -> Iterator[None]:
    run.stop()
    run.launcher = run.launch(prefix=["prlimit", "--nofile=32"])
    _await_verdict(run)
    yield


@contextmanager
def _shifted_clock(run: LaunchedRun, seconds: int) -> Iterator[None]:
    (run.folder / "clock").write_text(str(seconds))
    yield
    (run.folder / "clock").write_text("0")


@contextmanager
def _stopped(run: LaunchedRun, role: str) -> Iterator[None]:
    process = run.process(role)
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _await_verdict(run: LaunchedRun) -> None:
    step = run.step
    run.wait(lambda: not run.is_running or run.step > step, timeout_s=matrix_runs.START_TIMEOUT_S)


@contextmanager
def _corrupted_shard(run: LaunchedRun) -> Iterator[list[str]]:
    run.stop()
    shard = max(run.path.glob("archive/shard-*"), key=_changed_at)
    _flip_a_bit(shard)
    verify = runs.command("data", "verify", str(shard.parent))
    done = subprocess.run(verify, cwd=run.folder, capture_output=True, text=True, timeout=60, check=False)
    _flip_a_bit(shard)
    is_found = done.returncode == 1 and shard.name in done.stdout
    yield [] if is_found else [f"data verify must name {shard.name}, got {done.returncode}: {done.stdout[-200:]}"]


@contextmanager
def _corrupted_checkpoint(run: LaunchedRun) -> Iterator[None]:
    run.stop()
    weights = max(run.path.glob("checkpoints/step-*/**/*.safetensors"), key=_changed_at)
    _flip_a_bit(weights)
    run.launcher = run.launch()
    _await_verdict(run)
    _flip_a_bit(weights)
    yield


def _changed_at(path: Path) -> float:
    return path.stat().st_mtime


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextmanager
def _torn_metrics(run: LaunchedRun) -> Iterator[None]:
    run.stop()
    metrics = run.path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40] + bytes(20))
    yield


@contextmanager
def _two_launchers(run: LaunchedRun) -> Iterator[list[str]]:
    """Two start at the same time, and a third while the winner runs."""
    problems: list[str] = []
    run.stop()
    pair = [run.launch(), run.launch()]
    run.wait(lambda: any(each.poll() is not None for each in pair), timeout_s=matrix_runs.START_TIMEOUT_S)
    run.launcher = next((each for each in pair if each.poll() is None), None)
    third = run.launch()
    run.wait(lambda: third.poll() is not None, timeout_s=matrix_runs.START_TIMEOUT_S)
    if run.printed.count("must have one launcher") != 2 or not run.is_running:
        problems.append(f"two of three launchers must be refused, last line: {run.last_line}")
    yield problems


@contextmanager
def _interrupted(run: LaunchedRun) -> Iterator[None]:
    """Ctrl-C every 0.5 s until the launcher has ended, beginning at six times within its first 30 s."""
    for delay_s in (0.5, 1.0, 2.0, 5.0, 10.0, 20.0):
        run.stop()
        run.launcher = launcher = run.launch()
        run.wait(lambda: False, timeout_s=delay_s)
        ends_at = time.monotonic() + matrix_runs.END_TIMEOUT_S
        while launcher.poll() is None and time.monotonic() < ends_at:
            os.killpg(launcher.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(0.5)
    # The guest, which the launcher does not own, ends with the run; the launcher's last line is still unread.
    run.stop()
    run.launcher = launcher
    yield


@contextmanager
def _killed_at(run: LightRun, role: str, point: str) -> Iterator[list[str]]:
    run.acts.missed.clear()
    run.acts.die(role, point)
    yield [f"the {role} must come to {point}"] * bool(run.acts.missed)


_AHEAD, _BEHIND = partial(_shifted_clock, seconds=3600), partial(_shifted_clock, seconds=-3600)
_STOPPED = ("store", "broker", "broker-1", "learner", "generator-0", "guest")
_POINTS = {
    "learner": "before_claim after_claim in_step before_commit after_commit in_broadcast before_seal before_merge "
    "before_pointer before_retire",
    "broker": "before_shard before_forget",
}
ROWS = [
    Row("Ctrl-C every 0.5 s, from six times in the first 30 s on", "launched", _interrupted, ends="interrupted"),
    Row("two launchers at once, and a third", "launched", _two_launchers, finds="two are refused"),
    Row("start with 32 file descriptors", "launched", _started_with_few_descriptors, ends="ulimit -n"),
    Row("no file descriptor left in any process, 15 s", "launched", _few_descriptors, 15),
    Row("full disk: run folder, 15 s", "launched", partial(_full, folder="runs"), 15, needs_mounts=True),
    Row("full disk: /tmp, 10 s", "launched", partial(_full, folder="tmp"), 10, needs_mounts=True),
    Row("read-only run folder, 15 s", "launched", _read_only, 15, needs_mounts=True),
    Row("wall clock of all roles one hour ahead, and back", "launched", _AHEAD, 10),
    Row("wall clock of all roles one hour behind, and back", "launched", _BEHIND, 10),
    *(Row(f"SIGSTOP of {role}, 30 s", "launched", partial(_stopped, role=role), 30) for role in _STOPPED),
    Row("flipped bit in a shard", "launched", _corrupted_shard, finds="`data verify` names it"),
    Row("flipped bit in a checkpoint", "launched", _corrupted_checkpoint, ends="must have the checksum"),
    Row("torn row of metrics", "launched", _torn_metrics),
    *(
        Row(f"kill -9 of {role} at {point}", "light", partial(_killed_at, role=role, point=point))
        for role, points in _POINTS.items()
        for point in points.split()
    ),
]
_SCENES = {"launched": LaunchedRun, "light": LightRun}


def play_matrix(*, only: str, write: bool) -> int:
    """Play all rows, or those whose name matches `only`; returns 0 when nothing was lost, duplicated, or left."""
    rows = [row for row in ROWS if re.search(only, row.name)]
    console, began_at = Console(width=140), time.monotonic()
    results = []
    for scene, group in groupby(rows, key=attrgetter("scene")):
        results += _play_scene(_SCENES[scene], list(group), console)
    _show(results, console)
    num_problems = sum(len(result.loss.problems) for result in results)
    seconds = time.monotonic() - began_at
    console.print(f"{len(results)} rows in {seconds:.0f} s, {num_problems} problems", highlight=False)
    if write and not only:
        block = Block(str(_PAGE), "matrix", lambda: _as_markdown(results))
        (ROOT / _PAGE).write_text(filled((ROOT / _PAGE).read_text(), block))
    return 0 if results and all(result.is_sound for result in results) else 1


def _play_scene(make: Callable[[Path, int], Any], rows: Sequence[Row], console: Console) -> list[Result]:
    """Play rows on one run; start another run after a row that the run does not recover from."""
    results: list[Result] = []
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    run = make(folder, len(rows))
    try:
        run.start()
        for row in rows:
            results.append(_play(row, run))
            console.print(f"{row.name}: {results[-1].outcome}", highlight=False)
            if results[-1].is_stuck:
                break
    finally:
        end = _close(run, name=f"end of the {rows[0].scene} run: archive, ledger, everything left")
        runs.kill_processes_of(folder)
    if end.is_sound and all(result.is_sound for result in results):
        shutil.rmtree(folder)
    else:
        console.print(f"logs are in {folder}", highlight=False)
    later = rows[len(results) :]
    return [*results, end, *(_play_scene(make, later, console) if later else [])]


def _play(row: Row, run: Any) -> Result:
    if row.needs_mounts and not can_mount():
        return Result(row.name, "skipped: only root can mount a disk of its own")
    before = run.step
    try:
        with row.failure(run) as found:
            run.wait(lambda: False, timeout_s=row.hold_s)
        ended, step, undone_at = run.revive(), max(before, run.step), time.monotonic()
        problems = list(found or [])
        if row.ends not in ended or (ended and not row.ends):
            expected = f"end with {row.ends!r}" if row.ends else "continue"
            problems.append(f"the run must {expected}, got {ended or 'a run that continues'}")
        if not run.wait(lambda: run.step > step, timeout_s=matrix_runs.STEP_TIMEOUT_S):
            problems.append(f"no step within {matrix_runs.STEP_TIMEOUT_S:g} s, {run.last_line}")
            return Result(row.name, "stands still", Loss(problems=problems), run.take_leftovers(), is_stuck=True)
        next_step_s = time.monotonic() - undone_at
        with closing(run.open_store()) as store:
            loss = read_books(store, run.path / "archive")
    except (ReplayBufferError, OSError, subprocess.SubprocessError, psutil.Error, KeyError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}, {run.last_line}"
        return Result(row.name, "failed", Loss(problems=[problem]), run.take_leftovers(), is_stuck=True)
    outcome = f"ends with one line ({row.ends}), then resumed" if ended else "continues"
    loss = Loss(loss.lost, loss.duplicated, [*loss.problems, *problems])
    parts = [outcome, row.finds] if row.finds else [outcome]
    return Result(row.name, "; ".join(parts), loss, run.take_leftovers(), next_step_s)


def _close(run: Any, *, name: str) -> Result:
    try:
        return Result(name, "audited", run.close(), run.take_leftovers())
    except (ReplayBufferError, OSError, psutil.Error) as error:
        return Result(name, "failed", Loss(problems=[f"{type(error).__name__}: {error}"]), run.take_leftovers())


def _cells(result: Result) -> list[str]:
    step = "-" if result.next_step_s is None else f"{result.next_step_s:.1f} s"
    left = "; ".join(result.left) or "nothing"
    return [result.name, result.outcome, str(result.loss.lost), str(result.loss.duplicated), left, step]


def _show(results: Sequence[Result], console: Console) -> None:
    table = Table("failure", "the run", "lost", "duplicated", "left behind", "next step")
    for result in results:
        table.add_row(*_cells(result))
    console.print(table)
    for result in results:
        for problem in result.loss.problems:
            console.print(f"problem: {result.name}: {problem}", markup=False, highlight=False, soft_wrap=True)


def _as_markdown(results: Sequence[Result]) -> str:
    rows = [f"| {' | '.join(cell.replace('|', '/') for cell in _cells(result))} | {_TEST} |" for result in results]
    head = "| attack | the run | lost | duplicated | left behind | next step | test |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])
