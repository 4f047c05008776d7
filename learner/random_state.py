"""The state of every random number generator of a rank: torch, CUDA, numpy, Python."""

import random
from pathlib import Path

import numpy as np
import torch

from buffer.codec import decode, encode
from buffer.errors import Refused
from buffer.trajectory import Record
from learner.errors import CheckpointFault


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
    """Take back what was saved. Raises CheckpointFault."""
    try:
        state = decode(path.read_bytes(), RandomState)
    except (OSError, Refused) as error:
        raise CheckpointFault(f"{path} must be a readable part of a checkpoint, got {error}") from error
    torch.set_rng_state(torch.from_numpy(state.torch_state.copy()))
    if torch.cuda.is_available() and len(state.cuda_state):
        torch.cuda.set_rng_state(torch.from_numpy(state.cuda_state.copy()))
    keys = state.numpy_keys.astype(np.uint32)
    np.random.set_state(("MT19937", keys, state.numpy_position, *state.numpy_gauss))
    random.setstate((state.python_version, tuple(state.python_keys), state.python_gauss))
