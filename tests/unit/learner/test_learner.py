"""The learner's loop over an in-memory store, with fake ranks and publisher. Generators answer every leased prompt."""

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from slipstream.broker.messages import Message, Profile
from slipstream.buffer.records import CheckpointPointer, StepEntry
from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.learner.checkpoint import BestEntry
from slipstream.learner.errors import SampledLogprobsError
from slipstream.learner.learner import Learner
from slipstream.learner.metrics_log import MetricsLog
from slipstream.learner.profiler import StepProfiler
from slipstream.observe.run_status import Monitor
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_run
from tests.contract.stores import answer, lease
from tests.memory_store.store import MemoryStore
from tests.metric_docs import ROWS, STEP, SUMMARY, TOKENS, keys_under


class FakeRanks:
    """Trains nothing. Saved models contain their step."""

    trainer = SimpleNamespace(step_tokens=None)
    reason = ""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.uploaded: list[str] = []
        self.storage_reason = ""
        self.checkpoints = self.saver = self

    def train(self, **_: Any) -> dict[str, Any]:
        lag = {"lag/mean": 0.0, "lag/max": 0, "lag/histogram": {0: 8}}
        return {"learner/tokens": 8.0, "learner/reward_mean": 1.0} | lag

    def save_checkpoint(self, *, step: int, version: int, finish: Callable[[CheckpointPointer], object]) -> Any:
        pointer = CheckpointPointer(step, version, f"step-{step:08d}")
        model = self._folder.checkpoints / pointer.name / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "step").write_text(str(step))
        finish(pointer)
        return pointer

    def raise_error(self) -> None: ...
    def flush_checkpoint(self) -> None: ...
    def newest_model(self) -> None: ...
    def canary(self, *, step: int) -> None: ...
    def weights(self) -> None: ...
    def keep_alive(self) -> None: ...
    def save_model(self, folder: Path) -> None: ...

    def restore(self, pointer: CheckpointPointer) -> CheckpointPointer:
        return pointer

    def prune(self, *, pinned: set[str]) -> None:
        """Prune as strictly as allowed: delete all checkpoints that are not pinned."""
        for folder in self._folder.checkpoints.iterdir():
            if folder.name not in pinned:
                shutil.rmtree(folder)

    def upload(self, folders: Iterable[Path]) -> None:
        self.uploaded += [folder.name for folder in folders]


class FakePublisher:
    """Commits each version at once. Every prompt is answered correctly while the learner waits."""

    probe_limit = 1e-3
    reward = Reward(total=1.0, is_correct=True)

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._version = 0

    def publish(self, *, version: int, **_: Any) -> None:
        self._version = version
        self._store.announce_version(version)
        self._store.commit_version(version)

    def sync_members(self, *, timeout_s: float) -> None:
        for each in lease(self._store, 8):
            spans = [VersionSpan(6, self._version)]
            self._store.insert([answer(each, index, reward=self.reward, version_spans=spans) for index in each.indices])

    def take_published(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    settings = ("learner.prompts_per_step=2", "evaluation.every_steps=2", "learner.max_steps=9")
    goals = (f"{{metric: eval/{name}, at_least: 1.0}}" for name in ("accuracy_greedy", "reward_sampled"))
    stop = f"evaluation.stop=[{', '.join(goals)}]"
    small = ("evaluation.num_prompts=1", "evaluation.num_final_prompts=1")
    return load(["experiment=digits_cpu", f"runs_dir={tmp_path}", "name=run", *settings, stop, *small])


def make_learner(run: RunConfig, store: MemoryStore, ranks: FakeRanks, publisher: type[FakePublisher]) -> Learner:
    folder = RunFolder(run)
    folder.path.mkdir(exist_ok=True)
    return Learner(
        run=run,
        store=store,
        rank_group=ranks,
        publisher=publisher(store),
        metrics_log=MetricsLog(run, folder=folder, store=store),
        wait=lambda _num_ready, _timeout_s: time.sleep(0),
        num_heldout={"sampled": 2, "greedy": 2},
        profiler=StepProfiler(run, store=store, folder=folder.profile, send=lambda _: None),
    )


def train(run: RunConfig, store: MemoryStore, publisher: type[FakePublisher] = FakePublisher) -> list[int]:
    make_learner(run, store, FakeRanks(RunFolder(run)), publisher).run()
    return [row["step"] for row in read_rows(run)] if RunFolder(run).metrics.exists() else []


def make_store() -> MemoryStore:
    store = MemoryStore()
    store.open_run("run", config_json="{}", num_rows=7, seed=0)
    return store


def read_rows(run: RunConfig) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in RunFolder(run).metrics.read_bytes().splitlines()]


