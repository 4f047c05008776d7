"""Collation: samples of an optimizer update -> packed microbatches, distributed over ranks.

Packing depends only on lengths, so every rank knows all shares.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from slipstream.learner.batching.microbatch import Microbatch, Sample, SampleImages, Spans
from slipstream.runtime.images import Grid

Row = list["Bundle"]
"""Bundles in order."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Samples that share a prefix of `num_shared` >= 0 tokens, held once."""

    samples: tuple[Sample, ...]
    num_shared: int
    num_tokens: int
    """Input tokens: the prefix once, plus the rest of every sample."""


def bundle_by_prompt(samples: Sequence[Sample], *, max_tokens: int) -> list[Bundle]:
    """Bundles within groups, of at most `max_tokens` unless a single sample is longer."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return [bundle for group in groups.values() for bundle in _split(group, max_tokens=max_tokens)]


def bundle_singly(samples: Sequence[Sample]) -> list[Bundle]:
    """One bundle per sample."""
    return [Bundle((sample,), 0, sample.num_inputs) for sample in samples]


def distribute(bundles: Sequence[Bundle], *, num_ranks: int) -> list[list[Bundle]]:
    """Assign bundles, longest first, each to the rank with the fewest tokens."""
    shares: list[list[Bundle]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for bundle in _longest_first(bundles):
        rank = loads.index(min(loads))
        shares[rank].append(bundle)
        loads[rank] += bundle.num_tokens
    return shares


def pack(bundles: Sequence[Bundle], *, row_tokens: int, microbatch_tokens: int) -> list[list[Row]]:
    """Pack bundles into rows and rows into microbatches, first fit decreasing.

    A row holds at most `row_tokens` and a microbatch at most `microbatch_tokens`, padding included, unless one bundle
    or row is longer.
    """
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
    # Rows of similar length share a microbatch, because all are padded to the first, the longest.
    microbatches: list[list[Row]] = []
    for row in sorted(rows, key=row_length, reverse=True):
        if not microbatches or (len(microbatches[-1]) + 1) * row_length(microbatches[-1][0]) > microbatch_tokens:
            microbatches.append([])
        microbatches[-1].append(row)
    return microbatches


def row_length(row: Row) -> int:
    """Tokens in a row."""
    return sum(bundle.num_tokens for bundle in row)


def _split(group: list[Sample], *, max_tokens: int) -> list[Bundle]:
    """Bundles of a group. They share the prefix before trained tokens if equal in all samples."""
    # A trained token has a loss in each sample.
    num_untrained = min(int(sample.trained[0]) for sample in group)
    first = group[0].token_ids[:num_untrained]
    is_shared = all(np.array_equal(first, sample.token_ids[:num_untrained]) for sample in group[1:])
    # Different images of equal size have identical tokens.
    is_shared = is_shared and len({tuple(sample.images.ids) if sample.images else () for sample in group}) == 1
    num_shared = num_untrained if is_shared else 0
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


def _longest_first(bundles: Sequence[Bundle]) -> list[Bundle]:
    return sorted(bundles, key=lambda bundle: -bundle.num_tokens)


LayoutKind = Literal["shared_rows", "one_row", "one_per_row", "one_at_a_time"]
_SINGLE = ("one_per_row", "one_at_a_time")


@dataclass(frozen=True, slots=True)
class Layout:
    """Arrangement of sequences in a microbatch. Kinds, densest first:

    `shared_rows`: rows about as long as the longest sequence, each prompt once. Needs attention with masks or spans.
    `one_row`: rows of whole sequences without a mask. Needs attention that restarts with positions.
    `one_per_row`: one padded row per sequence, without mask or positions. Fits most causal models.
    `one_at_a_time`: one microbatch per sequence, for models that depend on its longest sequence.
    """

    kind: LayoutKind
    microbatch_tokens: int
    """Limit on input tokens of a forward pass, padding included."""
    row_tokens: int = 64
    """Rows of several sequences are filled up to this or the longest sequence. A mask costs its square."""
    num_slices: int = 1
    """Ranks that share each row. Row lengths are multiples of it."""


class MicrobatchBuilder:
    """Builds a microbatch from rows."""

    def __init__(self, rows: Sequence[Row], layout: Layout) -> None:
        self._has_positions = layout.kind not in _SINGLE
        self._length = -(-max(map(row_length, rows)) // layout.num_slices) * layout.num_slices
        shape = (len(rows), self._length)
        self._token_ids = np.zeros(shape, dtype=np.int64)
        self._position_ids = np.zeros(shape, dtype=np.int64)
        self._axes: np.ndarray | None = None
        self._is_image = np.zeros(shape, dtype=np.bool_)
        self._copies = np.zeros(shape, dtype=np.int64)
        self._experts: np.ndarray | None = None
        self._spans = Spans([], [], has_shared=layout.kind == "shared_rows")
        self._samples: list[Sample] = []
        self._sources: list[np.ndarray] = []
        self._images: list[tuple[Grid, np.ndarray]] = []
        for index, row in enumerate(rows):
            column = 0
            for bundle in row:
                column = self._put_bundle(index, column, bundle)
            self._add_run(self._length - column)

    def build(self) -> Microbatch:
        samples = self._samples
        targets = np.concatenate([sample.token_ids[sample.trained] for sample in samples])
        temperatures = np.array([sample.temperature for sample in samples], dtype=np.float32)
        positions = torch.from_numpy(self._position_ids) if self._has_positions else None
        if self._axes is not None:
            positions = torch.from_numpy(np.concatenate([self._position_ids[None], self._axes]))
        patches = [patches for _, patches in self._images]
        return Microbatch(
            token_ids=torch.from_numpy(self._token_ids),
            position_ids=positions,
            spans=self._spans if self._has_positions else None,
            sources=torch.from_numpy(np.concatenate(self._sources)),
            targets=torch.from_numpy(targets.astype(np.int64)),
            temperatures=torch.from_numpy(np.repeat(temperatures, [len(sample.trained) for sample in samples])),
            indices=torch.from_numpy(np.concatenate([sample.indices for sample in samples])),
            pixel_values=torch.from_numpy(np.concatenate(patches)) if patches else None,
            image_grids=torch.tensor([grid for grid, _ in self._images]) if patches else None,
            is_image=torch.from_numpy(self._is_image) if patches else None,
            copies=torch.from_numpy(self._copies),
            experts=None if self._experts is None else torch.from_numpy(self._experts),
        )

    def _put_bundle(self, row: int, column: int, bundle: Bundle) -> int:
        shared = bundle.num_shared if len(bundle.samples) > 1 else 0
        # Branches continue the prompt's positions.
        trunk = self._add_run(shared)
        self._put(row, column, bundle.samples[0], 0, shared, copies=len(bundle.samples))
        trunk_end = column = column + shared
        for sample in bundle.samples:
            end = sample.num_inputs
            self._add_run(end - shared, parent=trunk if shared else None)
            self._put(row, column, sample, shared, end, copies=1)
            sources = sample.trained - 1 + column - shared
            # The last prompt token predicts the first token of each branch.
            sources[sample.trained == shared] = trunk_end - 1
            self._samples.append(sample)
            self._sources.append(sources + row * self._length)
            column += end - shared
        return column

    def _put(self, row: int, column: int, sample: Sample, start: int, end: int, *, copies: int) -> None:
        span = slice(column, column + end - start)
        self._token_ids[row, span] = sample.token_ids[start:end]
        self._position_ids[row, span] = np.arange(start, end)
        if images := sample.images:
            if self._axes is None:
                # Outside images, positions along all axes are equal.
                self._axes = np.repeat(self._position_ids[None], 3, axis=0)
            self._axes[:, row, span] = images.positions[:, start:end]
            self._is_image[row, span] = images.is_image[start:end]
            # Images are in the prompt, so in the part that starts at 0.
            if start == 0 and end > start:
                self._images += zip(images.grids, map(images.patches, images.ids), strict=True)
        elif self._axes is not None:
            self._axes[:, row, span] = self._position_ids[row, span]
        self._copies[row, span] = copies
        if sample.experts is not None:
            if self._experts is None:
                # Padding needs experts, too: any distinct ones.
                _, num_routers, top_k = sample.experts.shape
                shape = (*self._token_ids.shape, num_routers, top_k)
                self._experts = np.broadcast_to(np.arange(top_k, dtype=sample.experts.dtype), shape).copy()
            self._experts[row, span] = sample.experts[start:end]

    def _add_run(self, length: int, *, parent: int | None = None) -> int:
        """Add a run unless it is empty. Returns its index."""
        index = len(self._spans.lengths)
        if length:
            self._spans.lengths.append(length)
            self._spans.parents.append(index if parent is None else parent)
        return index


def collate(samples: Sequence[Sample], *, layout: Layout, rank: int = 0, num_ranks: int = 1) -> list[Microbatch]:
    """Build this rank's microbatches of an optimizer update.

    All ranks pass the same samples and get equally many microbatches, some possibly empty, because each runs
    collectives. Ranks that share rows pass the same `rank`; `num_ranks` counts them once.
    """
    trained = [sample for sample in samples if len(sample.trained)]
    row_tokens = max([layout.row_tokens, *(sample.num_inputs for sample in trained)])
    is_shared = layout.kind == "shared_rows"
    bundles = bundle_by_prompt(trained, max_tokens=row_tokens) if is_shared else bundle_singly(trained)
    limits = {
        "row_tokens": 1 if layout.kind in _SINGLE else row_tokens,
        "microbatch_tokens": 1 if layout.kind == "one_at_a_time" else layout.microbatch_tokens,
    }
    # All shares, to count the microbatches of other ranks.
    packed = [pack(share, **limits) for share in distribute(bundles, num_ranks=num_ranks)]
    microbatches = [MicrobatchBuilder(rows, layout).build() for rows in packed[rank]]
    if missing := max(map(len, packed)) - len(microbatches):
        none = torch.zeros(0, dtype=torch.int64)
        token_ids = torch.zeros(1, layout.num_slices, dtype=torch.int64)
        columns = {"sources": none, "targets": none, "indices": none, "temperatures": torch.ones(0)}
        microbatches += [Microbatch(token_ids, None, None, copies=torch.zeros_like(token_ids), **columns)] * missing
    images = next((sample.images for sample in trained if sample.images), None)
    if images is None or num_ranks == 1:
        return microbatches
    return [_with_blank(each, images) if each.pixel_values is None else each for each in microbatches]


def _with_blank(microbatch: Microbatch, images: SampleImages) -> Microbatch:
    """Append a column with an image that no token sees: all ranks must run the visual encoder."""
    num_rows, length = microbatch.token_ids.shape
    positions = microbatch.position_ids
    positions = torch.arange(length).expand(num_rows, -1) if positions is None else positions
    token_ids = F.pad(microbatch.token_ids, (0, 1))
    is_image = torch.zeros_like(token_ids, dtype=torch.bool)
    is_image[0, -1] = True
    side, width = images.merge_size, images.patches(images.ids[0]).shape[1]
    return dataclasses.replace(
        microbatch,
        token_ids=token_ids,
        position_ids=F.pad(positions, (0, 1)).expand(4, -1, -1),
        spans=microbatch.spans and microbatch.spans.widened(length),
        sources=microbatch.sources + microbatch.sources // length,
        pixel_values=torch.zeros(side**2, width),
        image_grids=torch.tensor([[1, side, side]]),
        is_image=is_image,
    )
