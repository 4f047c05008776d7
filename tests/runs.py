"""Whole runs and their roles as processes, started as a user starts them, in a folder of their own."""

import atexit
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from slipstream.buffer.accounting import Audit, StoreCounts
from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.index import is_archive
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import RunState
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.store import Store
from slipstream.cli import main
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.run import read_config
from slipstream.observe.run_status import Monitor
from slipstream.runtime.trace import SPANS

ROOT = Path(__file__).parents[1]
RANDOM = ("prepare=[]", "model.path=models/digits-random")
SMALL = (
    *("experiment=digits_cpu", "generators/engine=scripted", "generators.engine.seconds_per_token=0.02"),
    *("learner/engine=torch", *RANDOM, "learner.prompts_per_step=4", "evaluation.stop=null"),
    *("learner.checkpoint.every_steps=5", "evaluation.every_steps=0", "evaluation.num_prompts=2"),
    "evaluation.num_final_prompts=4",
)
"""Overrides of a run with the scripted engine, a random model and small steps."""
FEW = (
    *("learner.prompts_per_step=4", "evaluation.every_steps=0"),
    *("evaluation.num_prompts=4", "evaluation.num_final_prompts=8"),
)


def make_task(folder: Path, *, warm: bool) -> Path:
    """Data of the default task, a random Qwen2 and, if `warm`, the default model. Returns `folder`."""
    shutil.copytree(_made_task(warm=warm), folder, dirs_exist_ok=True)
    return folder


@cache
def _made_task(*, warm: bool) -> Path:
    """Made once in a process, as most tests of whole runs need it and it takes seconds."""
    folder = Path(tempfile.mkdtemp(prefix="task-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run_script(folder, "slipstream.scripts.make_digits_data", "--task=reverse", "--digits=5", "--out=data/digits")
    run_script(folder, "slipstream.scripts.init_random_model", "--out=models/digits-random")
    if warm:
        for step in load([]).prepare[1:]:
            run_script(folder, step.module, *step.args)
    return folder


def run_script(folder: Path, module: str, *arguments: str) -> None:
    done = call([sys.executable, "-m", module, *arguments], folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


def exit_code(*words: object) -> int:
    """Run a command of `slipstream` in this process; returns its exit code."""
    try:
        main([*map(str, words)])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def call(
    command: Sequence[str], folder: Path, *, timeout_s: float = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a folder, with variables added to the environment."""
    variables = os.environ | environment
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def start(log: Path, command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a command in a folder; its output is appended to `log`."""
    with log.open("a") as output:
        variables = os.environ | environment
        return subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output, text=True)


class Call(NamedTuple):
    """A program for `call_each`: Call("slipstream.generators.__main__", ("--id", "stranger"))."""

    module: str
    """Module with a function `main(arguments)`."""
    arguments: tuple[str, ...]
    folder: str = "."
    token: str | None = None


_CALL_EACH = """
import importlib, json, os, sys, traceback
calls = json.load(sys.stdin)
modules = [importlib.import_module(call[0]) for call in calls]
for module in sys.argv[1:]:
    importlib.import_module(module)
for number, (module, (_, arguments, folder, token)) in enumerate(zip(modules, calls)):
    if (pid := os.fork()) == 0:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"call-{number}.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
        os.chdir(folder)
        os.environ |= {} if token is None else {"SLIPSTREAM_TOKEN": token}
        code = 0
        try:
            module.main(arguments)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def call_each(
    calls: dict[str, Call], folder: Path, *, imports: Sequence[str] = (), **environment: str
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run programs one after the other, each in a fork of one process that has imported their modules and `imports`."""
    words, given = [sys.executable, "-c", _CALL_EACH, *imports], json.dumps([*calls.values()])
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    printed = subprocess.run(words, input=given, cwd=folder, env=variables, capture_output=True, text=True, timeout=280)
    assert printed.returncode == 0, printed.stderr
    ends = {}
    for number, (name, code) in enumerate(zip(calls, printed.stdout.split(), strict=True)):
        texts = [(folder / f"call-{number}.{end}").read_text() for end in ("out", "err")]
        ends[name] = subprocess.CompletedProcess(calls[name].arguments, int(code), *texts)
    return ends


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "run_async.py"), *overrides]


def train(folder: Path, *overrides: str, timeout_s: float = 240) -> str:
    """Run to the end; returns the output."""
    done = call(command(*overrides), folder, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / name / "summary.json").read_text())


