"""Checkpoints: the state that a run resumes from, complete whenever a crash happens.

A checkpoint is written to `draft/`, synced, and renamed. It counts only once the store points at it
(`RunState.checkpoint`): that pointer moves in the same atomic operation that retires the groups the checkpoint covers.

<folder>/step-00000050/state.json        CheckpointState
<folder>/step-00000050/model/            weights in transformers format, with tokenizer
<folder>/step-00000050/optimizer-rank-*  master weights and moments of each rank
<folder>/step-00000050/random-rank-*     random number generators of each rank
<folder>/step-00000050/reference/        the reference policy, where it is refreshed
<folder>/step-00000050/critic/           model/ and optimizer-rank-* of the critic, where there is one
"""

import random
import shutil
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.buffer.codec import decode, encode
from slipstream.buffer.durable_files import sync_path
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import Record
from slipstream.configs.learner import DeepSpeedEngineConfig
from slipstream.configs.load import config_hash
from slipstream.configs.run import RunConfig
from slipstream.learner.engines.engine import TrainEngine
from slipstream.learner.engines.optimizer import named_parameters
from slipstream.learner.errors import CheckpointError, ModelError
from slipstream.learner.ranks import Ranks
from slipstream.learner.training.critic import load_value_model, save_value_model
from slipstream.learner.training.model import Policy, load_policy, save_pretrained
from slipstream.learner.training.trainer import Trainer

_REFERENCE = "reference"
_CRITIC = "critic"


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
    objective: dict[str, float] = {}
    """State that the objective carries from step to step: `ObjectiveState.save`."""


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

    def prune(self, *, pinned: str) -> None:
        """Delete all but the newest `keep`, and never `pinned`, at which the store points."""
        for name in self.names()[: -self._run.learner.checkpoint.keep]:
            if name != pinned:
                shutil.rmtree(self._folder / name, ignore_errors=True)

    # --- saving --------------------------------------------------------------------------------------------------
    def save(self, *, step: int, version: int) -> str:
        """Write a checkpoint that covers `step`, durable on return; returns its name (on rank 0)."""
        name = ""
        draft = self._folder / "draft"
        if self._ranks.is_first:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        self._ranks.barrier()
        self._trainer.engine.save_state(draft)
        save_random_state(draft / f"random-rank-{self._ranks.rank}")
        save_model(self._trainer, draft / "model", run=self._run, ranks=self._ranks)
        self._save_critic(draft / _CRITIC)
        # The rename declares the draft complete: every rank must have written its files before.
        self._ranks.barrier()
        if self._ranks.is_first:
            self._save_reference(draft / _REFERENCE)
            name = self._finish(draft, step=step, version=version)
        self._ranks.barrier()
        return name

    def _save_reference(self, folder: Path) -> None:
        """Write the reference policy, if it is refreshed; else it is the initial policy."""
        reference = self._trainer.reference
        if reference is not None and self._run.algorithm.kl.refresh_every_steps:
            weights = {name: parameter.detach().cpu() for name, parameter in named_parameters(reference.causal_lm)}
            save_pretrained(reference, folder, weights=weights, config=self._run.model)

    def _save_critic(self, folder: Path) -> None:
        if not (critic := self._trainer.critic):
            return
        if self._ranks.is_first:
            folder.mkdir()
        self._ranks.barrier()
        critic.engine.save_state(folder)
        weights = gather_to_first(critic.engine, ranks=self._ranks)
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
            objective=self._trainer.objective.state.save(),
        )
        (draft / "state.json").write_bytes(msgspec.json.encode(state))
        # Contents before the name: after the rename the checkpoint must survive a power failure.
        for path in (*draft.rglob("*"), draft):
            sync_path(path)
        # A step that was rolled back and trained again gets a new name: the store may still point at the old one.
        names = [f"step-{step:08d}", *(f"step-{step:08d}.{repeat}" for repeat in range(2, 1000))]
        folder = next(self._folder / name for name in names if not (self._folder / name).exists())
        draft.rename(folder)
        sync_path(self._folder)
        return folder.name

    # --- restoring -----------------------------------------------------------------------------------------------
    def restore(self, name: str) -> CheckpointState:
        """Load a checkpoint into the trainer. Raises CheckpointError."""
        folder = self._folder / name
        state = _read_state(folder)
        self._check_fits(folder, state)
        policy = self._read_policy(folder / "model")
        weights = {name: parameter.detach() for name, parameter in named_parameters(policy.causal_lm)}
        self._trainer.engine.restore_state(folder, weights=weights)
        self._trainer.num_updates = state.num_updates
        self._trainer.objective.state.restore(state.objective)
        if self._trainer.reference is not None and self._run.algorithm.kl.refresh_every_steps:
            self._trainer.reference.load_state_dict(self._read_policy(folder / _REFERENCE).state_dict())
        self._restore_critic(folder / _CRITIC, num_updates=state.critic_updates)
        # Last, because loading a model may draw random numbers.
        restore_random_state(folder / f"random-rank-{self._ranks.rank}")
        self._ranks.barrier()
        return state

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

    def _read_policy(self, folder: Path) -> Policy:
        config = msgspec.structs.replace(self._run.model, path=str(folder))
        return load_policy(config, device=self._trainer.engine.device)


def save_model(trainer: Trainer, folder: Path, *, run: RunConfig, ranks: Ranks) -> None:
    """Write the weights (float32, transformers format) and the tokenizer. Collective; rank 0 writes."""
    weights = gather_to_first(trainer.engine, ranks=ranks)
    if ranks.is_first:
        save_pretrained(trainer.engine.model, folder, weights=weights, config=run.model)


def gather_to_first(engine: TrainEngine, *, ranks: Ranks) -> dict[str, Tensor]:
    """All parameters in host memory on rank 0, nothing on the others. Collective."""
    return {name: tensor.cpu() for name, tensor in engine.gather_parameters() if ranks.is_first}


def _engine_name(run: RunConfig) -> str:
    engine = run.learner.engine
    return f"zero-{engine.zero_stage}" if isinstance(engine, DeepSpeedEngineConfig) else "torch"


def _read_state(folder: Path) -> CheckpointState:
    try:
        return msgspec.json.decode((folder / "state.json").read_bytes(), type=CheckpointState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{folder} must be a complete checkpoint, got {error}: put it back, or start a new run with model.path set "
            "to another one beside it."
        ) from error
