"""Spans: which tokens of packed rows see which, without a mask."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Spans:
    """Runs of tokens that fill the flattened rows; a token sees its run up to itself, and the whole parent of its run.

    Example, a prompt of 4 tokens with responses of 2 and 3: Spans(lengths=[4, 2, 3], parents=[0, 0, 0])
    """

    lengths: list[int]
    """Tokens of each run; padding at the end of a row is a run of its own."""
    parents: list[int]
    """Index of the run, in the same row, that each one continues; its own: none."""
    has_shared: bool = True
    """Whether a run may continue another: positions that restart do not say so, a mask does."""

    @cached_property
    def num_keys(self) -> list[int]:
        """Number of tokens that the last token of each run sees."""
        return [
            length + (self.lengths[parent] if parent != index else 0)
            for index, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True))
        ]

    @cached_property
    def key_index(self) -> Tensor | None:
        """int64[K]: what each run sees, in the order of the runs, along the flattened rows; None: itself alone."""
        if self.num_keys == self.lengths:
            return None
        ends = np.cumsum(self.lengths)
        runs = [np.arange(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        seen = [[runs[i]] if i == parent else [runs[parent], runs[i]] for i, parent in enumerate(self.parents)]
        return torch.from_numpy(np.concatenate([part for parts in seen for part in parts]))

    def widened(self, length: int) -> "Spans":
        """The same with one more token at the end of each row of `length` tokens, which no other sees."""
        wide, filled, rows = Spans([], [], self.has_shared), 0, 0
        for run, parent in zip(self.lengths, self.parents, strict=True):
            wide.lengths.append(run)
            wide.parents.append(parent + rows)
            filled += run
            if filled == length:
                wide.parents.append(len(wide.lengths))
                wide.lengths.append(1)
                filled, rows = 0, rows + 1
        return wide

    def mask(self, shape: torch.Size, device: torch.device) -> Bool[Tensor, "R 1 L L"]:
        """Tokens (last axis) that each token sees, for rows of `shape`."""
        lengths = torch.tensor(self.lengths, device=device)
        runs, parents = (
            torch.repeat_interleave(numbers, lengths, output_size=shape.numel()).view(shape)
            for numbers in (torch.arange(len(lengths), device=device), torch.tensor(self.parents, device=device))
        )
        sees = (runs[:, :, None] == runs[:, None, :]) | (parents[:, :, None] == runs[:, None, :])
        return sees.tril_()[:, None]
