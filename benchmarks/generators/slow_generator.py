"""Cost of a slow generator: seconds per batch of a fast generator alone, and together with one many times slower.

Real broker over ZeroMQ, real generator roles with the scripted engine, and a learner that takes no time: it claims a
batch, commits it, and publishes the next version. Both fleets run in turn, with several staleness bounds and with a
concurrency of half a batch or two batches. Start-up, before the broker knows their speeds, is not measured.
"""

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import msgspec
from rich.console import Console

from benchmarks.harness import make_parser, make_table, medians, write_result
from benchmarks.router import join_run, open_store, router_thread
from slipstream.broker.messages import DeviceName, Member, OpenEpoch, Update, UpdateApplied
from slipstream.broker.transport.session import Session, StatusBoard, call_threadsafe
from slipstream.broker.weights.transport import HostBuckets
from slipstream.buffer.codec import unpack
from slipstream.buffer.pacing import Pacer
from slipstream.buffer.records import Claim, StepEntry
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.engines import ScriptedEngineConfig
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.generators.agents.runner import AgentRunner
from slipstream.generators.engines.engine import ScriptedEngine
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
"""Durations of a slow group until the slow generator's first groups have been trained on."""
_TIMEOUT_S = 120.0
_SETTINGS = [(0, 8), (0, 32), (1, 32), (4, 8)]
"""(max_lag, concurrency of each generator); a batch has 16 trajectories."""

_COLUMNS = {
    "max_lag": "{max_lag}",
    "concurrency": "{concurrency}",
    "alone, s/batch (publishing)": "{alone[batch_s]:.3f} ({alone[publishing_s]:.3f})",
    "both": "{both[batch_s]:.3f} ({both[publishing_s]:.3f})",
    "ratio": "{ratio:.3f}",
    "share of the slow one": "{both[by_slow]:.1%}",
}

console = Console(highlight=False)


class FleetRun:
    """A run over a broker in this process. Life: add_generator* -> train -> exit of the stack."""

    def __init__(self, settings: list[str], stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-"))
        common = ["generators/engine=scripted", "model.path=models/digits-gpt2", "learner.max_steps=1000000"]
        if not any(each.startswith("experiment=") for each in settings):
            common.append("experiment=digits_cpu")
        self._run = run = load([*common, f"broker.address=ipc://{folder}/broker.sock", *settings])
        # The scripted engine needs a vocabulary, but no trained model.
        untrained = [step for step in run.prepare if not step.module.endswith("warm_up")]
        prepare(msgspec.structs.replace(run, prepare=untrained))
        self._stack = stack
        self._store = stack.enter_context(open_store(run))
        self._members: list[Member] = []
        stack.enter_context(router_thread(run, self._store))
        self._learner = self._join("learner", "learner")
        self.committed_at: list[float] = []
        """Monotonic time of each step."""
        self.batches: list[list[Trajectory]] = []
        """Trajectories of each step."""
        self.publishing_s: list[float] = []
        """Time until all generators applied the version of each step."""
        self.started_at = 0.0

    def add_generator(self, name: str, engine: ScriptedEngineConfig) -> None:
        """Start a generator in its own thread."""
        board, ready = StatusBoard(), threading.Event()
        session = self._join("generator", name, board)
        self._members.append(session.member)
        generator = _generator(self._run, session, engine)
        board.set_source(generator.status)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(loop, generator, session, ready), name=name)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(loop.call_soon_threadsafe, generator.drain, "the benchmark is over")
        ready.wait(_TIMEOUT_S)

    def train(self, *, seconds: float, step_s: float = 0.0) -> None:
        """Claim, commit, and publish until `seconds` have passed. A step takes at least `step_s`."""
        self._publish(0)
        self.started_at, step, pacer = time.monotonic(), 0, Pacer(self._run)
        claimed_at = self.started_at
        while time.monotonic() < self.started_at + seconds:
            step, asked_at = step + 1, time.monotonic()
            claim = self._claim(step)
            last_claimed_at, claimed_at = claimed_at, time.monotonic()
            if pacer.record_step(
                waited_s=claimed_at - asked_at, step_s=claimed_at - last_claimed_at, num_spare=claim.num_spare
            ):
                self._store.set_target_lag(pacer.lag)
            time.sleep(step_s)
            groups = [[unpack(payload) for payload in group] for group in self._store.fetch(claim.group_ids)]
            self.batches.append([trajectory for group in groups for trajectory in group])
            ids = [[trajectory.id for trajectory in group] for group in groups]
            self._store.commit(claim, StepEntry(step, step - 1, claim.fence, 0, "", claim.group_ids, ids))
            self.committed_at.append(time.monotonic())
            used_at = time.monotonic()
            self._publish(step)
            self.publishing_s.append(time.monotonic() - used_at)

    def _join(self, role: Literal["generator", "learner"], name: str, board: StatusBoard | None = None) -> Session:
        session = join_run(self._run, role, name, board=board)
        self._stack.callback(session.thread.stop)
        return session

    def _claim(self, step: int) -> Claim:
        deadline = time.monotonic() + _TIMEOUT_S
        claim = partial(
            self._store.claim,
            step=step,
            version=step - 1,
            num_groups=self._run.learner.prompts_per_step,
            rules=SamplingRules(),
            lease_s=_TIMEOUT_S,
        )
        while not isinstance(outcome := claim(), Claim):
            if time.monotonic() > deadline:
                raise RuntimeError(f"a batch must be ready within {_TIMEOUT_S:g} s: {outcome.reason}")
            self._store.wait_ready(num_groups=self._run.learner.prompts_per_step, timeout_s=1.0)
        return outcome

    def _publish(self, version: int) -> None:
        """Publish a version without weights and wait until every generator has applied it."""
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
                timeout_s=_TIMEOUT_S,
            )
        )
        missing = set(self._members)
        while missing:
            message = self._learner.inbox.get(timeout_s=_TIMEOUT_S)
            if message is None:
                raise RuntimeError(f"version {version} must be applied within {_TIMEOUT_S:g} s, missing: {missing}")
            if isinstance(message, UpdateApplied) and message.version == version:
                missing.discard(message.member)
        self._store.commit_version(version)


