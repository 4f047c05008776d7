"""What a slow generator costs a run: seconds per batch of a fast generator alone, and beside one many times slower.

python -m benchmarks.generators.slow_generator [--times N] [--seconds N] [--rounds N] [--out FILE.json] [override ...]

Real broker over ZeroMQ, real generator roles with the scripted engine, a learner that takes no time: it claims a batch,
commits it and has everybody adopt the next version. Both fleets in turn within one run, at several bounds of staleness
and at a concurrency that holds half a batch, or two. The start, in which speeds are not known yet, is left out.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.router_thread import routing
from slipstream.broker.messages import Member, Update, UpdateApplied
from slipstream.broker.transport.session import Session, StatusBoard, join
from slipstream.buffer.codec import unpack
from slipstream.buffer.memory.store import MemoryStore
from slipstream.buffer.records import Claim, StepEntry
from slipstream.buffer.sampling import SamplingRules
from slipstream.configs.generators import ScriptedEngineConfig
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.single_turn import SingleTurn
from slipstream.generators.engines.scripted_engine import ScriptedEngine
from slipstream.generators.generator import Generator
from slipstream.generators.rewards.pool import RewardPool
from slipstream.generators.tokenization import PromptEncoder, load_tokenizer
from slipstream.launch.preflight import prepare
from slipstream.runtime.logs import configure_logs

_GROUPS_PER_STEP = 8
_GROUP_SIZE = 2
_TOKENS = 10
_SECONDS_PER_TOKEN = 0.05
_WARM_UP_GROUPS = 3
"""Group times of the slow generator until its first groups are back and their place in the queue is used."""
_PATIENCE_S = 120.0
_SETTINGS = [(0, 8), (0, 32), (1, 32), (4, 8)]
"""Bound of staleness, trajectories a generator runs together; a batch has 16."""

console = Console(highlight=False)


class FleetRun:
    """A run over a broker in this process. Life: enter generators -> train -> leave with the stack."""

    def __init__(self, run: RunConfig, stack: ExitStack) -> None:
        self._run = run
        self._stack = stack
        self._store = MemoryStore()
        self._members: list[Member] = []
        stack.enter_context(routing(run, self._store))
        self._learner = self._join("learner", "learner", StatusBoard())
        self.committed_at: list[float] = []
        """When each step was, monotonic seconds."""
        self.made_by: list[Counter[str]] = []
        """Trajectories of each step, by generator."""
        self.publishing_s: list[float] = []
        """How long it took until everybody had adopted the version of each step."""
        self.started_at = 0.0
        """When training began."""

    def enter(self, name: str, *, seconds_per_token: float) -> None:
        """Start a generator of this speed in a thread of its own."""
        board, ready = StatusBoard(), threading.Event()
        joined = self._join("generator", name, board)
        self._members.append(joined.member)
        generator = _generator(self._run, joined, seconds_per_token=seconds_per_token)
        board.set_source(generator.status)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(loop, generator, joined, ready), name=name)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(loop.call_soon_threadsafe, generator.drain, "the benchmark is over")
        ready.wait(_PATIENCE_S)

    def train(self, *, seconds: float) -> None:
        """Claim, commit and publish for so long."""
        self._publish(0)
        self.started_at, step = time.monotonic(), 0
        while time.monotonic() < self.started_at + seconds:
            step += 1
            self._use(self._claim(step))
            used_at = time.monotonic()
            self._publish(step)
            self.publishing_s.append(time.monotonic() - used_at)

    def _join(self, role: Any, name: str, board: StatusBoard) -> Session:
        broker = self._run.broker
        limits = {"max_message_bytes": broker.max_message_bytes, "timeout_s": _PATIENCE_S}
        joined = join(role, address=broker.address, peer_id=name, status=board, **limits)
        self._stack.callback(joined.thread.stop)
        return joined

    def _claim(self, step: int) -> Claim:
        deadline = time.monotonic() + _PATIENCE_S
        asked = {"step": step, "version": step - 1, "num_groups": _GROUPS_PER_STEP, "lease_s": _PATIENCE_S}
        while not isinstance(claim := self._store.claim(rules=SamplingRules(), **asked), Claim):
            if time.monotonic() > deadline:
                raise RuntimeError(f"a batch must be ready within {_PATIENCE_S:g} s: {claim.reason}")
            self._store.wait_ready(num_groups=_GROUPS_PER_STEP, timeout_s=1.0)
        return claim

    def _use(self, claim: Claim) -> None:
        groups = [[unpack(payload) for payload in group] for group in self._store.fetch(claim.group_ids)]
        self.made_by.append(Counter(trajectory.generator_id for group in groups for trajectory in group))
        ids = [[trajectory.id for trajectory in group] for group in groups]
        self._store.commit(claim, StepEntry(claim.step, claim.step - 1, claim.fence, 0, "", claim.group_ids, ids))
        self.committed_at.append(time.monotonic())

    def _publish(self, version: int) -> None:
        """A version without weights; everybody adopts it."""
        self._store.announce_version(version)
        self._learner.client.send(
            Update(
                epoch=1,
                members=self._members,
                version=version,
                slots=[],
                bucket_bytes=[],
                checksums=[],
                canary_token_ids=[[1, 2]],
                canary_logprobs=[[-1.0]],
                max_probe_diff=1e-3,
                timeout_s=_PATIENCE_S,
            )
        )
        missing = set(self._members)
        while missing:
            message = self._learner.inbox.get(timeout_s=_PATIENCE_S)
            if message is None:
                raise RuntimeError(f"version {version} must be adopted within {_PATIENCE_S:g} s, missing: {missing}")
            if isinstance(message, UpdateApplied) and message.version == version:
                missing.discard(message.member)
        self._store.commit_version(version)


# --- roles ---------------------------------------------------------------------------------------------------------
def _generator(run: RunConfig, joined: Session, *, seconds_per_token: float) -> Generator:
    engine = ScriptedEngine(ScriptedEngineConfig(tokens_per_response=_TOKENS, seconds_per_token=seconds_per_token))
    reward = run.generators.reward
    pool = RewardPool(reward.function, reward.arguments, num_workers=0, timeout_s=reward.timeout_s)
    agent = SingleTurn(
        run=run,
        engine=engine,
        rewards=pool,
        encoder=PromptEncoder(load_tokenizer(run.model), max_prompt_tokens=run.data.max_prompt_tokens),
        generator_id=joined.member.peer_id,
    )
    return Generator(run=run, member=joined.member, client=joined.client, engine=engine, agent=agent, rewards=pool)


def _serve(loop: asyncio.AbstractEventLoop, generator: Generator, joined: Session, ready: threading.Event) -> None:
    joined.inbox.forward_to(partial(loop.call_soon_threadsafe, generator.receive))
    loop.call_soon(ready.set)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(generator.run())


def main(arguments: argparse.Namespace) -> None:
    """Measure and show."""
    configure_logs("benchmark")
    slow = arguments.times * _SECONDS_PER_TOKEN
    warm_up_s = _WARM_UP_GROUPS * _TOKENS * slow
    fleets = {"alone": {"fast": _SECONDS_PER_TOKEN}, "both": {"slow": slow, "fast": _SECONDS_PER_TOKEN}}
    rows = []
    for max_lag, together in _SETTINGS:
        settings = _settings(arguments, max_lag=max_lag, together=together)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in fleets}
        for _ in range(arguments.rounds):
            for name, speeds in fleets.items():
                found[name].append(_measure(speeds, settings, warm_up_s=warm_up_s, seconds=arguments.seconds))
        rows.append(_row(found, max_lag=max_lag, together=together))
        console.print(f"max_lag {max_lag}, {together} together: ratio {rows[-1]['ratio']:.3f}")
    _show(rows, arguments)


def _settings(arguments: argparse.Namespace, *, max_lag: int, together: int) -> list[str]:
    return [
        "generators/engine=scripted",
        f"generators.group_size={_GROUP_SIZE}",
        f"generators.max_concurrency={together}",
        f"learner.groups_per_step={_GROUPS_PER_STEP}",
        f"buffer.staleness.max_lag={max_lag}",
        "learner.max_steps=1000000",
        *arguments.overrides,
    ]


def _measure(speeds: dict[str, float], settings: list[str], *, warm_up_s: float, seconds: float) -> dict[str, float]:
    """One fleet, once: seconds per batch, and the share of the slow generator."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slow-"))
        run = load([*settings, f"broker.address=ipc://{folder}/broker.sock"])
        prepare(run)
        fleet = FleetRun(run, stack)
        for name, seconds_per_token in speeds.items():
            fleet.enter(name, seconds_per_token=seconds_per_token)
        fleet.train(seconds=warm_up_s + seconds)
    starts_at = fleet.started_at + warm_up_s
    times = [at for at in fleet.committed_at if at >= starts_at]
    by_slow = sum(makers["slow"] for makers in fleet.made_by[-len(times) :]) / (
        len(times) * _GROUPS_PER_STEP * _GROUP_SIZE
    )
    publishing_s = statistics.mean(fleet.publishing_s[-len(times) :])
    return {"batch_s": (times[-1] - times[0]) / (len(times) - 1), "publishing_s": publishing_s, "by_slow": by_slow}


