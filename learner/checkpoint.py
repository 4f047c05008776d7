"""Checkpoints: what a run resumes from, written so that a crash at any moment leaves a whole one.

The store says which one that is (`RunState.checkpoint`): the pointer moves in the instant in which the groups that the
checkpoint covers are retired.

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
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.redis.fsync import sync_path
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


# @@ The state of every random number generator of a rank: torch, CUDA, numpy, Python.
class RandomState(Record):
    """Taken between two steps."""

    torch_state: np.ndarray
    """uint8, `torch.get_rng_state`."""
    cuda_state: np.ndarray
    """uint8, of the current device; empty without one."""
    numpy_keys: np.ndarray
    """int64[624], of numpy's global generator."""
    numpy_position: int
    """Of numpy's global generator."""
    numpy_gauss: tuple[int, float]
    """Whether it holds a spare normal number, and which."""
    python_version: int
    """Of the state's format."""
    python_keys: list[int]
    """Of Python's global generator."""
    python_gauss: float | None
    """Its spare normal number."""


def save_random_state(path: Path) -> None:
    """Write the current state."""
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
    """Take back what was saved. Raises CheckpointError."""
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


_REFERENCE = "reference"
_CRITIC = "critic"


class CheckpointState(Record):
    """Where a run stood. Example: CheckpointState(step=50, version=50, num_updates=50, seed=0, engine="zero-0", ...)"""

    step: int
    """Last step that is in the weights."""
    version: int
    """Policy version of the weights."""
    num_updates: int
    """Optimizer updates made."""
    seed: int
    """Of the run."""
    config_hash: str
    """Of the run's settings, for the record."""
    engine: str
    """`torch` or `zero-<stage>`."""
    num_ranks: int
    """Learner ranks that wrote it."""
    critic_updates: int = 0
    """Optimizer updates of the critic."""
    objective: dict[str, float] = {}
    """What the objective carries from step to step: `ObjectiveState.save`."""


