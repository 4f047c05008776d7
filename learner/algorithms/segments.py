"""Segments: sums, means and extremes over the values that belong together, groups of rewards or tokens of sequences.

`segments` says which segment each value belongs to, 0 <= segment < num_segments; their sizes may differ, and a segment
may be empty: its sum, mean and extremes are 0. Values may stand in any order, but for `to_rows`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def count(segments: Int[Tensor, "N"]) -> int:
    """One more than the largest segment; 0 of none."""
    return int(segments.max()) + 1 if segments.numel() else 0


def sizes(segments: Int[Tensor, "N"], *, num_segments: int) -> Int[Tensor, "S"]:
    """How many values each segment has."""
    return torch.bincount(segments, minlength=num_segments)


def sums(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Sum of each segment."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def means(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Mean of each segment."""
    totals = sums(values, segments, num_segments=num_segments)
    return totals / sizes(segments, num_segments=num_segments).clamp(min=1)


def maxima(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Largest value of each segment."""
    return values.new_zeros(num_segments).scatter_reduce(0, segments, values, "amax", include_self=False)


def minima(values: Float[Tensor, "N"], segments: Int[Tensor, "N"], *, num_segments: int) -> Float[Tensor, "S"]:
    """Smallest value of each segment."""
    return values.new_zeros(num_segments).scatter_reduce(0, segments, values, "amin", include_self=False)


def to_rows(values: Float[Tensor, "N"], sequences: Int[Tensor, "N"], *, num_sequences: int) -> Float[Tensor, "S L"]:
    """One row per sequence, its values from the left, zeros after them. Values of a sequence must be in order."""
    rows = values.new_zeros(num_sequences, _longest(sequences, num_sequences))
    rows[sequences, indices_in_rows(sequences, num_sequences=num_sequences)] = values
    return rows


def from_rows(rows: Float[Tensor, "S L"], sequences: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The inverse of `to_rows`."""
    return rows[sequences, indices_in_rows(sequences, num_sequences=len(rows))]


def indices_in_rows(sequences: Int[Tensor, "N"], *, num_sequences: int) -> Int[Tensor, "N"]:
    """How many values of its own sequence stand before each."""
    order = torch.argsort(sequences, stable=True)
    lengths = sizes(sequences, num_segments=num_sequences)
    starts = lengths.cumsum(0) - lengths
    indices = torch.empty_like(sequences)
    indices[order] = torch.arange(len(sequences), device=sequences.device) - starts[sequences[order]]
    return indices


def _longest(sequences: Int[Tensor, "N"], num_sequences: int) -> int:
    return int(sizes(sequences, num_segments=num_sequences).max()) if num_sequences else 0