def _row(found: dict[str, list[dict[str, float]]], *, max_lag: int, together: int) -> dict[str, float]:
    alone, both = ([each["batch_s"] for each in found[name]] for name in ("alone", "both"))
    return {
        "max_lag": max_lag,
        "together": together,
        "alone_s": statistics.median(alone),
        "both_s": statistics.median(both),
        "ratio": statistics.median(b / a for a, b in zip(alone, both, strict=True)),
        "alone_publishing_s": statistics.median(each["publishing_s"] for each in found["alone"]),
        "both_publishing_s": statistics.median(each["publishing_s"] for each in found["both"]),
        "by_slow": statistics.median(each["by_slow"] for each in found["both"]),
    }


def _show(rows: list[dict[str, float]], arguments: argparse.Namespace) -> None:
    title = f"a generator {arguments.times:g} times slower, {_GROUPS_PER_STEP} groups a batch"
    table = Table("max_lag", "together", "alone, s/batch", "both, s/batch", "ratio", "by the slow one", title=title)
    table.caption = "s/batch: with what publishing takes of it"
    for row in rows:
        times = (f"{row[f'{name}_s']:.3f} ({row[f'{name}_publishing_s']:.3f})" for name in ("alone", "both"))
        table.add_row(f"{row['max_lag']}", f"{row['together']}", *times, f"{row['ratio']:.3f}", f"{row['by_slow']:.1%}")
    console.print(table)
    if arguments.out:
        machine = {"cores": os.cpu_count(), "load_average": psutil.getloadavg()}
        settings = {name: getattr(arguments, name) for name in ("times", "seconds", "rounds")}
        arguments.out.write_text(json.dumps({"machine": machine, "settings": settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=10.0, help="how many times slower the slow one is")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round, after its warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("overrides", nargs="*")
    main(parser.parse_args())
