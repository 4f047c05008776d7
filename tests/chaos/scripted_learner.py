"""`python -m tests.chaos.scripted_learner [--light] [overrides]`: the real learner with a scripted step.

Learner, rank group, checkpoints, publishing, and broadcast are the real ones. The trainer sleeps instead of computing,
records the lineage of its weights, and changes one weight, so that versions differ. With `--light`, weights are
announced and applied, but not sent.
"""

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.broker.errors import BrokerError
from slipstream.broker.transport import session
from slipstream.broker.transport.session import Session, StatusBoard, join
from slipstream.broker.weights.collective import CollectiveSender
from slipstream.broker.weights.transport import WeightSender
from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.redis import run_store
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs import broker as configs
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.learner import background_save
from slipstream.learner.batching.collate import Layout
from slipstream.learner.build import build_learner
from slipstream.learner.checkpoint import Checkpoints
from slipstream.learner.engines.engine import TrainEngine
from slipstream.learner.errors import LearnerError
from slipstream.learner.rank_group import RankGroup
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.model import load_policy
from slipstream.learner.training.objective import Objective
from slipstream.learner.training.trainer import FrozenModels, Trainer
from slipstream.runtime.command_line import fail_cleanly
from slipstream.runtime.credentials import derive_keys, make_token
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.process import raise_on_stop_signal
from slipstream.runtime.run_folder import RunFolder
from tests.chaos.outcome import Trained, pack_lineage, read_lineage, samples_of
from tests.chaos.stage import HOLD_FILE, JOURNALS, MEAN_STEP_S, POINTS
from tests.chaos.watched.channel import WatchedChannel
from tests.chaos.watched.journal import Journal, Points, content_of
from tests.chaos.watched.store import WatchedStore

_JOIN_TIMEOUT_S = 120.0
_HOLD_TIMEOUT_S = 3600.0
_TICK_S = 0.05
_LAST_STEPS, _SLOW_STEP_S = 0.7, 1.0
"""Fraction of steps after which a run slows down, so that it outlasts the strikes, and the step time then."""
_AFTER_STOP_S = 0.5
"""Remaining time of a step whose process was stopped and continued: enough to renew the claim."""


class LineageEngine(TrainEngine):
    lineage: list[Trained]

    def copy_state(self) -> dict[str, Tensor]:
        return pack_lineage(self.lineage)

    def restore_state(self, folder: Path) -> None:
        self.lineage = read_lineage(folder)
        for _ in self.lineage:
            self.move()

    @torch.no_grad()
    def move(self) -> None:
        next(self.model.parameters()).view(-1)[0] += 2**-10


class ScriptedTrainer(Trainer):
    def __init__(self, run: RunConfig, *, engine: LineageEngine, ranks: Ranks) -> None:
        super().__init__(
            run,
            engine=engine,
            ranks=ranks,
            objective=Objective(run.algorithm, max_tokens=run.generators.sampling.max_tokens),
            frozen_models=FrozenModels(run.algorithm),
            layout=Layout("shared_rows", run.learner.tokens_per_microbatch),
        )
        self._settings = run
        self._hold_file = RunFolder(run).path / HOLD_FILE
        engine.lineage = []

    def step(
        self, groups: Sequence[Sequence[Trajectory]], *, learner_version: int, step: int, **_: object
    ) -> dict[str, Any]:
        if step == self._settings.learner.max_steps:
            self._await_end_of_strikes()
        # Seeded, so that a repeated step takes the same time.
        time.sleep(random.Random(f"{self._settings.seed}/{step}").uniform(0, 2 * MEAN_STEP_S))
        if step > _LAST_STEPS * self._settings.learner.max_steps and self._hold_file.exists():
            time.sleep(_SLOW_STEP_S)
        if WatchedStore.points.reach("in_step"):
            time.sleep(_AFTER_STOP_S)
        members = [member for group in groups for member in group]
        contents = [content_of(member) for member in members]
        self.engine.lineage.append(Trained(step, samples_of(groups), [member.id for member in members], contents))
        self.engine.move()
        self.num_updates += 1
        return {"learner/tokens": sum(len(each.token_ids) for each in members), "learner/reward_mean": 0.0}

    def _await_end_of_strikes(self) -> None:
        # Hold the last step, so that the run cannot finish before the strikes end.
        ends_at = time.monotonic() + _HOLD_TIMEOUT_S
        while self._hold_file.exists():
            if time.monotonic() > ends_at:
                raise TimeoutError(f"{self._hold_file} must be removed within {_HOLD_TIMEOUT_S:g} s")
            time.sleep(_TICK_S)


