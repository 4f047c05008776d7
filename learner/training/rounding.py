"""Rounding: differences that rounding explains."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LIMIT = 64 * torch.finfo(torch.float32).eps
"""Difference relative to the spread that float32 rounding explains in any model, 7.6e-6.

In small models: at most 7e-7 in exact layouts, at least 1.7e-5 in leaking ones at initialization.
"""

MARGIN = 4
"""Factor on the effect of `rounded`, which perturbs few operations of one computation."""


def difference(
    found: Tensor, expected: Tensor, *, parts: Sequence[Any] = (slice(None),), spread_of: Tensor | None = None
) -> float:
    """Largest mean distance within `parts` (indices of the first axis), infinity if not finite.

    Relative to the standard deviation of `expected` or `spread_of`.
    """
    distances = (found.float() - expected.float()).abs()
    spread = (expected if spread_of is None else spread_of).float().std(correction=0)
    relative = distances / spread.clamp_min(torch.finfo(torch.float32).tiny)
    value = max((float(relative[part].mean()) for part in parts), default=0.0)
    return value if math.isfinite(value) else math.inf


@contextmanager
def rounded(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Perturb leaf modules' outputs by at most epsilon of `dtype`, to estimate the rounding error.

    Source: Monte Carlo arithmetic, Parker 1997. Differs: one perturbation per module instead of per operation.
    """
    epsilon, generators = torch.finfo(dtype).eps, dict[torch.device, torch.Generator]()

    def perturb(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(0)
        noise = torch.rand(output.shape, generator=generators[output.device], device=output.device) * 2 - 1
        return output * (1 + epsilon * noise).to(output.dtype)

    innermost = [part for part in module.modules() if next(part.children(), None) is None]
    handles = [part.register_forward_hook(perturb) for part in innermost]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