class Checkpoints:
    """Saves and restores a trainer. Collective; only rank 0 touches shared files."""

    def __init__(self, folder: Path, *, run: RunConfig, trainer: Trainer, ranks: Ranks) -> None:
        self._folder = folder
        self._run = run
        self._trainer = trainer
        self._ranks = ranks

    def save(self, *, step: int, version: int) -> str:
        """Write a checkpoint that covers `step`, durable when this returns; returns its name (on rank 0)."""
        name = ""
        draft = self._folder / "draft"
        if self._ranks.is_first:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        self._ranks.wait_for_all()
        self._trainer.engine.save_state(draft)
        save_random_state(draft / f"random-rank-{self._ranks.rank}")
        save_model(self._trainer, draft / "model", run=self._run, ranks=self._ranks)
        self._save_critic(draft / _CRITIC)
        self._ranks.wait_for_all()
        if self._ranks.is_first:
            self._save_reference(draft / _REFERENCE)
            name = self._finish(draft, self._describe(step=step, version=version))
        self._ranks.wait_for_all()
        return name

    def names(self) -> list[str]:
        """Of the whole checkpoints there are, oldest first."""
        places = sorted(self._folder.glob("step-*"), key=lambda place: place.stat().st_mtime_ns)
        return [place.name for place in places]

    def prune(self, *, keeping: str) -> None:
        """Remove old ones beyond `keep`, never `keeping`: what the store points at must be there."""
        for name in self.names()[: -self._run.learner.checkpoint.keep]:
            if name != keeping:
                shutil.rmtree(self._folder / name, ignore_errors=True)

    def restore(self, name: str) -> CheckpointState:
        """Put a checkpoint into the trainer. Raises CheckpointError."""
        place = self._folder / name
        state = _read_state(place)
        self._check_fits(place, state)
        self._trainer.engine.restore_state(place, weights=self._read_weights(place))
        self._trainer.num_updates = state.num_updates
        self._trainer.objective.state.restore(state.objective)
        self._restore_reference(place)
        self._restore_critic(place / _CRITIC, num_updates=state.critic_updates)
        restore_random_state(place / f"random-rank-{self._ranks.rank}")
        self._ranks.wait_for_all()
        return state

    def _describe(self, *, step: int, version: int) -> CheckpointState:
        return CheckpointState(
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

    def _save_reference(self, folder: Path) -> None:
        """Only where it is no longer the initial policy."""
        reference = self._trainer.reference
        if reference is not None and self._run.algorithm.kl.refresh_every_steps:
            weights = {name: parameter.detach().cpu() for name, parameter in named_parameters(reference.causal_lm)}
            save_pretrained(reference, folder, weights=weights, config=self._run.model)

    def _restore_reference(self, place: Path) -> None:
        if self._trainer.reference is not None and self._run.algorithm.kl.refresh_every_steps:
            self._trainer.reference.load_state_dict(self._read_policy(place / _REFERENCE).state_dict())

    def _save_critic(self, folder: Path) -> None:
        """Collective."""
        if not (critic := self._trainer.critic):
            return
        if self._ranks.is_first:
            folder.mkdir()
        self._ranks.wait_for_all()
        critic.engine.save_state(folder)
        weights = gather_to_first(critic.engine, ranks=self._ranks)
        if self._ranks.is_first:
            save_value_model(critic.engine.model, folder / "model", weights=weights)

    def _restore_critic(self, folder: Path, *, num_updates: int) -> None:
        if not (critic := self._trainer.critic):
            return
        config = msgspec.structs.replace(self._run.model, path=str(folder / "model"))
        try:
            weights = dict(load_value_model(config, device=critic.engine.device).weights())
        except ModelError as fault:
            raise CheckpointError(
                f"{folder} must hold the critic that algorithm.advantage needs, got: {fault} Resume with the advantage "
                "it was written with, or start a new run."
            ) from fault
        critic.engine.restore_state(folder, weights={name: weight.detach() for name, weight in weights.items()})
        critic.num_updates = num_updates

    def _finish(self, draft: Path, state: CheckpointState) -> str:
        (draft / "state.json").write_bytes(msgspec.json.encode(state))
        _sync_tree(draft)
        place = self._unused_place(state.step)
        draft.rename(place)
        sync_path(self._folder)
        return place.name

    def _unused_place(self, step: int) -> Path:
        """A step that was rolled back and made again gets a name of its own: the pointed-at one stays whole."""
        names = [f"step-{step:08d}", *(f"step-{step:08d}.{again}" for again in range(2, 1000))]
        return next(self._folder / name for name in names if not (self._folder / name).exists())

    def _check_fits(self, place: Path, state: CheckpointState) -> None:
        wanted = {"learner/engine": _engine_name(self._run), "learner.num_ranks": self._ranks.size}
        found = {"learner/engine": state.engine, "learner.num_ranks": state.num_ranks}
        if wanted != found:
            raise CheckpointError(
                f"{place} must have been written with {wanted}, got {found}: resume with those settings, or start a "
                f"new run with model.path={place / 'model'}."
            )

    def _read_weights(self, place: Path) -> dict[str, Tensor]:
        policy = self._read_policy(place / "model")
        return {name: parameter.detach() for name, parameter in named_parameters(policy.causal_lm)}

    def _read_policy(self, folder: Path) -> Policy:
        config = msgspec.structs.replace(self._run.model, path=str(folder))
        return load_policy(config, device=self._trainer.engine.device)


def save_model(trainer: Trainer, folder: Path, *, run: RunConfig, ranks: Ranks) -> None:
    """Write the weights (float32, transformers format) and the tokenizer. Collective; rank 0 writes."""
    weights = gather_to_first(trainer.engine, ranks=ranks)
    if ranks.is_first:
        save_pretrained(trainer.engine.model, folder, weights=weights, config=run.model)


def gather_to_first(engine: TrainEngine, *, ranks: Ranks) -> dict[str, Tensor]:
    """All parameters in host memory of rank 0, nothing on the others. Collective."""
    return {name: tensor.cpu() for name, tensor in engine.gather_parameters() if ranks.is_first}


def _engine_name(run: RunConfig) -> str:
    engine = run.learner.engine
    return f"zero-{engine.zero_stage}" if isinstance(engine, DeepSpeedEngineConfig) else "torch"


def _read_state(place: Path) -> CheckpointState:
    try:
        return msgspec.json.decode((place / "state.json").read_bytes(), type=CheckpointState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{place} must be a whole checkpoint, got {error}: put it back, or start a new run with model.path= one of "
            "the others beside it."
        ) from error


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)