def status(folder: Path, name: str) -> dict[str, Any]:
    """The record that `slipstream status --json` prints, without starting Python; no roles without a store."""
    path = folder / "runs" / name
    try:
        with open_run_store(path, timeout_s=1) as store:
            return msgspec.to_builtins(Monitor(store, read_config(path)).status(), str_keys=True)
    except (ConfigError, ReplayBufferError):
        return {"roles": []}


def assert_traced(folder: Path, name: str, *, steps: Iterable[int], per_step: int, processes: Sequence[str]) -> None:
    """The trace of a run loads, all tracks have names, and the trajectories of these steps have all spans in order."""
    with gzip.open(folder / "runs" / name / "profile" / "trace.json.gz") as file:
        trace = json.load(file)
    events = trace["traceEvents"]
    assert trace["otherData"]["dropped_events"] == {}
    titled = [each for each in events if each["ph"] == "M" and "name" in each["args"]]
    named = {(each["name"], each["pid"], each["tid"]): each["args"]["name"] for each in titled}
    titles = {title for (kind, _, _), title in named.items() if kind == "process_name"}
    for process in processes:
        assert any(title.startswith(process) for title in titles), (process, titles)
    for each in events:
        assert ("process_name", each["pid"], 0) in named, each
        if each["ph"] == "X" and isinstance(each["tid"], int):
            assert ("thread_name", each["pid"], each["tid"]) in named, each
    spans: dict[str, list[tuple[str, str, float]]] = {}
    trained: dict[str, int] = {}
    for each in (each for each in events if each.get("cat") == "trajectory"):
        spans.setdefault(each["id"], []).append((each["ph"], each["name"], each["ts"]))
        if each["ph"] == "b" and each["name"] == "train" and each["args"]["step"] in steps:
            trained[each["id"]] = each["args"]["step"]
    assert Counter(trained.values()) == dict.fromkeys(steps, per_step)
    for found in (spans[each] for each in trained):
        assert [(ph, span) for ph, span, _ in found] == [(ph, span) for span in SPANS for ph in "be"], found
        times = [ts for _, _, ts in found]
        assert times == sorted(times)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes whose working directory is in the test's folder: roles, engine cores, store."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def assert_none_left(folder: Path) -> None:
    """Fail if a process of the folder does not end within seconds; those that watch a store end just after it."""
    until(lambda: processes_of(folder) == [], timeout_s=5, what="the end of all processes")


def kill_processes_of(folder: Path) -> None:
    """Kill the processes whose working directory is in `folder`."""
    for process in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def kill_tree(process: "subprocess.Popen[Any]") -> None:
    """Kill a process with its descendants: a store outlives the process that started it."""
    with suppress(psutil.NoSuchProcess):
        for each in (root := psutil.Process(process.pid)).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        root.kill()
    process.wait(timeout=10)


