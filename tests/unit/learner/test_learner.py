"""The learner's loop over a store in memory; ranks and publisher are fakes, generators answer whatever is leased."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.buffer.memory.store import MemoryStore
from slipstream.buffer.records import CheckpointPointer
from slipstream.buffer.trajectory import Reward
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.learner.learner import Learner
from slipstream.learner.metrics.log import MetricsLog
from slipstream.runtime.run_folder import RunFolder
from tests.contract.stores import answer, lease

RIGHT = Reward(total=1.0, is_correct=True)


class FakeRanks:
    """Trains nothing and saves nothing."""

    def train(self, **_: Any) -> dict[str, Any]:
        return {"learner/tokens": 8.0, "learner/reward_mean": 1.0, "lag/mean": 0.0, "lag/max": 0}

    def save_checkpoint(self, *, step: int, version: int) -> CheckpointPointer:
        return CheckpointPointer(step, version, f"step-{step:08d}")

    def checkpoint_names(self) -> list[str]:
        return []

    def canary(self) -> None: ...
    def weights(self) -> None: ...
    def keep_alive(self) -> None: ...
    def restore(self, pointer: CheckpointPointer) -> None: ...
    def prune_checkpoints(self, *, pinned: CheckpointPointer) -> None: ...
    def save_model(self, folder: Path) -> None: ...


class FakePublisher:
    """Announces each version at once; every prompt is answered correctly while the learner waits."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def publish(self, *, version: int, **_: Any) -> None:
        self._store.announce_version(version)
        self._store.commit_version(version)

    def sync_members(self, *, timeout_s: float) -> None:
        for each in lease(self._store, 8):
            self._store.insert([answer(each, index, reward=RIGHT) for index in each.indices])

    def take_published(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    settings = ("learner.groups_per_step=2", "evaluation.every_steps=2", "learner.stop={}", "learner.max_steps=9")
    small = ("evaluation.monitor_prompts=1", "evaluation.final_prompts=1")
    return load(["experiment=digits_cpu", f"runs_dir={tmp_path}", "name=run", *settings, *small])


def train(run: RunConfig, store: MemoryStore) -> list[int]:
    """Run the learner to its end; returns the steps in `metrics.jsonl`."""
    folder = RunFolder(run)
    folder.path.mkdir(exist_ok=True)
    publisher = FakePublisher(store)
    learner = Learner(
        run=run,
        store=store,
        rank_group=FakeRanks(),
        publisher=publisher,
        metrics_log=MetricsLog(run, folder=folder, store=store),
        wait=lambda _num_ready, _timeout_s: time.sleep(0),
        num_heldout={"sampled": 2, "greedy": 2},
    )
    learner.run()
    return [row["step"] for row in map(msgspec.json.decode, folder.metrics.read_bytes().splitlines())]


def make_store() -> MemoryStore:
    store = MemoryStore()
    store.open_run("run", config_json="{}", num_rows=7, seed=0)
    return store


def test_a_run_that_its_stop_rule_ended_trains_no_step_more_when_it_is_resumed(run: RunConfig):
    store = make_store()
    stopped = train(run, store)
    assert 2 <= stopped[-1] < 9
    resumed = msgspec.structs.replace(run, resume=True)
    assert train(resumed, store) == stopped
    assert store.run_state().step == stopped[-1]


def test_a_resumed_run_without_its_stop_rule_goes_on(run: RunConfig):
    store = make_store()
    train(run, store)
    learner = msgspec.structs.replace(run.learner, stop=None)
    assert train(msgspec.structs.replace(run, resume=True, learner=learner), store) == list(range(1, 10))