def test_a_run_that_its_stop_rule_ended_trains_no_step_more_when_it_is_resumed_unless_without_the_rule(run: RunConfig):
    store = make_store()
    stopped = train(run, store)
    assert 2 <= stopped[-1] < 9
    resumed = msgspec.structs.replace(run, resume=True)
    assert train(resumed, store) == stopped
    assert store.run_state().step == stopped[-1]
    evaluation = msgspec.structs.replace(run.evaluation, stop=None)
    assert train(msgspec.structs.replace(resumed, evaluation=evaluation), store) == list(range(1, 10))


def test_every_key_of_a_row_and_of_the_summary_is_documented_and_the_status_has_the_newest_row(run: RunConfig):
    store = make_store()
    train(run, store)
    rows = read_rows(run)
    found = {key for row in rows for key in row}
    assert found <= keys_under(ROWS, STEP, TOKENS)
    assert keys_under(ROWS) - found == {
        *("lag/p50", "lag/p95"),  # from the ranks
        "generators/tokens_per_s",  # from generators
        *(key for key in keys_under(ROWS) if key.startswith("weights/")),  # from the publisher
        *("buffer/skipped_too_easy", "buffer/skipped_too_hard", "buffer/explored", "buffer/in_band_fraction"),
    }
    assert set(msgspec.json.decode(RunFolder(run).summary.read_bytes())) == keys_under(SUMMARY)
    status = Monitor(store, run).status()
    assert msgspec.json.decode(msgspec.json.encode(status.last_row)) == rows[-1]
    assert (status.step, status.version) == (rows[-1]["step"], rows[-1]["version"])


def test_a_first_step_with_other_log_probabilities_than_the_learners_ends_the_run(run: RunConfig):
    class Offset(FakeRanks):
        def train(self, **_: Any) -> dict[str, Any]:
            moments = {"mismatch_mean": 0.01, "mismatch_ratio_mean": 0.99, "chi2": 0.99**2 - 1, "tokens": 64.0}
            return super().train() | {f"learner/by_lag/0/{name}": value for name, value in moments.items()}

    store, folder = make_store(), RunFolder(run)
    with pytest.raises(SampledLogprobsError, match="over 64 tokens"):
        make_learner(run, store, Offset(folder), FakePublisher).run()
    assert store.run_state().step == 1
    assert not folder.checkpoints.exists()


def with_settings(run: RunConfig, *, best: str | None = None, **evaluation: Any) -> RunConfig:
    checkpoint = msgspec.structs.replace(run.learner.checkpoint, best=best, keep=1)
    learner = msgspec.structs.replace(run.learner, checkpoint=checkpoint)
    evaluated = msgspec.structs.replace(run.evaluation, stop=None, **evaluation)
    return msgspec.structs.replace(run, learner=learner, evaluation=evaluated)


class RisingAndFalling(FakePublisher):
    @property
    def reward(self) -> Reward:
        return Reward(total=-abs(self._version - 4.0))


def test_the_checkpoint_of_the_best_evaluation_is_kept_exported_uploaded_and_outlives_a_resume(run: RunConfig):
    store, ranks, folder = make_store(), FakeRanks(RunFolder(run)), RunFolder(run)
    run = with_settings(run, best="eval/reward_greedy")
    make_learner(run, store, ranks, RisingAndFalling).run()
    best = msgspec.json.decode((folder.path / "best.json").read_bytes(), type=BestEntry)
    assert (best.checkpoint.step, best.checkpoint.version, best.value) == (4, 4, 0.0)
    assert (folder.best_model / "step").read_text() == "4", "the evaluated weights are exported"
    assert {path.name for path in folder.checkpoints.iterdir()} == {"step-00000004", "step-00000009"}
    assert msgspec.json.decode(folder.summary.read_bytes())["best"] == msgspec.to_builtins(best)
    assert ranks.uploaded == ["final_model", "best_model"]
    learner = msgspec.structs.replace(run.learner, max_steps=14)
    train(msgspec.structs.replace(run, resume=True, learner=learner), store, RisingAndFalling)
    assert (folder.best_model / "step").read_text() == "4"


def test_the_status_names_the_upload_that_the_object_store_blocks(run: RunConfig):
    ranks = FakeRanks(RunFolder(run))
    learner = make_learner(run, make_store(), ranks, FakePublisher)
    ranks.storage_reason = "waiting 9 s of 1800 s for s3://bucket/run/checkpoints/step-1/state.json: AWS Error"
    status = learner.status()
    assert (status.reason, status.gauges["waits_for"]) == (ranks.storage_reason, "storage")


def test_evaluation_only_trains_nothing(run: RunConfig):
    run = msgspec.structs.replace(run, mode="evaluate")
    store = make_store()
    assert train(run, store) == []
    summary = msgspec.json.decode(RunFolder(run).summary.read_bytes())
    assert (summary["steps"], summary["accuracy_greedy"], summary["evaluation"]["eval/version"]) == (0, 1.0, 0)
    assert store.run_state().phase == "finished"
    assert not RunFolder(run).checkpoints.exists()


