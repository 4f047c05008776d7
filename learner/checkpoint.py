"""Checkpoints: the state that a run resumes from, complete whenever a crash happens.

A checkpoint is written to `draft/`, synced, and renamed. It counts only once the store points at it
(`RunState.checkpoint`): that pointer moves in the same atomic operation that retires the groups the checkpoint covers.

<folder>/step-00000050/state.json        CheckpointState
<folder>/step-00000050/model/            weights in transformers format, with tokenizer; an adapter merged into them
<folder>/step-00000050/model/adapter/    the adapter alone, in peft's format, where one is trained
<folder>/step-00000050/optimizer-rank-*  master weights and moments of each rank
<folder>/step-00000050/random-rank-*     random number generators of each rank
<folder>/step-00000050/reference/        the reference policy, where it is refreshed
<folder>/step-00000050/critic/           model/ and optimizer-rank-* of the critic, where there is one
<folder>/step-00000050/checksums.json    xxh3-64 of every other file, checked before anything is loaded
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from slipstream.buffer.codec import decode, encode
from slipstream.buffer.durable_files import sync_path
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import Record
from slipstream.configs.learner import DeepSpeedEngineConfig
from slipstream.configs.load import config_hash
from slipstream.configs.run import RunConfig
from slipstream.learner.engines.engine import ModelEngine
from slipstream.learner.engines.optimizer import named_weights, read_tensors
from slipstream.learner.errors import CheckpointError, ModelError
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.critic import load_value_model, save_value_model
from slipstream.learner.training.model import Policy, is_sharded, load_policy, save_pretrained
from slipstream.learner.training.trainer import Trainer
from slipstream.runtime.disk import is_disk_full
from slipstream.runtime.lora import ADAPTER_FILE
from slipstream.runtime.model_files import weight_files

_REFERENCE = "reference"
_CRITIC = "critic"
_STATE = "state.json"
CHECKSUMS = "checksums.json"
_HASH_BLOCK_BYTES = 4 * 2**20
_MAX_HASH_THREADS = 8
"""One thread reads about as fast as one disk; the hash lets go of the interpreter's lock."""


# --- random number generators ----------------------------------------------------------------------------------------
class RandomState(Record):
    """State of the random number generators of one rank, taken between two steps."""

    torch_state: np.ndarray
    """uint8, `torch.get_rng_state`."""
    cuda_state: np.ndarray
    """uint8, of the current device; empty without one."""
    numpy_keys: np.ndarray
    """int64[624], of numpy's global generator."""
    numpy_position: int
    numpy_gauss: tuple[int, float]
    """Whether a spare normal number is stored, and its value."""
    python_version: int
    """Version of the state format of `random`."""
    python_keys: list[int]
    python_gauss: float | None
    """Spare normal number; None without one."""


