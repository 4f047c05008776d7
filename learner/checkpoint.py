"""Checkpoints: the state that a run resumes from. A crash at any point leaves a complete one.

Training waits only while a save copies the state to host memory. A checkpoint takes effect when the store points at it:
one atomic operation moves `RunState.checkpoint` and retires the groups that it covers. Each machine has its own ranks'
files. With `storage.uri`, the object store has all files before the pointer moves.

<folder>/step-00000050/state.json        CheckpointState
<folder>/step-00000050/model/            weights in transformers format, any adapter merged in, and the tokenizer
<folder>/step-00000050/model/adapter/    the adapter in peft's format, if one is trained
<folder>/step-00000050/optimizer-rank-*  trained weights and moments by parameter, float32, sharded; for any layout
<folder>/step-00000050/reference/        weights-rank-* of the reference policy, if it is refreshed
<folder>/step-00000050/critic/           model/ and optimizer-rank-* of a critic; likewise process_reward/
<folder>/step-00000050/checksums.json    xxh3-64 of every other file, checked before loading
<folder>/step-00000100.31/               of the learner that resumed with fencing token 31; names never collide
"""

import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

import msgspec
import numpy as np
import structlog
import torch
from safetensors.torch import save_file

from slipstream.buffer.durable_files import CHECKSUMS, checksum, checksums_of, find_damage, write_durably
from slipstream.buffer.object_folder import open_storage
from slipstream.buffer.records import CheckpointPointer
from slipstream.configs.base import Record
from slipstream.configs.learner import DeepSpeedEngineConfig
from slipstream.configs.load import config_hash
from slipstream.configs.run import RunConfig
from slipstream.learner.background_save import BackgroundSaver, RankFolders, Write, delete_folder
from slipstream.learner.engines.optimizer import STATE_FILE, WEIGHTS_FILE
from slipstream.learner.errors import CheckpointError, DivergenceError
from slipstream.learner.metrics_log import Row
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.saved_model import copy_model
from slipstream.learner.training.trainer import Trainer
from slipstream.runtime.model_files import weight_files
from slipstream.runtime.run_folder import RunFolder

log = structlog.get_logger(__name__)


Finish = Callable[[CheckpointPointer], object]


class BestEntry(Record):
    """The best evaluation so far, in `best.json`.

    Example: BestEntry(metric="eval/accuracy_greedy", value=0.97, checkpoint=CheckpointPointer(step=40, ...))
    """

    metric: str
    value: float
    checkpoint: CheckpointPointer


BEST_FILE = "best.json"


class BestCheckpoint:
    """The best checkpoint. Life: resume -> (add -> judge)* -> export. A no-op without a metric."""

    def __init__(self, metric: str | None, folder: RunFolder, *, flush: Callable[[], object]) -> None:
        """`flush` waits until the newest checkpoint is durable."""
        self._metric = metric
        self._folder = folder
        self._file = folder.path / BEST_FILE
        self._flush = flush
        self._evaluated: dict[int, CheckpointPointer] = {}
        self.entry: BestEntry | None = None

    def resume(self) -> None:
        """Load the entry. A restore has fetched it."""
        if self._metric and self._file.is_file():
            entry = msgspec.json.decode(self._file.read_bytes(), type=BestEntry)
            if entry.metric == self._metric and (self._folder.checkpoints / entry.checkpoint.name).is_dir():
                self.entry = entry

    @property
    def pinned(self) -> set[str]:
        """The best checkpoint and those with a pending evaluation."""
        best = [self.entry.checkpoint] if self.entry else []
        return {pointer.name for pointer in (*best, *self._evaluated.values())}

    def add(self, pointer: CheckpointPointer) -> None:
        """Pin it while its version is evaluated."""
        self._evaluated[pointer.version] = pointer

    def judge(self, row: Row) -> None:
        pointer = self._evaluated.pop(row.get("eval/version", -1), None)
        value = row.get(self._metric) if self._metric else None
        if self._metric is None or pointer is None or value is None:
            return
        sign = -1 if self._metric.startswith("eval/loss") else 1
        # On a tie, keep the earlier one.
        if self.entry is None or sign * value > sign * self.entry.value:
            # The best checkpoint must survive a crash.
            self._flush()
            self.entry = BestEntry(self._metric, value, pointer)
            write_durably(self._file, msgspec.json.encode(self.entry))
            log.info("best_checkpoint", metric=self.entry.metric, value=round(value, 4), checkpoint=pointer.name)

    def export(self) -> Path | None:
        """Copy the best checkpoint's model. Returns the copy, or None if no evaluation had the metric."""
        if self.entry is None:
            return None
        draft = self._folder.path / "best_model.tmp"
        for old in (draft, self._folder.best_model):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(self._folder.checkpoints / self.entry.checkpoint.name / "model", draft)
        draft.rename(self._folder.best_model)
        return self._folder.best_model