class Run:
    """A run under the launcher, observed from outside."""

    def __init__(
        self, folder: Path, name: str, *overrides: str, base: Sequence[str] = SMALL, **environment: str
    ) -> None:
        self.folder, self.name, self.path = folder, name, folder / "runs" / name
        self._printed = folder / f"{name}.out"
        self.launcher = start(self._printed, command(*base, f"name={name}", *overrides), folder, **environment)

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    @property
    def steps(self) -> int:
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def log(self, role: str) -> str:
        return (self.path / "logs" / f"{role}.log").read_text()

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command on this run, in this process, because Python takes seconds to start."""
        out, errors = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(errors):
            code = exit_code(*words, f"name={self.name}", f"runs_dir={self.path.parent}")
        return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())

    def until(self, reached: Callable[[], object], *, timeout_s: float = 120.0) -> None:
        """Wait for something that the run does before it ends."""

        def is_reached() -> object:
            assert self.launcher.poll() is None, self.printed[-3000:]
            return reached()

        until(is_reached, timeout_s=timeout_s, what=f"this, after {self.printed[-3000:]}")

    def role(self, module: str) -> psutil.Process:
        """The process that a keeper of the launcher started as `python -m module`."""
        keepers = psutil.Process(self.launcher.pid).children()
        roles = [role for keeper in keepers for role in keeper.children()]
        (found,) = [role for role in roles if role.cmdline()[1:3] == ["-m", module]]
        return found

    def engine(self) -> psutil.Process | None:
        """vLLM's process, once it runs: forked by a server that the generator forked, or started with a title."""
        generator = self.role("slipstream.generators")
        for each in generator.children(recursive=True):
            words = each.cmdline()
            if "EngineCore" in " ".join(words) or (words == generator.cmdline() and each.ppid() != generator.pid):
                return each
        return None

    def await_end(self, *, timeout_s: float = 150) -> int:
        return self.launcher.wait(timeout=timeout_s)

    @contextmanager
    def ended_at_last(self) -> Iterator["Run"]:
        try:
            yield self
        finally:
            self.launcher.terminate()
            try:
                self.launcher.wait(timeout=15)
            finally:
                kill_tree(self.launcher)


def until(condition: Callable[[], object], *, what: str, timeout_s: float = 20.0) -> float:
    """Poll until the condition holds. Returns the monotonic time."""
    ends_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic()


def has_stepped(run: Run, steps: int) -> Callable[[], bool]:
    return lambda: run.steps >= steps or run.launcher.poll() is not None


def audited(store: Store, archive: Path) -> Audit:
    """Audit of a store, with the part of its ledger that is in the archive, if any."""
    return store.audit(archived=Archive(archive).steps if is_archive(archive) else list)


def left_behind(run: Run) -> tuple[StoreCounts, RunState, Audit]:
    """Counts, state and audit of a finished run, read from its store."""
    server = EmbeddedRedis(run.path / "store")
    server.start()
    try:
        store = open_run_store(server.url, run.name, timeout_s=10)
        return store.counts(), store.run_state(), audited(store, run.path / "archive")
    finally:
        server.stop()


def assert_reconciled(run: Run) -> None:
    counts, state, audit = left_behind(run)
    assert audit.is_sound, audit
    # Every prompt ever admitted is in exactly one place; open groups are those of leased and returned prompts.
    placed = counts.leased + counts.returned + counts.ready + counts.claimed + counts.used
    assert counts.admitted == placed + counts.outcomes["retired"]
    assert counts.outcomes == {"retired": 4 * state.step}
    assert counts.refused == {}


def assert_all_steps_once(run: Run, steps: int) -> None:
    assert [row["step"] for row in metrics(run.path.parents[1], run.name)] == list(range(1, steps + 1))


def start_role(folder: Path, role: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `python -m slipstream.ROLE`; its output is in `by-hand-ROLE….log`."""
    words = [role, *(word for word in arguments if "=" not in word and word != "--id")]
    log = folder / f"by-hand-{'-'.join(words)}.log"
    log.unlink(missing_ok=True)
    return start(log, [sys.executable, "-m", f"slipstream.{role}", *arguments], folder)


def end(roles: Sequence["subprocess.Popen[Any]"]) -> None:
    """Press Ctrl-C in every terminal, in the broker's last: the others send it a Bye."""
    for role in sorted(roles, key=lambda role: "slipstream.broker" in role.args):
        role.send_signal(signal.SIGINT)
        try:
            role.wait(timeout=15)
        except subprocess.TimeoutExpired:
            kill_tree(role)
