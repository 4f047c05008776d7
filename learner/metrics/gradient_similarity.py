"""GradientSimilarity: the cosine between consecutive gradients.

Where learning is stable, consecutive gradients are nearly orthogonal; under staleness they stay aligned for many steps
before a run collapses.

    cos(g_t, g_{t-1}) = <g_t, g_{t-1}> / (|g_t| |g_{t-1}|)

Source: GAC, arXiv:2603.01501.
"""

import math
from collections import deque

import torch
from torch import Tensor

from slipstream.learner.ranks import Ranks

_MAX_ENTRIES = 2**20
_MAX_UNREPORTED = 1024


class GradientSimilarity:
    """Records the gradients an optimizer uses. Life: (the optimizer steps -> end_update)* -> report, again and again.

    It keeps the same random entries of each gradient, all of a short one, so it costs a few MB however large the model
    is. Ranks may hold pieces of the gradients or copies of all of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, seed: int, max_entries: int = _MAX_ENTRIES) -> None:
        """`max_entries`: entries kept of the gradients that the optimizer is given at once on this rank."""
        self._seed = seed
        self._max_entries = max_entries
        self._indices: list[list[Tensor]] = []
        self._previous: list[Tensor] = []
        self._previous_square = torch.zeros(())
        self._spare: list[Tensor] = []
        self._current: list[Tensor] = []
        # Bounded, because a caller that never asks for a report must not pay for it in memory.
        self._products: deque[Tensor] = deque(maxlen=_MAX_UNREPORTED)
        optimizer.register_step_pre_hook(self._record)

    def end_update(self) -> None:
        """Everything the optimizer has used since the last call was one gradient, in pieces or whole."""
        square = _product(self._current, self._current)
        if self._previous and self._current:
            products = [_product(self._current, self._previous), square, self._previous_square]
            self._products.append(torch.stack(products))
        self._spare, self._previous, self._current = self._previous, self._current, []
        self._previous_square = square

    def report(self, ranks: Ranks) -> dict[str, float]:
        """Mean cosine over the updates since the last report; empty where none had a predecessor. Collective."""
        if not self._products:
            return {}
        sums = ranks.sum_all(torch.stack(list(self._products)).double()).tolist()
        self._products.clear()
        cosines = [dot / math.sqrt(now * before) for dot, now, before in sums if now * before > 0]
        return {"learner/grad_cosine": sum(cosines) / len(cosines)} if cosines else {}

    @torch.no_grad()
    def _record(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Runs before each step of the optimizer: with ZeRO-3 one for each group of pieces."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        total = sum(parameter.numel() for parameter in parameters)
        if total <= self._max_entries:
            self._keep([_gradient(parameter).flatten().float() for parameter in parameters])
            return
        if len(self._indices) == len(self._current):
            self._indices.append(self._draw_indices(parameters, total=total))
        indices = self._indices[len(self._current)]
        sampled = [_gradient(p).flatten()[index].float() for p, index in zip(parameters, indices, strict=True)]
        # Scaled, because products of samples must add up like those of all entries, whatever the size of the pieces.
        self._keep(sampled).mul_(math.sqrt(total / sum(len(index) for index in indices)))

    def _keep(self, pieces: list[Tensor]) -> Tensor:
        """Copy into the memory that the gradient before the previous one has left: a fresh copy would cost most."""
        index = len(self._current)
        self._current.append(torch.cat(pieces, out=self._spare[index] if self._spare else None))
        return self._current[index]

    def _draw_indices(self, parameters: list[Tensor], *, total: int) -> list[Tensor]:
        """Random entries of each parameter, the same in every update."""
        generator = torch.Generator().manual_seed(self._seed + len(self._indices))
        drawn = torch.randint(total, (self._max_entries,), generator=generator).unique()
        ends = torch.tensor([parameter.numel() for parameter in parameters]).cumsum(0)
        parts = drawn.tensor_split(torch.searchsorted(drawn, ends)[:-1])
        starts = [0, *ends[:-1].tolist()]
        return [
            (part - start).to(parameter.device)
            for part, start, parameter in zip(parts, starts, parameters, strict=True)
        ]


def _product(first: list[Tensor], second: list[Tensor]) -> Tensor:
    return sum((one.dot(two) for one, two in zip(first, second, strict=True)), start=torch.zeros(()))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