def save_random_state(path: Path) -> None:
    """Write the state of all generators of this process."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, python_keys, python_gauss = random.getstate()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0, dtype=torch.uint8)
    state = RandomState(
        torch_state=torch.get_rng_state().numpy(),
        cuda_state=cuda_state.numpy(),
        numpy_keys=np.asarray(keys).astype(np.int64),
        numpy_position=int(position),
        numpy_gauss=(int(has_gauss), float(gauss)),
        python_version=version,
        python_keys=list(python_keys),
        python_gauss=python_gauss,
    )
    path.write_bytes(encode(state))


def restore_random_state(path: Path) -> None:
    """Inverse of `save_random_state`. Raises CheckpointError."""
    try:
        state = decode(path.read_bytes(), RandomState)
    except (OSError, RecordRefusedError) as error:
        raise CheckpointError(f"{path} must be a readable part of a checkpoint, got {error}") from error
    torch.set_rng_state(torch.from_numpy(state.torch_state.copy()))
    if torch.cuda.is_available() and len(state.cuda_state):
        torch.cuda.set_rng_state(torch.from_numpy(state.cuda_state.copy()))
    keys = state.numpy_keys.astype(np.uint32)
    np.random.set_state(("MT19937", keys, state.numpy_position, *state.numpy_gauss))
    random.setstate((state.python_version, tuple(state.python_keys), state.python_gauss))


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
    """`torch` or `zero-<stage>`, which must be the same to resume."""
    num_ranks: int
    """Learner ranks that wrote it."""
    critic_updates: int = 0
    """Optimizer updates of the critic."""
    base: dict[str, str] = {}
    """Checksums of the files of the model that an adapter was trained on; empty without an adapter."""
    objective: dict[str, float] = {}
    """State that the objective carries from step to step: `ObjectiveState.save`."""


class _Writes:
    """Writes of all ranks to one folder: those that a full disk refuses are undone on every rank together.

    Life: (attempt* -> agree)*.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder = folder
        self._ranks = ranks
        self._error: Exception | None = None

    def attempt(self, write: Callable[[], object]) -> None:
        """Call `write`, which must take part in its collectives before it writes; a full disk is kept for `agree`."""
        try:
            write()
        except Exception as error:
            if not is_disk_full(error):
                raise
            self._error = error

    def agree(self) -> None:
        """Wait for all ranks; raise OSError on each and delete the folder if one has met a full disk. Collective."""
        # A rank that raised alone would leave the others in their next collective.
        if not self._ranks.max(torch.tensor([float(self._error is not None)])).item():
            return
        if self._ranks.is_first:
            shutil.rmtree(self._folder, ignore_errors=True)
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({self._error or 'on another rank'})")