class _NoBytes:
    """Implements WeightReceiver: every version arrives at once, without buckets."""

    device: DeviceName = "cpu"

    def open_epoch(self, opening: OpenEpoch, *, rank: int) -> None: ...

    def receive(self, update: Update, *, cancelled: threading.Event) -> HostBuckets:
        return HostBuckets([])

    def close(self) -> None: ...


# --- roles ---------------------------------------------------------------------------------------------------------
def _generator(run: RunConfig, session: Session, config: ScriptedEngineConfig) -> Generator:
    engine = ScriptedEngine(config)
    pool = RewardPool(msgspec.structs.replace(run.generators.reward, num_workers=0))
    agent = AgentRunner(
        run=run,
        engine=engine,
        rewards=pool,
        encoder=PromptEncoder(load_tokenizer(run.model), max_prompt_tokens=run.data.max_prompt_tokens),
        generator_id=session.member.peer_id,
    )
    return Generator(
        run=run,
        member=session.member,
        client=session.client,
        receiver=_NoBytes(),
        engine=engine,
        agent=agent,
        rewards=pool,
    )


def _serve(loop: asyncio.AbstractEventLoop, generator: Generator, session: Session, ready: threading.Event) -> None:
    session.inbox.forward_to(partial(call_threadsafe, loop, generator.receive))
    loop.call_soon(ready.set)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(generator.run())


def main(arguments: argparse.Namespace) -> None:
    """Measure both fleets in turn at each setting."""
    configure_logs("benchmark")
    slow = arguments.times * _SECONDS_PER_TOKEN
    warm_up_s = _WARM_UP_GROUPS * _TOKENS * slow
    fleets = {"alone": {"fast": _SECONDS_PER_TOKEN}, "both": {"slow": slow, "fast": _SECONDS_PER_TOKEN}}
    rows = []
    for max_lag, concurrency in _SETTINGS[: arguments.settings]:
        settings = _settings(arguments, max_lag=max_lag, concurrency=concurrency)
        measured: dict[str, list[dict[str, float]]] = {name: [] for name in fleets}
        for _ in range(arguments.rounds):
            for name, speeds in fleets.items():
                measured[name].append(_measure(speeds, settings, warm_up_s=warm_up_s, seconds=arguments.seconds))
        rows.append(_row(measured, max_lag=max_lag, concurrency=concurrency))
        write_result(arguments, {"rows": rows})
        console.print(f"max_lag {max_lag}, concurrency {concurrency}: ratio {rows[-1]['ratio']:.3f}")
    title = f"a generator {arguments.times:g} times slower, {_GROUPS_PER_STEP} groups a batch"
    console.print(make_table(rows, _COLUMNS, title=title))


def _settings(arguments: argparse.Namespace, *, max_lag: int, concurrency: int) -> list[str]:
    return [
        f"generators.group_size={_GROUP_SIZE}",
        f"generators.max_concurrency={concurrency}",
        f"learner.prompts_per_step={_GROUPS_PER_STEP}",
        f"staleness.max_lag={max_lag}",
        *arguments.overrides,
    ]


def _measure(speeds: dict[str, float], settings: list[str], *, warm_up_s: float, seconds: float) -> dict[str, float]:
    """Measure one fleet once: seconds per batch, and the slow generator's share of the trajectories."""
    with ExitStack() as stack:
        fleet = FleetRun(settings, stack)
        for name, seconds_per_token in speeds.items():
            fleet.add_generator(
                name, ScriptedEngineConfig(tokens_per_response=_TOKENS, seconds_per_token=seconds_per_token)
            )
        fleet.train(seconds=warm_up_s + seconds)
    starts_at = fleet.started_at + warm_up_s
    times = [at for at in fleet.committed_at if at >= starts_at]
    if len(times) < 2:
        raise SystemExit(f"--seconds must hold at least two batches, got {seconds:g} with {len(times)}: raise it")
    made = [trajectory.generator_id for batch in fleet.batches[-len(times) :] for trajectory in batch]
    publishing_s = statistics.mean(fleet.publishing_s[-len(times) :])
    return {
        "batch_s": (times[-1] - times[0]) / (len(times) - 1),
        "publishing_s": publishing_s,
        "by_slow": made.count("slow") / len(made),
    }


def _row(measured: dict[str, list[dict[str, float]]], *, max_lag: int, concurrency: int) -> dict[str, Any]:
    pairs = zip(measured["alone"], measured["both"], strict=True)
    ratio = statistics.median(both["batch_s"] / alone["batch_s"] for alone, both in pairs)
    row = {"max_lag": max_lag, "concurrency": concurrency, "ratio": ratio}
    return row | {name: medians(rounds) for name, rounds in measured.items()}


if __name__ == "__main__":
    parser = make_parser("benchmarks.generators.slow_generator", __doc__)
    parser.add_argument("--times", type=float, default=10.0, help="slowdown of the slow generator (10)")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one measurement, after its warm-up (8)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per fleet (3)")
    parser.add_argument("--settings", type=int, help="measure only the first N settings (all)")
    parser.add_argument("overrides", nargs="*", help="settings of the run")
    main(parser.parse_args())
