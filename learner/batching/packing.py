"""Packing: assigns samples to rows, rows to microbatches, and both to ranks.

Everything here is deterministic and a function of lengths alone, so every rank can compute every rank's share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.learner.batching.microbatch import Sample

Row = list["Bundle"]
"""Bundles side by side in one row."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """At least one sample; all begin with the same `num_shared` tokens, which are in the row once."""

    samples: tuple[Sample, ...]
    num_shared: int
    """Length of the common prefix; 0 = nothing is shared."""
    num_tokens: int
    """Input tokens: the shared ones and every sample's own."""


def bundle_by_prompt(samples: Sequence[Sample], *, max_tokens: int) -> list[Bundle]:
    """Bundle the samples of one group, so that their prompt is computed once.

    A bundle that would be longer than `max_tokens` is split; a single sample never is.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return [bundle for group in groups.values() for bundle in _split(group, max_tokens=max_tokens)]


def bundle_singly(samples: Sequence[Sample]) -> list[Bundle]:
    """One bundle per sample, nothing shared."""
    return [Bundle((sample,), 0, sample.num_inputs) for sample in samples]


def distribute(bundles: Sequence[Bundle], *, num_ranks: int) -> list[list[Bundle]]:
    """One list per rank, about equal in tokens: each bundle, the longest first, goes to the least loaded rank."""
    shares: list[list[Bundle]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for bundle in _longest_first(bundles):
        rank = loads.index(min(loads))
        shares[rank].append(bundle)
        loads[rank] += bundle.num_tokens
    return shares


def pack(bundles: Sequence[Bundle], *, row_tokens: int, microbatch_tokens: int) -> list[list[Row]]:
    """Microbatches of rows of bundles, first fit decreasing.

    A row holds at most `row_tokens` and a microbatch at most `microbatch_tokens`, padding included; what is longer by
    itself gets a row, or a microbatch, of its own.
    """
    # Rows of similar length share a microbatch, because each row is padded to the longest, its first.
    microbatches: list[list[Row]] = []
    for row in sorted(_fill_rows(bundles, row_tokens=row_tokens), key=row_length, reverse=True):
        if not microbatches or (len(microbatches[-1]) + 1) * row_length(microbatches[-1][0]) > microbatch_tokens:
            microbatches.append([])
        microbatches[-1].append(row)
    return microbatches


def row_length(row: Row) -> int:
    """Number of tokens in a row."""
    return sum(bundle.num_tokens for bundle in row)


def _split(group: list[Sample], *, max_tokens: int) -> list[Bundle]:
    num_shared = _num_common(group)
    bundles: list[Bundle] = []
    members: list[Sample] = []
    length = num_shared
    for sample in group:
        own = sample.num_inputs - num_shared
        if members and length + own > max_tokens:
            bundles.append(Bundle(tuple(members), num_shared, length))
            members, length = [], num_shared
        members.append(sample)
        length += own
    return [*bundles, Bundle(tuple(members), num_shared, length)]


def _num_common(group: list[Sample]) -> int:
    """Length of the prefix that all samples share and none is trained on; 0 unless they share it whole."""
    # A trained token has a loss in each sample, so the shared prefix ends before the first of them.
    num_untrained = min(int(sample.trained[0]) for sample in group)
    first = group[0].token_ids[:num_untrained]
    others = (sample.token_ids[:num_untrained] for sample in group[1:])
    is_shared = all(np.array_equal(first, other) for other in others)
    # Other images may have as many tokens, which are alike.
    is_shared = is_shared and len({tuple(sample.images.ids) if sample.images else () for sample in group}) == 1
    return num_untrained if is_shared else 0


def _fill_rows(bundles: Sequence[Bundle], *, row_tokens: int) -> list[Row]:
    rows: list[Row] = []
    space: list[int] = []
    for bundle in _longest_first(bundles):
        fits = next((index for index, left in enumerate(space) if left >= bundle.num_tokens), None)
        if fits is None:
            rows.append([])
            space.append(row_tokens)
            fits = len(rows) - 1
        rows[fits].append(bundle)
        space[fits] -= bundle.num_tokens
    return rows


def _longest_first(bundles: Sequence[Bundle]) -> list[Bundle]:
    return sorted(bundles, key=lambda bundle: -bundle.num_tokens)
