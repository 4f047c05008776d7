"""Microbatch: samples on their way into a forward pass, and the tensors they become."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence, and which of its tokens are trained on.

    Example: Sample(token_ids=[4, 8, 2, 1, 3, 10, 3, 1, 2, 8, 4, 11], trained=[6, 7, 8, 9, 10, 11], first_index=48,
        group_id="17", temperature=1.0)
    """

    token_ids: np.ndarray
    """int[T], prompt then response."""
    trained: np.ndarray
    """int64[W], indices of the tokens that are trained on, rising; never 0, which nothing predicts. May be empty."""
    first_index: int
    """Where the first of them stands in the columns of `Tokens`; the others follow it."""
    group_id: str
    """Samples of one group may begin with the same prompt, which is then computed once."""
    temperature: float = 1.0
    """What logits are divided by; above 0."""

    @property
    def indices(self) -> np.ndarray:
        """int64[W]: where each of them stands there."""
        return np.arange(self.first_index, self.first_index + len(self.trained))

    @property
    def num_inputs(self) -> int:
        """Tokens that must be read to predict the last trained one, which itself need not be read."""
        return int(self.trained[-1])


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass: R rows of L tokens holding several sequences each, and the N tokens whose loss is trained.

    A row holds branches (responses) and the prompts they continue: a prompt that several responses share is there once,
    `attention_mask` lets each response see it and not its siblings, and positions count along prompt and response.
    """

    token_ids: Int[Tensor, "R L"]
    """Input tokens; 0 in the padding at the end of a row."""
    position_ids: Int[Tensor, "R L"]
    """Position within the own sequence."""
    attention_mask: Bool[Tensor, "R 1 L L"] | None
    """Which token (last axis) each token sees; None: causal, restarted wherever `position_ids` restart."""
    sources: Int[Tensor, "N"]
    """Where each trained token is predicted: index into the flattened rows."""
    targets: Int[Tensor, "N"]
    """The trained tokens."""
    temperatures: Float[Tensor, "N"]
    """What logits are divided by."""
    indices: Int[Tensor, "N"]
    """Where each stands in the columns of `Tokens`."""

    @property
    def num_tokens(self) -> int:
        """Input tokens, padding included."""
        return self.token_ids.numel()

    def to(self, device: torch.device) -> "Microbatch":
        """The same on `device`."""
        if self.token_ids.device == device:
            return self
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Microbatch(**{k: v if v is None else v.to(device, non_blocking=True) for k, v in fields.items()})