class Checkpoints:
    """Saves and restores a trainer. Every method but `names` and `prune` is collective; rank 0 writes shared files."""

    def __init__(self, folder: Path, *, run: RunConfig, trainer: Trainer, ranks: Ranks) -> None:
        self._folder = folder
        self._run = run
        self._trainer = trainer
        self._ranks = ranks

    def names(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        folders = sorted(self._folder.glob("step-*"), key=lambda folder: folder.stat().st_mtime_ns)
        return [folder.name for folder in folders]

    def prune(self, *, pinned: Set[str]) -> None:
        """Delete all but the newest `keep`, and none that is `pinned`."""
        for name in self.names()[: -self._run.learner.checkpoint.keep]:
            if name not in pinned:
                shutil.rmtree(self._folder / name, ignore_errors=True)

    @cached_property
    def _base(self) -> dict[str, str]:
        """Checksums of the model that an adapter is trained on."""
        path = self._run.model.path
        return {file.name: _checksum(file) for file in weight_files(path)} if self._run.model.lora else {}

    # --- saving --------------------------------------------------------------------------------------------------
    def save(self, *, step: int, version: int) -> str:
        """Write a checkpoint that covers `step`, durable on return; returns its name (on rank 0).

        Raises OSError on every rank when one has no room on its disk; nothing is left then, and it may be called again.
        """
        draft, names = self._folder / "draft", list[str]()
        writes = _Writes(draft, self._ranks)
        if self._ranks.is_first:
            writes.attempt(lambda: self._make_folders(draft))
        writes.agree()
        writes.attempt(lambda: self._trainer.engine.save_state(draft))
        writes.attempt(lambda: save_random_state(draft / f"random-rank-{self._ranks.rank}"))
        writes.attempt(lambda: save_model(self._trainer, draft / "model", run=self._run, ranks=self._ranks))
        writes.attempt(lambda: self._save_critic(draft / _CRITIC))
        writes.attempt(lambda: self._save_reference(draft / _REFERENCE))
        # The rename declares the draft complete: every rank must have written its files before.
        writes.agree()
        if self._ranks.is_first:
            writes.attempt(lambda: names.append(self._finish(draft, step=step, version=version)))
        writes.agree()
        return names[0] if names else ""

    def _make_folders(self, draft: Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        if self._trainer.critic:
            (draft / _CRITIC).mkdir()

    def _save_reference(self, folder: Path) -> None:
        """Write the reference policy, if it is refreshed; else it is the initial policy."""
        if reference := self._trainer.reference:
            weights = gather_to_first(reference, ranks=self._ranks)
            if self._ranks.is_first:
                save_pretrained(reference.model, folder, weights=weights, config=self._run.model)

    def _save_critic(self, folder: Path) -> None:
        if not (critic := self._trainer.critic):
            return
        # Gathered first: that takes every rank, also those whose disk is full.
        weights = gather_to_first(critic.engine, ranks=self._ranks)
        critic.engine.save_state(folder)
        if self._ranks.is_first:
            save_value_model(critic.engine.model, folder / "model", weights=weights)

    def _finish(self, draft: Path, *, step: int, version: int) -> str:
        state = CheckpointState(
            step=step,
            version=version,
            num_updates=self._trainer.num_updates,
            critic_updates=self._trainer.critic.num_updates if self._trainer.critic else 0,
            seed=self._run.seed,
            config_hash=config_hash(self._run),
            engine=_engine_name(self._run),
            num_ranks=self._ranks.size,
            base=self._base,
            objective=self._trainer.objective.state.save(),
        )
        (draft / _STATE).write_bytes(msgspec.json.encode(state))
        seal(draft)
        # A step that was rolled back and trained again gets a new name: the store may still point at the old one.
        names = [f"step-{step:08d}", *(f"step-{step:08d}.{repeat}" for repeat in range(2, 1000))]
        folder = next(self._folder / name for name in names if not (self._folder / name).exists())
        draft.rename(folder)
        sync_path(self._folder)
        return folder.name

    # --- restoring -----------------------------------------------------------------------------------------------
    def restore(self, name: str) -> CheckpointState:
        """Load a checkpoint into the trainer. Raises CheckpointError, and for damaged files before it loads any."""
        folder = self._folder / name
        state = _read_state(folder)
        # Rank 0 alone reads them all; the others load nothing before it has.
        if self._ranks.is_first and (damage := find_damage(folder)):
            raise CheckpointError(f"{damage}: restore the file from a copy{self._advise_other(name)}.")
        if self._ranks.is_first and state.base != self._base:
            raise CheckpointError(
                f"model.path must hold the model that the adapter in {folder} was trained on, got other weights in "
                f"{self._run.model.path}: put them back, or start a new run with model.path={folder / 'model'}."
            )
        self._ranks.barrier()
        self._check_fits(folder, state)
        self._trainer.engine.restore_state(folder, weights=self._read_weights(folder / "model"))
        self._trainer.num_updates = state.num_updates
        self._trainer.objective.state.restore(state.objective)
        if reference := self._trainer.reference:
            reference.load_parameters(self._read_weights(folder / _REFERENCE).items())
        self._restore_critic(folder / _CRITIC, num_updates=state.critic_updates)
        # Last, because loading a model may draw random numbers.
        restore_random_state(folder / f"random-rank-{self._ranks.rank}")
        self._ranks.barrier()
        return state

    def _advise_other(self, damaged: str) -> str:
        """Return advice to begin a new run with the newest checkpoint that is whole."""
        others = (self._folder / name for name in reversed(self.names()) if name != damaged)
        whole = next((folder for folder in others if not find_damage(folder)), None)
        return f", or start a new run with model.path={whole / 'model'}" if whole else ""

    def _restore_critic(self, folder: Path, *, num_updates: int) -> None:
        if not (critic := self._trainer.critic):
            return
        config = msgspec.structs.replace(self._run.model, path=str(folder / "model"))
        try:
            weights = dict(load_value_model(config, device=critic.engine.device).weights())
        except ModelError as error:
            raise CheckpointError(
                f"{folder} must hold the critic that algorithm.advantage needs, got: {error} Resume with the advantage "
                "it was written with, or start a new run."
            ) from error
        critic.engine.restore_state(folder, weights={name: weight.detach() for name, weight in weights.items()})
        critic.num_updates = num_updates

    def _check_fits(self, folder: Path, state: CheckpointState) -> None:
        expected = {"learner/engine": _engine_name(self._run), "learner.num_ranks": self._ranks.size}
        found = {"learner/engine": state.engine, "learner.num_ranks": state.num_ranks}
        if expected != found:
            raise CheckpointError(
                f"{folder} must have been written with {expected}, got {found}: resume with those settings, or start a "
                f"new run with model.path={folder / 'model'}."
            )

    def _read_weights(self, folder: Path) -> dict[str, Tensor]:
        """Read what is trained: the model, or its adapter alone; nothing where rank 0 deals out the shards."""
        if not self._ranks.is_first and is_sharded(self._trainer.engine.model):
            return {}
        if self._run.model.lora:
            return read_tensors(folder / ADAPTER_FILE)
        return {name: weight.detach() for name, weight in named_weights(self._read_policy(folder).causal_lm)}

    def _read_policy(self, folder: Path) -> Policy:
        config = msgspec.structs.replace(self._run.model, path=str(folder), lora=None)
        is_reward_model = self._run.trains_reward_model
        return load_policy(config, device=self._trainer.engine.device, is_reward_model=is_reward_model)


def save_model(trainer: Trainer, folder: Path, *, run: RunConfig, ranks: Ranks) -> None:
    """Write the weights (float32, transformers format) and the tokenizer. Collective; rank 0 writes."""
    weights = gather_to_first(trainer.engine, ranks=ranks, is_whole=True)
    if ranks.is_first:
        size = run.learner.checkpoint.max_shard_size
        save_pretrained(trainer.engine.model, folder, weights=weights, config=run.model, max_shard_size=size)


def gather_to_first(engine: ModelEngine, *, ranks: Ranks, is_whole: bool = False) -> dict[str, Tensor]:
    """All parameters in host memory on rank 0, nothing on the others; `is_whole`: see Trainable. Collective."""
    return {name: tensor.cpu() for name, tensor in engine.gather_parameters(is_whole=is_whole) if ranks.is_first}


def _engine_name(run: RunConfig) -> str:
    engine = run.learner.engine
    return f"zero-{engine.zero_stage}" if isinstance(engine, DeepSpeedEngineConfig) else "torch"


# --- damage ----------------------------------------------------------------------------------------------------------
def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of every file but that of the checksums, by its path within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    with ThreadPoolExecutor(min(_MAX_HASH_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip((str(path.relative_to(folder)) for path in files), pool.map(_checksum, files), strict=True))


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def seal(draft: Path) -> None:
    """Write the checksums of a folder and sync it all: only a rename is missing then. Raises OSError."""
    (draft / CHECKSUMS).write_bytes(msgspec.json.encode(_checksums(draft)))
    # Contents before the name: after the rename the folder must survive a power failure.
    for path in (*draft.rglob("*"), draft):
        sync_path(path)


def find_damage(folder: Path) -> str:
    """Return which file of a checkpoint is not as it was written, as the beginning of a sentence; empty if none."""
    path = folder / CHECKSUMS
    try:
        expected = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        found = _checksums(folder)
    except (OSError, msgspec.MsgspecError) as error:
        return f"{path} must hold the checksums of its checkpoint, got {error}"
    name = next((name for name in sorted(expected | found) if expected.get(name) != found.get(name)), None)
    if name is None:
        return ""
    return (
        f"{folder / name} must have the checksum it was written with ({expected.get(name, 'none')}), got "
        f"{found.get(name, 'no file')}"
    )


def _read_state(folder: Path) -> CheckpointState:
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=CheckpointState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{folder} must be a complete checkpoint, got {error}: put it back, or start a new run with model.path set "
            "to another one beside it."
        ) from error
