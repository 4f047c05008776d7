"""Checkpoints: the state that a run resumes from, complete whenever a crash happens.

A save copies the state to host memory, which training waits for; the files are written in the background. A checkpoint
counts only once the store points at it (`RunState.checkpoint`): that pointer moves in the same atomic operation that
retires the groups the checkpoint covers. With ranks on several machines each machine has the files of its own ranks;
with `storage_uri` the object store has all of them before the pointer moves.

<folder>/step-00000050/state.json        CheckpointState
<folder>/step-00000050/model/            weights in transformers format, with tokenizer; an adapter merged into them
<folder>/step-00000050/model/adapter/    the adapter alone, in peft's format, where one is trained
<folder>/step-00000050/optimizer-rank-*  moments by parameter, in the parts that each rank held: any layout reads them
<folder>/step-00000050/reference/        the reference policy, where it is refreshed
<folder>/step-00000050/critic/           model/ and optimizer-rank-* of the critic, where there is one
<folder>/step-00000050/checksums.json    xxh3-64 of every other file, checked before anything is loaded
"""

import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Set
from functools import cached_property, partial
from pathlib import Path, PurePosixPath

import msgspec
import numpy as np
import structlog
import torch
from torch import Tensor

from slipstream.buffer.durable_files import write_durably
from slipstream.buffer.object_folder import open_storage
from slipstream.buffer.records import CheckpointPointer
from slipstream.buffer.sealed_folder import CHECKSUMS, checksum, checksums_of, find_damage
from slipstream.buffer.trajectory import Record
from slipstream.configs.learner import DeepSpeedEngineConfig
from slipstream.configs.load import config_hash
from slipstream.configs.run import RunConfig
from slipstream.learner.background_save import BackgroundSaver, RankFolders, Write, delete_checkpoint, write_tensors
from slipstream.learner.best_checkpoint import BEST_FILE, BestEntry
from slipstream.learner.engines.engine import ModelEngine
from slipstream.learner.engines.optimizer import STATE_FILE, named_weights, read_tensors
from slipstream.learner.errors import CheckpointError, ModelError
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.critic import load_value_model, save_value_model
from slipstream.learner.training.load import is_sharded
from slipstream.learner.training.model import load_policy, save_pretrained
from slipstream.learner.training.trainer import Trainer
from slipstream.runtime.lora import ADAPTER_FILE
from slipstream.runtime.model_files import weight_files

_REFERENCE = "reference"
_CRITIC = "critic"
_STATE = "state.json"

log = structlog.get_logger(__name__)


# --- checkpoints -----------------------------------------------------------------------------------------------------
class CheckpointState(Record):
    """Progress of a run.

    Example: CheckpointState(step=50, version=50, num_updates=50, seed=0, config_hash="5f3a…", engine="zero-0",
        num_ranks=1)
    """

    step: int
    """Last step that the weights include."""
    version: int
    """Policy version of the weights."""
    num_updates: int
    """Optimizer updates of the policy so far."""
    seed: int
    config_hash: str
    engine: str
    """`torch` or `zero-<stage>`, which wrote it; another may resume."""
    num_ranks: int
    """Learner ranks that wrote it."""
    critic_updates: int = 0
    """Optimizer updates of the critic."""
    base: dict[str, str] = {}
    """Checksums of the files of the model that an adapter was trained on; empty without an adapter."""
    objective: dict[str, float] = {}
    """State that the objective carries from step to step: `ObjectiveState.save`."""