def test_evaluations_are_of_the_version_that_they_name_and_the_one_before_training_can_be_left_out(run: RunConfig):
    store = make_store()
    assert train(with_settings(run, before_training=False), store)[-1] == 9
    assert store.evaluation("before-greedy") is None
    assert msgspec.json.decode(RunFolder(run).summary.read_bytes())["accuracy_before"] is None
    for step in (2, 4, 6, 8):
        (name,) = [name for name in store._evaluations if name.startswith(f"step-{step}-") and "greedy" in name]
        assert store.evaluation(name).is_complete, "the next version waits for it"
        assert [each.version for each in store.evaluation_answers(name)] == [step]


def test_an_evaluation_that_is_open_at_the_end_is_waited_for_before_the_last_version(run: RunConfig):
    # Step 9 is evaluated at version 4 and produces version 5.
    run = with_settings(run, every_steps=3)
    run = msgspec.structs.replace(run, weights=msgspec.structs.replace(run.weights, publish_every_steps=2))
    store = make_store()
    assert train(run, store)[-1] == 9
    (name,) = [name for name in store._evaluations if name.startswith("step-9-") and "greedy" in name]
    assert [each.version for each in store.evaluation_answers(name)] == [4]
    assert store.run_state().version == 5


@pytest.mark.parametrize("publish_every", [1, 2])
def test_a_stop_saves_all_steps_and_a_resumed_run_continues_after_them(run: RunConfig, publish_every: int):
    weights = msgspec.structs.replace(run.weights, publish_every_steps=publish_every)
    run = msgspec.structs.replace(with_settings(run), weights=weights)
    store, ranks = make_store(), FakeRanks(RunFolder(run))
    learner = make_learner(run, store, ranks, FakePublisher)

    def stop_at_three(*, step: int, **_: Any) -> dict[str, Any]:
        if step == 3:
            learner.request_stop()
        return FakeRanks.train(ranks)

    ranks.train = stop_at_three  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        learner.run()
    state, pointer = store.run_state(), CheckpointPointer(3, 3 if publish_every == 1 else 2, "step-00000003")
    assert (state.step, state.checkpoint) == (3, pointer)
    assert train(msgspec.structs.replace(run, resume=True), store) == list(range(1, 10)), "each step once"


def test_a_stop_ends_every_wait(run: RunConfig):
    store, learners = make_store(), []

    class Silent(FakePublisher):
        def sync_members(self, *, timeout_s: float) -> None:
            learners[0].request_stop()

    learners.append(make_learner(run, store, FakeRanks(RunFolder(run)), Silent))
    with pytest.raises(KeyboardInterrupt):
        learners[0].run()
    assert store.run_state().checkpoint is None, "nothing was trained"


class Scene:
    def __init__(self, folder: Path, steps: list[int] | None) -> None:
        run = make_run(profile={"steps": steps}, learner={"max_steps": 20}, staleness={"max_lag": 1})
        self.store = MemoryStore()
        self.store.open_run("run", config_json="{}", num_rows=7, seed=0)
        self.sent: list[Message] = []
        self.orders: list[tuple[int, str]] = []
        (folder / "run").mkdir()
        self.profiler = StepProfiler(run, store=self.store, folder=folder / "run" / "profile", send=self.sent.append)

    def step(self, step: int) -> None:
        self.profiler.begin_step(step)
        entry = StepEntry(step, step - 1, step, 0, "", [step], [[f"{step}-0-0"]])
        self.profiler.record_step(entry, claimed_at_ns=1)
        self.profiler.end_step(step, published=step - 1)
        self.orders += [(step, order.stage) for order in self.sent if isinstance(order, Profile)]
        self.sent.clear()


@pytest.mark.parametrize("steps", [[5, 6], None])
def test_recording_begins_before_the_first_step_and_ends_with_the_version_of_the_last(tmp_path, steps):
    scene = Scene(tmp_path, steps)
    if steps is None:
        scene.store.request("learner", "profile", "2 3")  # too early: trajectories of step 2 exist already
    for step in range(3, 10):
        scene.step(step)
    assert scene.orders == [(3, "events"), (5, "engine"), (7, "end")]
    scene.profiler.join()
    assert (tmp_path / "run" / "profile" / "trace.json.gz").is_file()
    assert scene.profiler.gauges == {}

    # Steps that are over when a run is resumed are not recorded.
    (tmp_path / "resumed").mkdir()
    scene = Scene(tmp_path / "resumed", [5, 6])
    for step in range(8, 12):
        scene.step(step)
    assert scene.orders == []
