"""GradientSimilarity: how much each gradient points where the one before it pointed.

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
_MAX_UNTOLD = 1024


class GradientSimilarity:
    """Looks at the gradients an optimizer uses. Life: (the optimizer steps -> end_update)* -> report, and so on.

    It keeps the same random entries of each gradient, all of a short one, and so costs a few MB however large the model
    is. Ranks may hold pieces of the gradients or copies of all of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, seed: int, max_entries: int = _MAX_ENTRIES) -> None:
        """`max_entries`: kept of what the optimizer is given at once on this rank."""
        self._seed = seed
        self._max_entries = max_entries
        self._indices: list[list[Tensor]] = []
        self._before: list[Tensor] = []
        self._square_before = torch.zeros(())
        self._spare: list[Tensor] = []
        self._now: list[Tensor] = []
        self._products: deque[Tensor] = deque(maxlen=_MAX_UNTOLD)  # who never asks for a report shall not pay for it
        optimizer.register_step_pre_hook(self._look)

    def end_update(self) -> None:
        """Whatever the optimizer has used since the last call was one gradient, in pieces or whole."""
        square = _product(self._now, self._now)
        if self._before and self._now:
            self._products.append(torch.stack([_product(self._now, self._before), square, self._square_before]))
        self._spare, self._before, self._now = self._before, self._now, []
        self._square_before = square

    def report(self, ranks: Ranks) -> dict[str, float]:
        """The mean cosine over the updates since the last report; nothing where none had one before it. Collective."""
        if not self._products:
            return {}
        sums = ranks.sum(torch.stack(list(self._products)).double()).tolist()
        self._products.clear()
        cosines = [dot / math.sqrt(now * before) for dot, now, before in sums if now * before > 0]
        return {"learner/grad_cosine": sum(cosines) / len(cosines)} if cosines else {}

    @torch.no_grad()
    def _look(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Runs before each step of the optimizer: with ZeRO-3 one for each group of pieces."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        total = sum(parameter.numel() for parameter in parameters)
        if total <= self._max_entries:
            self._keep([_gradient(parameter).flatten().float() for parameter in parameters])
            return
        if len(self._indices) == len(self._now):
            self._indices.append(self._choose(parameters, total=total))
        indices = self._indices[len(self._now)]
        chosen = [_gradient(p).flatten()[index].float() for p, index in zip(parameters, indices, strict=True)]
        # Products of samples must add up as those of all entries do, however large the pieces and the ranks' shares.
        self._keep(chosen).mul_(math.sqrt(total / sum(len(index) for index in indices)))

    def _keep(self, pieces: list[Tensor]) -> Tensor:
        """In memory that the gradient before the last one has left: a fresh copy would cost more than all the rest."""
        index = len(self._now)
        self._now.append(torch.cat(pieces, out=self._spare[index] if self._spare else None))
        return self._now[index]

    def _choose(self, parameters: list[Tensor], *, total: int) -> list[Tensor]:
        """Which entries of each are kept."""
        generator = torch.Generator().manual_seed(self._seed + len(self._indices))
        indices = torch.randint(total, (self._max_entries,), generator=generator).unique()
        ends = torch.tensor([parameter.numel() for parameter in parameters]).cumsum(0)
        parts = indices.tensor_split(torch.searchsorted(indices, ends)[:-1])
        starts = [0, *ends[:-1].tolist()]
        return [
            (part - start).to(parameter.device)
            for part, start, parameter in zip(parts, starts, parameters, strict=True)
        ]


def _product(first: list[Tensor], second: list[Tensor]) -> Tensor:
    return sum((one.dot(two) for one, two in zip(first, second, strict=True)), start=torch.zeros(()))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