class Checkpoints:
    """Saves and restores a trainer. Construction, `save`, `flush` and `restore` are collective; rank 0 writes shared
    files."""

    def __init__(self, folder: Path, *, run: RunConfig, trainer: Trainer, ranks: Ranks) -> None:
        self._folder = folder
        self._run = run
        self._trainer = trainer
        self._ranks = ranks
        self._folders = RankFolders(folder, ranks)
        self._run_storage = open_storage(run) if self._folders.is_leader else None
        self._storage = self._run_storage and self._run_storage.child(folder.name)
        self.saver = BackgroundSaver(
            folder,
            ranks=ranks,
            folders=self._folders,
            in_background=not run.is_one_process,
            storage=self._storage,
        )
        """Writes what `save` has copied."""

    def names(self) -> list[str]:
        """Names of the complete checkpoints in this rank's folder, or else in the object store, oldest first."""
        folders = [path.parent for path in self._folder.glob(f"step-*/{CHECKSUMS}")]
        if not folders and self._storage:
            return self._storage.names()
        return [folder.name for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime_ns)]

    def newest_model(self) -> str:
        """Place of the newest checkpoint's model, in words; empty without a checkpoint."""
        if not (names := self.names()):
            return ""
        folder = self._folder / names[-1]
        if self._storage and not folder.is_dir():
            return f"a copy of {self._storage.child(names[-1]).uri}/model"
        return f"{folder}/model"

    def prune(self, *, pinned: Set[str]) -> None:
        """Delete all but the newest `keep`, and none that is `pinned`, here and in the object store.

        Other machines follow when the next save begins.
        """
        keep = self._run.learner.checkpoint.keep
        self._keep({*self.names()[-keep:], *pinned})
        if self._run_storage and self._storage:
            best = self._folder.parent / BEST_FILE
            # Before its predecessor goes.
            if best.is_file():
                self._run_storage.write(BEST_FILE, best.read_bytes())
            self._storage.prune(keep=keep, pinned=pinned)

    def upload(self, folders: Iterable[Path]) -> None:
        """Begin to send folders of the run to the object store, if there is one; `saver.flush` waits for it."""
        if storage := self._run_storage:

            def work() -> None:
                for folder in folders:
                    remote = storage.child(folder.name)
                    remote.upload(folder, checksums_of(folder))
                    remote.seal()
                    log.info("uploaded", uri=remote.uri)

            self.saver.run(work)

    def _keep(self, names: Set[str]) -> None:
        for folder in self._folder.glob("step-*"):
            if folder.name not in names:
                delete_checkpoint(folder)

    @cached_property
    def _base(self) -> dict[str, str]:
        """Checksums of the model that an adapter is trained on."""
        path = self._run.model.path
        return {file.name: checksum(file) for file in weight_files(path)} if self._run.model.lora else {}

    # --- saving --------------------------------------------------------------------------------------------------
    def save(
        self, *, step: int, version: int, finish: Callable[[CheckpointPointer], object] = lambda pointer: None
    ) -> CheckpointPointer:
        """Begin a checkpoint that covers `step`; on return its state is copied, and its name settled.

        Waits for the save before, and raises what that raised. Once the checkpoint is durable, rank 0 calls `finish`
        in the thread that wrote it; in a serial run all that happens before the return.
        """
        began_at = time.monotonic()
        self.saver.flush()
        chosen = [part.encode() for part in self._begin(step)] if self._ranks.is_first else None
        name, draft, *kept = (part.decode() for part in self._ranks.broadcast_bytes(chosen))
        if self._folders.is_leader and not self._ranks.is_first:
            self._delete_drafts(but=draft)
            self._keep(set(kept))
        pointer = CheckpointPointer(step, version, name)
        waited_s = time.monotonic() - began_at
        writes = self._copy(step=step, version=version)
        log.info("checkpoint", name=name, waited_s=round(waited_s, 3), stall_s=round(time.monotonic() - began_at, 3))
        self._seed_generators(step=step)
        self.saver.start(draft, writes, name=name, finish=lambda: finish(pointer))
        return pointer

    def _begin(self, step: int) -> list[str]:
        """Return the name of the checkpoint, that of its draft, and those of all before it that are kept.

        What crashes left of earlier ones is deleted.
        """
        self._delete_drafts()
        # A name of its own, in which no rank of a learner before this one can write.
        mark = uuid.uuid4().hex[:8]
        # For an object store that holds of the whole name: a learner that was replaced may still run elsewhere.
        first = f"step-{step:08d}-{mark}" if self._run.storage_uri else f"step-{step:08d}"
        # A step that was rolled back and trained again gets a new name: the store may still point at the old one.
        names = [first, *(f"{first}.{repeat}" for repeat in range(2, 1000))]
        name = next(name for name in names if not (self._folder / name).exists())
        return [name, f"draft-{mark}", *(folder.name for folder in self._folder.glob("step-*"))]

    def _delete_drafts(self, *, but: str = "") -> None:
        # Another rank may have begun to write the new one.
        for draft in self._folder.glob("draft*"):
            if draft.name != but:
                shutil.rmtree(draft, ignore_errors=True)

    def _copy(self, *, step: int, version: int) -> list[Write]:
        """Copy this rank's part of the state to host memory; returns what writes it. Collective."""
        trainer, rank, is_first = self._trainer, self._ranks.rank, self._ranks.is_first
        layout = self._run.learner.engine
        writes: list[Write] = [
            partial(write_tensors, name=STATE_FILE.format(rank), tensors=trainer.engine.copy_state()),
        ]
        weights = gather_to_first(trainer.engine, ranks=self._ranks, is_whole=True)
        if is_first:
            writes.append(lambda folder: write_model(trainer, folder / "model", weights=weights, run=self._run))
            state = CheckpointState(
                step=step,
                version=version,
                num_updates=trainer.num_updates,
                critic_updates=trainer.critic.num_updates if trainer.critic else 0,
                seed=self._run.seed,
                config_hash=config_hash(self._run),
                engine=f"zero-{layout.zero_stage}" if isinstance(layout, DeepSpeedEngineConfig) else "torch",
                num_ranks=self._ranks.size,
                objective=trainer.objective.state.save(),
            )
            writes.append(lambda folder: self._write_state(folder / _STATE, state))
        if critic := trainer.critic:
            moments = critic.engine.copy_state()
            writes.append(
                partial(write_tensors, name=f"{_CRITIC}/{STATE_FILE.format(rank)}", tensors=moments),
            )
            values = gather_to_first(critic.engine, ranks=self._ranks)
            if is_first:
                model = critic.engine.model
                writes.append(lambda folder: save_value_model(model, folder / _CRITIC / "model", weights=values))
        # Without a refresh, the reference is the initial policy.
        if reference := trainer.reference:
            frozen = gather_to_first(reference, ranks=self._ranks)
            if is_first:
                policy, config = reference.model, self._run.model
                writes.append(
                    lambda folder: save_pretrained(policy, folder / _REFERENCE, weights=frozen, config=config)
                )
        return writes

    def _write_state(self, path: Path, state: CheckpointState) -> None:
        # Here, because the files of a large base take long to read.
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(state, base=self._base)))

    def _seed_generators(self, *, step: int) -> None:
        """Begin all random numbers of this process anew: a run goes on after a checkpoint as one resumed from it."""
        drawn = int(np.random.SeedSequence([self._run.seed, step, self._ranks.rank]).generate_state(1)[0])
        torch.manual_seed(drawn)
        np.random.seed(drawn)
        random.seed(drawn)

    # --- restoring -----------------------------------------------------------------------------------------------
    def restore(self, name: str) -> CheckpointState:
        """Load a checkpoint into the trainer. Raises CheckpointError, and for damaged files before it loads any."""
        folder = self._folder / name
        # As work of the saver, because another rank may fetch for longer than a collective may take.
        self.saver.run(lambda: self._make_whole(name))
        self.saver.flush()
        # Every machine needs all of a checkpoint: its ranks may hold other parts of the optimizer's state now.
        self._folders.complete(folder)
        state = _read_state(folder)
        if self._ranks.is_first and state.base != self._base:
            raise CheckpointError(
                f"model.path must hold the model that the adapter in {folder} was trained on, got other weights in "
                f"{self._run.model.path}: put them back, or start a new run with model.path={folder / 'model'}."
            )
        self._ranks.barrier()
        self._trainer.engine.restore_state(folder, weights=self._read_weights(folder / "model"))
        self._trainer.num_updates = state.num_updates
        self._trainer.objective.state.restore(state.objective)
        if reference := self._trainer.reference:
            reference.load_parameters(self._read_weights(folder / _REFERENCE).items())
        self._restore_critic(folder / _CRITIC, num_updates=state.critic_updates)
        # Last, because loading a model may draw random numbers.
        self._seed_generators(step=state.step)
        self._ranks.barrier()
        return state

    def _make_whole(self, name: str) -> None:
        """Check the files that this machine has of a checkpoint, and fetch the others from the object store."""
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
            raise CheckpointError(f"{damage}: restore the file from a copy{self._advise_other(name)}.")

    def _fetch_best(self) -> None:
        """Fetch the best checkpoint, and which one it is, if this machine does not know."""
        path = self._folder.parent / BEST_FILE
        if not (self._run_storage and self._storage) or path.exists():
            return
        if data := self._run_storage.read(BEST_FILE):
            best = self._storage.child(msgspec.json.decode(data, type=BestEntry).checkpoint.name)
            if best.manifest() is not None:
                best.download(self._folder / PurePosixPath(best.uri).name)
                write_durably(path, data)

    def _advise_other(self, damaged: str) -> str:
        """Return advice to begin a new run with the newest checkpoint that is whole."""
        others = (self._folder / name for name in reversed(self.names()) if name != damaged)
        whole = next((folder for folder in others if not find_damage(folder)), None)
        return f", or start a new run with model.path={whole / 'model'}" if whole else ""

    def _restore_critic(self, folder: Path, *, num_updates: int) -> None:
        if not (critic := self._trainer.critic):
            return
        config, weights = msgspec.structs.replace(self._run.model, path=str(folder / "model")), dict[str, Tensor]()
        try:
            if self._ranks.is_first or not is_sharded(critic.engine.model):
                weights = dict(load_value_model(config, device=critic.engine.device).weights())
        except ModelError as error:
            raise CheckpointError(
                f"{folder} must hold the critic that algorithm.advantage needs, got: {error} Resume with the advantage "
                "it was written with, or start a new run."
            ) from error
        critic.engine.restore_state(folder, weights={name: weight.detach() for name, weight in weights.items()})
        critic.num_updates = num_updates

    def _read_weights(self, folder: Path) -> dict[str, Tensor]:
        """Read what is trained: the model, or its adapter alone; nothing where rank 0 deals out the shards."""
        if not self._ranks.is_first and is_sharded(self._trainer.engine.model):
            return {}
        if self._run.model.lora:
            return read_tensors(folder / ADAPTER_FILE)
        config, is_reward_model = (
            msgspec.structs.replace(self._run.model, path=str(folder)),
            self._run.trains_reward_model,
        )
        policy = load_policy(config, device=self._trainer.engine.device, is_reward_model=is_reward_model)
        return {name: weight.detach() for name, weight in named_weights(policy.causal_lm)}