class NoSender:
    """A WeightSender that sends nothing: the scripted engine takes the version from the announcement."""

    address = ("file:///nowhere", 0)
    device = "cpu"

    def open_epoch(self, epoch: int, *, num_members: int, timeout_s: float, backend: str) -> None:
        """There is no group to build."""

    def broadcast(self, buckets: list[Tensor], *, timeout_s: float) -> None:
        WatchedStore.points.reach("in_broadcast")

    def abort(self) -> None:
        """Nothing blocks."""

    def close(self) -> None:
        """Nothing is open."""


def watch() -> None:
    """Write journals of the channel and of the store."""
    journal = WatchedChannel.journal = WatchedStore.journal = Journal(Path(JOURNALS), "learner")
    points = WatchedStore.points = Points(Path(POINTS), "learner", on_obey=lambda at: journal.write("obeyed", point=at))
    seal, merge = background_save.seal, background_save.merge
    # Two points within a save, in its thread: before sealing, and after sealing but before the rename.
    vars(background_save)["seal"] = lambda folder: (points.reach("before_seal"), seal(folder))
    vars(background_save)["merge"] = lambda parts, *, into: (points.reach("before_merge"), merge(parts, into=into))
    WatchedStore.repeats = True
    session.ZmqClientChannel = WatchedChannel
    run_store.RedisStore = WatchedStore
    configs.CLAIM_LEASES = 1


@fail_cleanly(BrokerError, ReplayBufferError, LearnerError)
def main(arguments: list[str]) -> None:
    overrides = [argument for argument in arguments if argument != "--light"]
    watch()
    run = load(overrides)
    configure_logs("learner")
    raise_on_stop_signal()
    torch.set_num_threads(1)
    board = StatusBoard()
    joined = join(
        "learner",
        address=RunFolder(run).broker_address,
        keys=derive_keys(make_token(run)),
        max_message_bytes=run.broker.max_message_bytes,
        peer_id="learner",
        status=board,
        timeout_s=_JOIN_TIMEOUT_S,
    )
    try:
        sender = NoSender() if "--light" in arguments else CollectiveSender(device="cpu")
        _train(run, joined, board, sender)
    finally:
        joined.thread.stop()


def _train(run: RunConfig, joined: Session, board: StatusBoard, sender: WeightSender) -> None:
    folder = RunFolder(run)
    folder.open()
    url, retry_timeout_s = joined.welcome.store_url, run.broker.store_timeout_s
    store = open_run_store(url, run.name, timeout_s=retry_timeout_s, retry_timeout_s=retry_timeout_s)
    learner = build_learner(
        run,
        rank_group=_make_rank_group(run, folder),
        store=store,
        folder=folder,
        client=joined.client,
        inbox=joined.inbox,
        sender=sender,
        wait=lambda num_ready, timeout_s: store.wait_ready(num_groups=num_ready, timeout_s=timeout_s),
        num_heldout=joined.welcome.num_heldout,
    )
    board.set_source(learner.status)
    learner.run()
    store.close()


def _make_rank_group(run: RunConfig, folder: RunFolder) -> RankGroup:
    device = torch.device("cpu")
    torch.manual_seed(run.seed)
    ranks = Ranks(rank=0, size=1, device=device)
    engine = LineageEngine(load_policy(run.model, device=device), optimizer=run.learner.optimizer, device=device)
    trainer = ScriptedTrainer(run, engine=engine, ranks=ranks)
    checkpoints = Checkpoints(folder.checkpoints, run=run, trainer=trainer, ranks=ranks)
    return RankGroup(run=run, trainer=trainer, ranks=ranks, checkpoints=checkpoints)


if __name__ == "__main__":
    main(sys.argv[1:])
