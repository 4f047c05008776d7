"""Bounds of rounding errors from the computation, for comparisons that hold on every processor.

Processors, numbers of threads, and versions of a library sum the same terms in different orders.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def largest_difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Largest difference of any element of two models' weights, by name."""
    assert first.keys() == second.keys()
    return max(float((tensor - second[name]).detach().abs().max()) for name, tensor in first.items())


def is_rounding(
    found: Iterable[Tensor], expected: Iterable[Tensor], *, terms: int, dtype: torch.dtype = torch.float32
) -> bool:
    """Whether two computations of the same numbers in `dtype` differ by rounding alone.

    |found - expected| <= terms * eps * max |expected|

    In both computations, each of the `terms` operations between an input and a result rounds by eps / 2 of a partial
    sum. The largest of all results stands for the partial sums, because those of a small result can cancel.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1.
    """
    one, two = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, expected))
    return float((one - two).abs().max()) <= terms * torch.finfo(dtype).eps * float(two.abs().max())


def gradient_terms(model: nn.Module, *, num_tokens: int) -> int:
    """Operations between a token and a gradient: matrix products of both passes, then the sum over tokens."""
    return num_tokens + 2 * sum(weight.shape[-1] for weight in model.parameters() if weight.dim() == 2)
