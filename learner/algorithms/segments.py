"""Segments: sums, means, extremes and deviations over groups of rewards or tokens of sequences.

`segments` names the segment of each value, 0 <= segment < num_segments; sizes may differ, and an empty segment has sum,
mean and extremes 0. Values may stand in any order, except for `to_rows`. Standard deviations are the population's
(divided by n). Deviations are taken from the smallest value before the mean is: equal values then give exactly 0, not a
rounding error. So does, in `centred`, a value that equals the mean.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def count(segments: Int[Tensor, "N"]) -> int:
    """One more than the largest segment; 0 without values."""
    return int(segments.max()) + 1 if segments.numel() else 0


def sizes(segments: Int[Tensor, "N"], *, num_segments: int) -> Int[Tensor, "S"]:
    """Number of values of each segment."""
    return torch.bincount(segments, minlength=num_segments)


def own_sizes(segments: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Number of values in the segment of each value."""
    return sizes(segments, num_segments=count(segments))[segments]


def sums(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Sum of the values of each segment."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def means(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Mean of the values of each segment."""
    totals = sums(values, segments, num_segments=num_segments)
    return totals / sizes(segments, num_segments=num_segments).clamp(min=1)


def maxima(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Largest value of each segment."""
    return values.new_zeros(num_segments).scatter_reduce(0, segments, values, "amax", include_self=False)


def minima(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Smallest value of each segment."""
    return values.new_zeros(num_segments).scatter_reduce(0, segments, values, "amin", include_self=False)


def above_lowest(values: Float[Tensor, "N"], segments: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Values minus the smallest of their segment."""
    return values - minima(values, segments, num_segments=count(segments))[segments]


def centred(values: Float[Tensor, "N"], segments: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Values minus the mean of their segment; exactly 0 where that is the rounding error of n values.

    |x_i - mean(x)| <= (n / 2 + 1) * machine epsilon * (max(x) - min(x)) counts as 0: n - 1 sums, a division and two
    differences of numbers up to max(x) - min(x) round by at most half an epsilon each.
    """
    above, num_segments = above_lowest(values, segments), count(segments)
    found = above - means(above, segments, num_segments=num_segments)[segments]
    error = torch.finfo(values.dtype).eps * (sizes(segments, num_segments=num_segments) / 2 + 1)
    bound = error * maxima(above, segments, num_segments=num_segments)
    return torch.where(found.abs() <= bound[segments], 0, found)


def deviations(values: Float[Tensor, "N"], segments: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Standard deviation of each value's segment; exactly 0 where all are equal."""
    squares = centred(values, segments).square()
    return means(squares, segments, num_segments=count(segments)).sqrt()[segments]


def standardised(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, epsilon: float) -> Float[Tensor, "N"]:
    """Values minus the mean of their segment, divided by its standard deviation + epsilon; epsilon > 0."""
    return centred(values, segments) / (deviations(values, segments) + epsilon)


def whiten(
    values: Float[Tensor, "N"], *, epsilon: float, weights: Float[Tensor, "N"] | None = None
) -> Float[Tensor, "N"]:
    """Values minus their mean, divided by their standard deviation, over all of them.

    y_i = (x_i - mean(x)) / (std(x) + epsilon)

    A value of weight w >= 0 counts as w equal values; one of weight 0 is left out and becomes 0. Equal values, and a
    single one, become exactly 0. The values must be those of a whole update: over a microbatch or one rank's part the
    split would change them.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, its code.
    Differs: epsilon is added to the deviation, as everywhere here, not to the variance; the variance is not Bessel's.
    """
    weights = torch.ones_like(values) if weights is None else weights
    counts = weights > 0
    if not counts.any():
        return torch.zeros_like(values)
    above = torch.where(counts, values - values[counts].min(), 0)
    centre = above - (weights * above).sum() / weights.sum()
    variance = (weights * centre.square()).sum() / weights.sum()
    return torch.where(counts, centre / (variance.sqrt() + epsilon), 0)


def to_rows(values: Float[Tensor, "N"], sequences: Int[Tensor, "N"], *, num_sequences: int) -> Float[Tensor, "S L"]:
    """One row per sequence, its values from the left, zeros after them. Values of a sequence must be in order."""
    length = int(sizes(sequences, num_segments=num_sequences).max()) if num_sequences else 0
    rows = values.new_zeros(num_sequences, length)
    rows[sequences, indices_in_rows(sequences, num_sequences=num_sequences)] = values
    return rows


def from_rows(rows: Float[Tensor, "S L"], sequences: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Values in their order from rows; the inverse of `to_rows`."""
    return rows[sequences, indices_in_rows(sequences, num_sequences=len(rows))]


def indices_in_rows(sequences: Int[Tensor, "N"], *, num_sequences: int) -> Int[Tensor, "N"]:
    """Number of values of the same sequence that stand before each value."""
    # A stable sort puts the values of a sequence side by side in their order: rank minus the sequence's start.
    order = torch.argsort(sequences, stable=True)
    lengths = sizes(sequences, num_segments=num_sequences)
    starts = lengths.cumsum(0) - lengths
    indices = torch.empty_like(sequences)
    indices[order] = torch.arange(len(sequences), device=sequences.device) - starts[sequences[order]]
    return indices
