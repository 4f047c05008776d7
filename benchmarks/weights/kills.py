"""Cost of a killed generator to the others: many SIGKILLs at random moments of publishing in one run.

Real broker, publisher, Gloo broadcasts, and generator processes with the scripted engine. The learner only publishes
random weights every few tenths of a second and measures how long each call blocks it.
"""

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import make_parser, write_result
from benchmarks.router import join_run, open_store, router_thread
from slipstream.broker.weights.collective import CollectiveSender
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.launch.preflight import prepare
from slipstream.learner.publishing.fetches import SnapshotServer
from slipstream.learner.publishing.publisher import BackgroundPublisher, Publisher
from slipstream.learner.publishing.staging import Stager
from slipstream.runtime.credentials import derive_keys, make_token
from slipstream.runtime.run_folder import RunFolder

_STEP_S = 0.3
_CALM_STEPS = 20
_START_S = 120.0
_NEXT_VERSION_S = 60.0
_CANARY = ([[1, 2, 3]], [[-1.0, -1.0]])

console = Console(highlight=False)


class GeneratorProcesses:
    """Numbered generator processes that can be killed and restarted."""

    def __init__(self, run: RunConfig, *, count: int, logs: Path) -> None:
        folder = RunFolder(run)
        self._overrides = (f"broker.address={folder.broker_address}", f"broker.token_file={folder.token}")
        self._logs = logs
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(count):
            self.start(number)

    def start(self, number: int) -> None:
        """Start a new process under this number."""
        with (self._logs / f"generator-{number}.log").open("ab") as log:
            command = [sys.executable, "-m", "slipstream.generators", "--id", f"generator-{number}", *self._overrides]
            self._processes[number] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, number: int) -> None:
        """Kill a process with SIGKILL and reap it."""
        self._processes[number].send_signal(signal.SIGKILL)
        self._processes[number].wait()

    def close(self) -> None:
        for number in self._processes:
            self.kill(number)


class PublishingLearner:
    """A learner that only publishes, and times each call."""

    def __init__(self, publishing: BackgroundPublisher, weights: list[tuple[str, torch.Tensor]]) -> None:
        self._publishing = publishing
        self._weights = weights
        self.version = -1
        self.blocked_s: list[float] = []
        """Duration of each `publish` call."""

    def step(self) -> Any:
        """Publish, handle messages, pause; return the outcome of a publish that has completed."""
        self.version += 1
        started_at = time.perf_counter()
        self._publishing.publish(version=self.version, step=self.version, weights=self._weights, canary=_CANARY)
        self.blocked_s.append(time.perf_counter() - started_at)
        self._publishing.sync_members(timeout_s=_STEP_S)
        return self._publishing.take_published()

    def until(self, num_members: int, *, after_version: int, timeout_s: float) -> float:
        """Step until `num_members` hold a version above `after_version`; return the time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            published = self.step()
            if published and published.version > after_version and published.num_members >= num_members:
                return time.monotonic()
        raise TimeoutError(f"{num_members} generators must hold a new version within {timeout_s:g} s")


def main(arguments: argparse.Namespace) -> None:
    """Measure publishing without kills, then with kills."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        run = load(
            [
                "generators/engine=scripted",
                "staleness.max_lag=1000000",
                "staleness.target_lag=1000000",
                f"broker.address=ipc://{folder}/broker.sock",
                *arguments.overrides,
            ]
        )
        prepare(run)
        store = stack.enter_context(open_store(run))
        stack.enter_context(router_thread(run, store))
        # Finishing: no prompts are leased, only weights are sent.
        store.set_phase("finishing")
        processes = GeneratorProcesses(run, count=arguments.generators, logs=folder)
        stack.callback(processes.close)
        learner = _learner(run, stack, snapshot_store=SnapshotStore(folder / "weights"), mib=arguments.mib)
        learner.until(arguments.generators, after_version=-1, timeout_s=_START_S)
        _print_table(_measure(learner, processes, arguments), arguments)


def _measure(
    learner: PublishingLearner, processes: GeneratorProcesses, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    rng, others = random.Random(arguments.seed), arguments.generators - 1
    for _ in range(_CALM_STEPS):
        learner.step()
    seconds: dict[str, list[float]] = {
        "calm_s": learner.blocked_s[-_CALM_STEPS:],
        "next_s": [],
        "stall_s": [],
        "back_s": [],
    }
    for kill in range(1, arguments.kills + 1):
        victim = rng.randrange(arguments.generators)
        first_call = len(learner.blocked_s)
        killed_at = _kill(processes, victim, learner, delay_s=rng.uniform(0, 2 * _STEP_S))
        next_at = learner.until(others, after_version=learner.version, timeout_s=_NEXT_VERSION_S)
        seconds["next_s"].append(next_at - killed_at)
        seconds["stall_s"].append(max(learner.blocked_s[first_call:]))
        started_at = time.monotonic()
        processes.start(victim)
        seconds["back_s"].append(learner.until(others + 1, after_version=-1, timeout_s=_START_S) - started_at)
        console.print(f"kill {kill}: next version after {seconds['next_s'][-1]:.2f} s")
        write_result(arguments, seconds)
    return seconds


def _kill(processes: GeneratorProcesses, victim: int, learner: PublishingLearner, *, delay_s: float) -> float:
    """Kill a generator `delay_s` from now, while the learner continues; return the time."""
    killed_at: list[float] = []

    def strike() -> None:
        killed_at.append(time.monotonic())
        processes.kill(victim)

    timer = threading.Timer(delay_s, strike)
    timer.start()
    while timer.is_alive():
        learner.step()
    return killed_at[0]


def _learner(run: RunConfig, stack: ExitStack, *, snapshot_store: SnapshotStore, mib: int) -> PublishingLearner:
    session = join_run(run, "learner", "learner")
    stack.callback(session.thread.stop)
    sender = CollectiveSender(device="cpu")
    snapshots = SnapshotServer(snapshot_store, StreamServer(snapshot_store, keys=derive_keys(make_token(run))))
    publisher = Publisher(
        client=session.client, inbox=session.inbox, sender=sender, snapshots=snapshots, config=run.weights
    )
    store = stack.enter_context(open_store(run))
    store.open_run(run.name, config_json="{}", num_rows=1, seed=0)
    weights = torch.randn(mib * 2**18)
    stager = Stager(run.weights, metadata=[("weights", weights.shape, weights.dtype)])
    publishing = BackgroundPublisher(publisher, stager, store, in_background=True)
    stack.callback(publishing.close)
    return PublishingLearner(publishing, [("weights", weights)])


def _print_table(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    table = Table("", "median", "longest", title=f"{arguments.kills} kills, {arguments.mib} MiB of weights")
    names = {
        "next_s": "from SIGKILL to a new version with all others, s",
        "stall_s": "longest publish() call around a kill, s",
        "calm_s": "publish() call without a kill, s",
        "back_s": "from the start of a generator to a version with it, s",
    }
    for key, name in names.items():
        table.add_row(name, f"{statistics.median(result[key]):.3f}", f"{max(result[key]):.3f}")
    console.print(table)


if __name__ == "__main__":
    parser = make_parser("benchmarks.weights.kills", __doc__)
    parser.add_argument("--kills", type=int, default=20, help="number of kills (20)")
    parser.add_argument("--generators", type=int, default=3, help="number of generators (3)")
    parser.add_argument("--mib", type=int, default=64, help="size of the weights, MiB (64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of kill times and victims (0)")
    parser.add_argument("overrides", nargs="*", help="settings of the run")
    main(parser.parse_args())
