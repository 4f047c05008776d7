"""The learner's side: a bare DeepSpeed loop, Trainer.step, and the whole step with the store, in turn, on equal data.

Consumes: overrides of a run on the command line, how long, how often.
Produces: one JSON line on standard output.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import msgspec
import torch
from transformers import AutoTokenizer

from benchmarks.overhead.bare_loop import BareLoop
from benchmarks.overhead.command import side_arguments
from benchmarks.overhead.rounds import alternate, summarise
from benchmarks.overhead.trajectories import AnswerSheet
from slipstream.broker.dataset import Dataset
from slipstream.buffer.codec import pack, unpack
from slipstream.buffer.records import Claim, make_entry
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import SamplingRules
from slipstream.buffer.trajectory import Trajectory, lag_histogram
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.learner import ClaimKeeper
from slipstream.learner.metrics.log import MetricsLog
from slipstream.learner.publishing.publisher import Published
from slipstream.learner.publishing.staging import Staged, Stager
from slipstream.learner.ranks import join_ranks
from slipstream.learner.training.trainer import Trainer
from slipstream.runtime.run_folder import RunFolder

_PATIENCE_S = 60.0
_UNLIMITED = 10**9


class LearnerStep:
    """Everything the learner does in a step but the broadcast, with a stopwatch on each part."""

    def __init__(self, run: RunConfig, *, trainer: Trainer, store: RedisStore, folder: RunFolder) -> None:
        self._run = run
        self._trainer = trainer
        self._store = store
        self._stager = Stager(run.weights, wire_dtype=getattr(torch, run.model.dtype))
        self._staged: Staged | None = None
        self._record = MetricsLog(run, folder=folder, store=store)
        self._record.start_training(step=0)
        self._answers = AnswerSheet(run, AutoTokenizer.from_pretrained(run.model.path))
        self._step = 0
        self.times: dict[str, list[float]] = {}
        """Seconds of each part, one number a step."""

    def fill(self, *, num_groups: int) -> list[list[Trajectory]]:
        """Put complete groups into the store; returns them."""
        run = self._run
        leases = self._store.lease(
            owner="benchmark",
            max_groups=num_groups,
            group_size=run.generators.group_size,
            lease_s=_PATIENCE_S,
            admission_limit=_UNLIMITED,
        )
        groups = [self._answers.answer(lease) for lease in leases]
        pairs = zip(leases, groups, strict=True)
        size = run.generators.group_size
        self._store.insert(
            [pack(m, lease_id=lease.id, purpose="train", group_size=size) for lease, group in pairs for m in group]
        )
        return groups

    def run(self) -> None:
        """Claim, fetch, unpack, train, commit, stage, record."""
        store, trainer, run = self._store, self._trainer, self._run
        self._step += 1
        with self._timed("claim"):
            claim = store.claim(
                step=self._step,
                num_groups=run.learner.groups_per_step,
                rules=SamplingRules(),
                version=0,
                lease_s=run.buffer.claim_lease_s,
            )
        assert isinstance(claim, Claim), "fill() comes first"
        with ClaimKeeper(store, claim, lease_s=run.buffer.claim_lease_s):
            with self._timed("fetch"):
                payloads = store.fetch(claim.group_ids)
            with self._timed("unpack"):
                groups = [[unpack(payload) for payload in group] for group in payloads]
            with self._timed("train"):
                metrics: dict[str, Any] = {**trainer.step(groups, learner_version=0, step=claim.step)}
            with self._timed("lag"):
                histogram = lag_histogram((m for group in groups for m in group), learner_version=0)
                metrics |= {"lag/mean": 0.0, "lag/max": max(histogram), "lag/histogram": histogram}
            with self._timed("commit"):
                store.commit(claim, make_entry(claim, payloads, version=0, seed=0, config_hash=""))
        with self._timed("canary"):
            canary = trainer.canary()
        with self._timed("stage"):
            weights = trainer.engine.gather_parameters()
            self._staged = self._stager.stage(version=self._step, weights=weights, canary=canary, reuse=self._staged)
        with self._timed("announce"):
            store.announce_version(self._step)
            store.commit_version(self._step)
        with self._timed("record"):
            self._record.add_step(
                step=self._step,
                version=0,
                metrics=metrics,
                published=Published(version=self._step, num_members=1, seconds=0.0),
                evaluated=None,
                times={},
            )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started_at = time.perf_counter()
        yield
        self.times.setdefault(part, []).append(time.perf_counter() - started_at)


def main() -> None:
    """Measure and print."""
    arguments = side_arguments()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        run = msgspec.structs.replace(load(arguments.overrides), runs_dir=folder)
        torch.set_num_threads(1)
        result = _measure(run, seconds=arguments.seconds, rounds=arguments.rounds)
    print(json.dumps(result))


def _measure(run: RunConfig, *, seconds: float, rounds: int) -> dict[str, Any]:
    device = torch.device("cpu")
    ranks = join_ranks(rank=0, size=1, device=device, timeout_s=_PATIENCE_S)
    trainer, bare = build_trainer(run, ranks=ranks, device=device), BareLoop(run)
    folder = RunFolder(run)
    folder.open()
    with _store(run, folder) as store:
        whole = LearnerStep(run, trainer=trainer, store=store, folder=folder)
        groups = whole.fill(num_groups=run.learner.groups_per_step)
        contestants = {
            "bare DeepSpeed loop": lambda: bare.step(groups),
            "Trainer.step": lambda: trainer.step(groups, learner_version=0, step=1),
            "learner step": whole.run,
        }
        return asyncio.run(_compare(contestants, whole, groups, seconds=seconds, rounds=rounds))


async def _compare(
    steps: dict[str, Callable[[], Any]],
    whole: LearnerStep,
    groups: list[list[Trajectory]],
    *,
    seconds: float,
    rounds: int,
) -> dict[str, Any]:
    num_tokens = sum(int(member.model_mask.sum()) for group in groups for member in group)

    async def rate(step: Callable[[], Any]) -> float:
        """Response tokens trained on per second; filling the store is not counted."""
        spent, count = 0.0, 0
        while spent < seconds:
            if step == whole.run:
                whole.fill(num_groups=len(groups))
            started_at = time.perf_counter()
            step()
            spent += time.perf_counter() - started_at
            count += 1
        return count * num_tokens / spent

    contestants = {name: lambda step=step: rate(step) for name, step in steps.items()}
    await alternate(contestants, rounds=1)
    whole.times.clear()
    rates = summarise(await alternate(contestants, rounds=rounds), base="bare DeepSpeed loop")
    parts_ms = {part: 1000 * statistics.median(times) for part, times in whole.times.items()}
    return {"rates": rates, "parts_ms": parts_ms, "tokens_per_step": num_tokens}


@contextmanager
def _store(run: RunConfig, folder: RunFolder) -> Iterator[RedisStore]:
    server = EmbeddedRedis(folder.store)
    server.start()
    try:
        store = open_run_store(server.url, run.name, timeout_s=_PATIENCE_S)
        num_rows = len(Dataset(run.data.train_path))
        store.open_run(run.name, config_json="{}", num_rows=num_rows, seed=run.seed)
        yield store
        store.close()
    finally:
        server.stop()


if __name__ == "__main__":
    main()