_REFERENCE = "reference"
_STATE = "state.json"
_NAME = re.compile(r"(?:draft-)?step-(\d+)(?:\.(\d+))?")
"""Step and life of a checkpoint or draft. The first life of a run is omitted."""


class CheckpointState(Record):
    """Progress of a run.

    Example: CheckpointState(step=50, version=50, num_updates=50, seed=0, config_hash="5f3a…", engine="zero-0",
        num_ranks=1)
    """

    step: int
    """Last step in the weights."""
    version: int
    num_updates: int
    seed: int
    config_hash: str
    engine: str
    """Engine that wrote it, `torch` or `zero-<stage>`. Any engine can resume from it."""
    num_ranks: int
    critic_updates: int = 0
    """Updates of the critic or the process reward model."""
    base: dict[str, str] = {}
    """Checksums of the base model's files if an adapter is trained."""
    objective: dict[str, float] = {}
    """See `ObjectiveState.save`."""


class Checkpoints:
    """Saves and restores a trainer. Construction, `save`, and `restore*` are collective."""

    def __init__(self, folder: Path, *, run: RunConfig, trainer: Trainer, ranks: Ranks) -> None:
        self._folder = folder
        self._run = run
        self._trainer = trainer
        self._ranks = ranks
        self._folders = RankFolders(folder, ranks)
        self._run_storage = open_storage(run) if self._folders.is_leader else None
        self._storage = self._run_storage and self._run_storage.child(folder.name)
        self.saver = BackgroundSaver(
            folder, ranks=ranks, folders=self._folders, in_background=not run.is_one_process, storage=self._storage
        )
        self._poisoned = set[str]()
        """Checkpoints with NaN or infinity."""
        self._newest: CheckpointPointer | None = None
        self.life = 1
        """Greater than every earlier learner's, so that they never touch this one's files. Set from the store's fencing
        token or by `begin_life`."""

    def begin_life(self) -> None:
        """Choose a life above all in the folder and the object store (mode=sft, without a store)."""
        seen = [*self.names(), *(folder.name for folder in self._folder.glob("draft-*"))]
        # Use the time, because folders on other machines may be invisible here.
        self.life = max([(int(time.time()) if self._storage else 1), *(1 + life for life, _ in map(_age, seen))])

    def names(self) -> list[str]:
        """Complete checkpoints in this folder, else in the object store, oldest first."""
        names = [path.parent.name for path in self._folder.glob(f"step-*/{CHECKSUMS}")]
        return sorted(names or (self._storage.names() if self._storage else []), key=_age)

    def with_remedy(self, error: DivergenceError) -> DivergenceError:
        """Wait for the save in flight, then add how to continue."""
        self.saver.join()
        if not (model := self.newest_model()):
            return DivergenceError(f"{error} No checkpoint exists to continue from: start a new run.")
        resume = "" if self._run.is_one_process else "resume=true continues from it; "
        begin = f"{resume}a new run with other settings can begin with model.path={model}"
        return DivergenceError(f"{error} The newest checkpoint is finite: {begin}.")

    def newest_model(self) -> str:
        """Location of the newest finite model, for messages; empty without one."""
        if not (names := [name for name in self.names() if name not in self._poisoned]):
            return ""
        folder = self._folder / names[-1]
        if self._storage and not folder.is_dir():
            return f"a copy of {self._storage.child(names[-1]).uri}/model"
        return f"{folder}/model"

    def prune(self, *, pinned: Set[str]) -> None:
        """Delete all but the newest `keep`, `pinned`, and later lives' checkpoints, here and in the object store.

        Other machines delete theirs in the next save.
        """
        keep = self._run.learner.checkpoint.keep
        self._keep({*self.names()[-keep:], *pinned}, life=self.life)
        if self._run_storage and self._storage:
            best = self._folder.parent / BEST_FILE
            # Write the new entry before the previous best checkpoint is deleted.
            if best.is_file():
                self._run_storage.write(BEST_FILE, best.read_bytes())
            kept = {*sorted(self._storage.names(), key=_age)[-keep:], *pinned}
            self._storage.prune(is_kept=lambda name: name in kept or _age(name)[0] > self.life)

    def upload(self, folders: Iterable[Path]) -> None:
        """Start uploading folders to the object store, if configured. `saver.flush` waits for it."""
        if storage := self._run_storage:

            def work() -> None:
                for folder in folders:
                    remote = storage.child(folder.name)
                    remote.upload(folder, checksums_of(folder))
                    remote.seal()
                    log.info("uploaded", uri=remote.uri)

            self.saver.run(work)

    def _keep(self, names: Set[str], *, life: int) -> None:
        for folder in self._folder.glob("step-*"):
            if folder.name not in names and _age(folder.name)[0] <= life:
                delete_folder(folder)

    @cached_property
    def _base(self) -> dict[str, str]:
        path = self._run.model.path
        return {file.name: checksum(file) for file in weight_files(path)} if self._run.model.lora else {}

    def save(self, *, step: int, version: int, finish: Finish = lambda pointer: None) -> CheckpointPointer:
        """Begin a checkpoint that covers `step`. On return, its state is copied and its name fixed.

        First waits for the previous save and raises its error. Once the checkpoint is durable, rank 0 calls `finish` in
        the writing thread, or here with all roles in one process. If the newest checkpoint covers `step`, only calls
        `finish` again. Raises DivergenceError unless optimizer and objective are finite. The caller checks the weights.
        """
        began_at = time.monotonic()
        self.saver.flush()
        if (newest := self._newest) and newest.step == step:
            if self._ranks.is_first:
                self.saver.run(lambda: finish(newest))
            return newest
        chosen = [f"step-{step:08d}" + f".{self.life}" * (self.life > 1)]
        chosen += [folder.name for folder in self._folder.glob("step-*")]
        found = self._ranks.broadcast_bytes([each.encode() for each in chosen] if self._ranks.is_first else None)
        name, *kept = (each.decode() for each in found)
        if self._folders.is_leader:
            life, _ = _age(name)
            for leftover in (*self._folder.glob("draft*"), *self._folder.glob("deleted-*")):
                if _age(leftover.name)[0] < life:
                    delete_folder(leftover)
            self._keep(set(kept), life=life)
        pointer = CheckpointPointer(step, version, name)
        waited_s = time.monotonic() - began_at
        writes = self._copy(step=step, version=version)
        log.info("checkpoint", name=name, waited_s=round(waited_s, 3), stall_s=round(time.monotonic() - began_at, 3))
        self._seed_generators(step=step)
        self.saver.start(writes, name=name, finish=lambda: finish(pointer))
        self._newest = pointer
        return pointer

    def _copy(self, *, step: int, version: int) -> dict[str, Write]:
        """Copy this rank's state to host memory. Collective."""
        trainer, rank, is_first = self._trainer, self._ranks.rank, self._ranks.is_first
        layout = self._run.learner.engine
        states = STATE_FILE.format(rank)
        files = {states: trainer.engine.copy_state()}
        if second := trainer.second_model:
            files[f"{second.name}/{states}"] = second.engine.copy_state()
        trainer.check_state(files.values(), step=step)
        writes: dict[str, Write] = {name: partial(save_file, tensors) for name, tensors in files.items()}
        models = {"model": trainer.engine} | ({f"{second.name}/model": second.engine} if second else {})
        for where, engine in models.items():
            made = copy_model(engine, config=self._run.model, ranks=self._ranks)
            writes |= {f"{where}/{name}".rstrip("/"): write for name, write in made.items()}
        if is_first:
            state = CheckpointState(
                step=step,
                version=version,
                num_updates=trainer.num_updates,
                critic_updates=second.num_updates if second else 0,
                seed=self._run.seed,
                config_hash=config_hash(self._run),
                engine=f"zero-{layout.zero_stage}" if isinstance(layout, DeepSpeedEngineConfig) else "torch",
                num_ranks=self._ranks.size,
                objective=trainer.objective.state.save(),
            )
            # In the background thread: a large base takes long to read.
            writes[_STATE] = lambda path: path.write_bytes(
                msgspec.json.encode(msgspec.structs.replace(state, base=self._base))
            )
        # Without refreshes, the reference is the initial policy.
        if reference := trainer.reference:
            frozen = reference.copy_weights(self._ranks)
            writes[f"{_REFERENCE}/{WEIGHTS_FILE.format(rank)}"] = partial(save_file, frozen)
        return writes

    def _seed_generators(self, *, step: int) -> None:
        """Reseed every generator, so continuing after a checkpoint equals resuming from it."""
        drawn = int(np.random.SeedSequence([self._run.seed, step, self._ranks.rank]).generate_state(1)[0])
        torch.manual_seed(drawn)
        np.random.seed(drawn)
        random.seed(drawn)

    def restore_finite(self, names: Sequence[str]) -> CheckpointState:
        """Load the first finite one of these checkpoints. Raises CheckpointError."""
        for name in names:
            state = self.restore(name)
            try:
                self._trainer.check_weights(step=state.step)
                self._trainer.check_state([self._trainer.engine.copy_state()], step=state.step)
                return state
            except DivergenceError as error:
                self._poisoned.add(name)
                log.warning("checkpoint_not_finite", name=name, error=str(error))
        raise CheckpointError(
            f"{self._folder} must hold a finite checkpoint, got NaN or infinity in {', '.join(names)}: "
            "start a new run with a lower learner.optimizer.learning_rate."
        )

    def restore(self, name: str) -> CheckpointState:
        """Load a checkpoint. Raises CheckpointError; detects damaged files before loading any."""
        folder = self._folder / name
        # Downloads may exceed the time limit of a collective; `flush` keeps waiting.
        self.saver.run(lambda: self._make_whole(name))
        self.saver.flush()
        # Ranks may now hold other parts of the optimizer state.
        self._folders.complete(folder)
        try:
            state = msgspec.json.decode((folder / _STATE).read_bytes(), type=CheckpointState)
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(
                f"{folder} must be a complete checkpoint, got {error}: restore it, or start a new run with model.path "
                "set to another checkpoint."
            ) from error
        if self._ranks.is_first and state.base != self._base:
            raise CheckpointError(
                f"model.path must hold the model that the adapter in {folder} was trained on, got other weights in "
                f"{self._run.model.path}: put them back, or start a new run with model.path={folder / 'model'}."
            )
        self._ranks.barrier()
        self._trainer.engine.restore_state(folder)
        self._trainer.num_updates = state.num_updates
        self._trainer.objective.state.restore(state.objective)
        if reference := self._trainer.reference:
            reference.restore_weights(folder / _REFERENCE)
        if second := self._trainer.second_model:
            if not (folder / second.name).is_dir():
                raise CheckpointError(
                    f"{folder} must hold the {second.noun} that algorithm.advantage needs, got none: resume with the "
                    "original advantage, or start a new run."
                )
            second.engine.restore_state(folder / second.name)
            second.num_updates = state.critic_updates
        self._newest = CheckpointPointer(state.step, state.version, name)
        # Last, because loading a model may draw random numbers.
        self._seed_generators(step=state.step)
        self._ranks.barrier()
        return state

    def _make_whole(self, name: str) -> None:
        """Check this machine's files, and fetch missing ones."""
        folder = self._folder / name
        if not self._folders.is_leader:
            return
        damage = find_damage(folder) if folder.is_dir() else ""
        if self._storage and (damage or not folder.is_dir() or len(self._folders.leaders) > 1):
            log.info("fetching_checkpoint", uri=self._storage.child(name).uri)
            self._storage.child(name).download(folder)
            if self._ranks.is_first:
                self._fetch_best()
        elif damage:
            others = (self._folder / other for other in reversed(self.names()) if other != name)
            whole = next((other for other in others if not find_damage(other)), None)
            advice = f", or start a new run with model.path={whole / 'model'}" if whole else ""
            raise CheckpointError(f"{damage}: restore the file from a copy{advice}.")

    def _fetch_best(self) -> None:
        path = self._folder.parent / BEST_FILE
        if not (self._run_storage and self._storage) or path.exists():
            return
        if data := self._run_storage.read(BEST_FILE):
            best = self._storage.child(msgspec.json.decode(data, type=BestEntry).checkpoint.name)
            if best.manifest() is not None:
                best.download(self._folder / PurePosixPath(best.uri).name)
                write_durably(path, data)


def _age(name: str) -> tuple[int, int]:
    """Life and step, for sorting by age; (0, 0) for other names."""
    found = _NAME.match(name)
    return (int(found[2] or 1), int(found[1])) if found else (0, 0)