def save_model(trainer: Trainer, folder: Path, *, run: RunConfig, ranks: Ranks) -> None:
    """Write the weights (float32, transformers format) and the tokenizer. Collective; rank 0 writes."""
    weights = gather_to_first(trainer.engine, ranks=ranks, is_whole=True)
    if ranks.is_first:
        write_model(trainer, folder, weights=weights, run=run)


def write_model(trainer: Trainer, folder: Path, *, weights: dict[str, Tensor], run: RunConfig) -> None:
    """Write gathered weights in transformers format, and the tokenizer."""
    size = run.learner.checkpoint.max_shard_size
    save_pretrained(trainer.engine.model, folder, weights=weights, config=run.model, max_shard_size=size)


def gather_to_first(engine: ModelEngine, *, ranks: Ranks, is_whole: bool = False) -> dict[str, Tensor]:
    """Copies of all parameters in host memory on rank 0, nothing on the others; `is_whole`: see Trainable. Collective.

    A tied one is copied once.
    """
    first = dict[int, str]()
    owners = {name: first.setdefault(id(each), name) for name, each in engine.model.weights(is_whole=is_whole)}
    copies = dict[str, Tensor]()
    for name, tensor in engine.gather_parameters(is_whole=is_whole):
        if ranks.is_first:
            copies[name] = copies[owners[name]] if owners[name] in copies else tensor.to("cpu", copy=True)
    return copies


def _read_state(folder: Path) -> CheckpointState:
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=CheckpointState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{folder} must be a complete checkpoint, got {error}: put it back, or start a new run with model.path set "
            "to another one beside it."
        ) from error
