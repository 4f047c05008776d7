"""Sums, means, extrema, and deviations over segments: rewards of groups or tokens of sequences.

`segments` holds the segment of each value, 0 <= segment < num_segments. An empty segment gives 0. Values may be in any
order, except for `to_rows`. Standard deviations divide by n.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def count(segments: Int[Tensor, "N"]) -> int:
    """Largest segment + 1; 0 without values."""
    return int(segments.max()) + 1 if segments.numel() else 0


def sizes(segments: Int[Tensor, "N"], *, num_segments: int) -> Int[Tensor, "S"]:
    """Number of values in each segment."""
    return torch.bincount(segments, minlength=num_segments)


def own_sizes(segments: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Size of the segment of each value."""
    return sizes(segments, num_segments=count(segments))[segments]


def sums(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Sum of each segment."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def means(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Mean of each segment."""
    return sums(values, segments, num_segments=num_segments) / sizes(segments, num_segments=num_segments).clamp(min=1)


def maxima(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Largest value of each segment."""
    return values.new_zeros(num_segments).scatter_reduce(0, segments, values, "amax", include_self=False)


def minima(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Smallest value of each segment."""
    return values.new_zeros(num_segments).scatter_reduce(0, segments, values, "amin", include_self=False)


def above_lowest(values: Float[Tensor, "N"], segments: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Values minus the smallest value of their segment."""
    return values - minima(values, segments, num_segments=count(segments))[segments]


def centered(values: Float[Tensor, "N"], segments: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Values minus the mean of their segment; exactly 0 if the difference is within rounding error.

    Bound: (n / 2 + 1) * machine epsilon * (max(x) - min(x)): n - 1 sums, the division, and two differences each round
    by at most half an epsilon.
    """
    above, num_segments = above_lowest(values, segments), count(segments)
    found = above - means(above, segments, num_segments=num_segments)[segments]
    error = torch.finfo(values.dtype).eps * (sizes(segments, num_segments=num_segments) / 2 + 1)
    bound = error * maxima(above, segments, num_segments=num_segments)
    return torch.where(found.abs() <= bound[segments], 0, found)


def deviations(values: Float[Tensor, "N"], segments: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Standard deviation of the segment of each value."""
    return means(centered(values, segments).square(), segments, num_segments=count(segments)).sqrt()[segments]


def standardized(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, epsilon: float) -> Float[Tensor, "N"]:
    """Values minus the mean of their segment, divided by its standard deviation + epsilon (> 0)."""
    return centered(values, segments) / (deviations(values, segments) + epsilon)


def whiten(
    values: Float[Tensor, "N"], *, epsilon: float, weights: Float[Tensor, "N"] | None = None
) -> Float[Tensor, "N"]:
    """Normalized values.

    y_i = (x_i - mean(x)) / (std(x) + epsilon)

    A value of weight w >= 0 counts as w equal values, and becomes 0 if w = 0. Equal values become exactly 0.

    Source: code of Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593.
    Differs: adds epsilon to the deviation instead of the variance, and omits Bessel's correction.
    """
    weights = torch.ones_like(values) if weights is None else weights
    counts = weights > 0
    if not counts.any():
        return torch.zeros_like(values)
    above = torch.where(counts, values - values[counts].min(), 0)
    center = above - (weights * above).sum() / weights.sum()
    variance = (weights * center.square()).sum() / weights.sum()
    return torch.where(counts, center / (variance.sqrt() + epsilon), 0)


def to_rows(values: Float[Tensor, "N"], sequences: Int[Tensor, "N"], *, num_sequences: int) -> Float[Tensor, "S L"]:
    """One row per sequence, padded with zeros on the right. Values of a sequence must be in order."""
    length = int(sizes(sequences, num_segments=num_sequences).max()) if num_sequences else 0
    rows = values.new_zeros(num_sequences, length)
    rows[sequences, indices_in_rows(sequences, num_sequences=num_sequences)] = values
    return rows


def from_rows(rows: Float[Tensor, "S L"], sequences: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Flatten rows without their padding; the inverse of `to_rows`."""
    return rows[sequences, indices_in_rows(sequences, num_sequences=len(rows))]


def indices_in_rows(sequences: Int[Tensor, "N"], *, num_sequences: int) -> Int[Tensor, "N"]:
    """Index of each value within its sequence."""
    order = torch.argsort(sequences, stable=True)
    lengths = sizes(sequences, num_segments=num_sequences)
    starts = lengths.cumsum(0) - lengths
    indices = torch.empty_like(sequences)
    indices[order] = torch.arange(len(sequences), device=sequences.device) - starts[sequences[order]]
    return indices
