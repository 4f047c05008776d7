"""Microbatch: samples, tensors and spans of a forward pass, and passes over a whole step."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.base import ConfigError
from slipstream.learner.batching.batch import Batch
from slipstream.learner.errors import BatchError
from slipstream.learner.ranks import Ranks
from slipstream.runtime.images import Grid, VisionModel, image_id


@dataclass(frozen=True, slots=True)
class SampleImages:
    """Images in a sample's prompt."""

    ids: list[str]
    """In the order of their tokens."""
    grids: list[Grid]
    merge_size: int
    """Patches per side of the square that a token represents."""
    is_image: np.ndarray
    """bool[T]. Excludes image token ids written by the model."""
    positions: np.ndarray
    """int64[3, T], see `VisionModel.positions`."""
    patches: Callable[[str], np.ndarray]
    """Image name -> float32[P, D], computed on demand."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence and its trained tokens.

    Example: Sample(token_ids=[4, 8, 2, 1, 3, 10, 3, 1, 2, 8, 4, 11], trained=[6, 7, 8, 9, 10, 11], first_index=48,
        group_id="17", temperature=1.0)
    """

    token_ids: np.ndarray
    """int[T], prompt, then response."""
    trained: np.ndarray
    """int64[W], ascending indices. Never 0, which nothing predicts. May be empty."""
    first_index: int
    """Index of the first trained token in `Tokens`. The others follow."""
    group_id: str
    """Samples of a group may share a prompt, computed once."""
    temperature: float = 1.0
    """Divisor of the logits, > 0."""
    images: SampleImages | None = None
    experts: np.ndarray | None = None
    """uint8 or int16[T, M, K], K experts per token and each of M routers. None: the routers choose."""

    @property
    def indices(self) -> np.ndarray:
        """int64[W], in `Tokens`."""
        return np.arange(self.first_index, self.first_index + len(self.trained))

    @property
    def num_inputs(self) -> int:
        """Excludes the last trained token, which is only a target."""
        return int(self.trained[-1])


@dataclass(frozen=True, eq=False)
class Spans:
    """Runs of tokens that fill the flattened rows. A token attends to its run up to itself and to the parent run.

    Example, a prompt of 4 tokens with responses of 2 and 3: Spans(lengths=[4, 2, 3], parents=[0, 0, 0])
    """

    lengths: list[int]
    """Tokens per run. Padding at the end of a row is a run."""
    parents: list[int]
    """Run in the same row that each run continues; itself without a parent."""
    has_shared: bool = True
    """True if runs may have parents, which only a mask can express."""

    @cached_property
    def num_keys(self) -> list[int]:
        """Tokens that the last token of each run attends to."""
        return [
            length + (self.lengths[parent] if parent != index else 0)
            for index, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True))
        ]

    @cached_property
    def key_index(self) -> Tensor | None:
        """int64[K]: flattened indices that each run attends to, in run order. None without parents."""
        if self.num_keys == self.lengths:
            return None
        ends = np.cumsum(self.lengths)
        runs = [np.arange(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        seen = [[runs[i]] if i == parent else [runs[parent], runs[i]] for i, parent in enumerate(self.parents)]
        return torch.from_numpy(np.concatenate([part for parts in seen for part in parts]))

    def widened(self, length: int) -> "Spans":
        """Append to each row of `length` tokens one that only itself attends to."""
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
        """True where a token attends to another (last axis)."""
        lengths = torch.tensor(self.lengths, device=device)
        runs, parents = (
            torch.repeat_interleave(numbers, lengths, output_size=shape.numel()).view(shape)
            for numbers in (torch.arange(len(lengths), device=device), torch.tensor(self.parents, device=device))
        )
        return ((runs[:, :, None] == runs[:, None, :]) | (parents[:, :, None] == runs[:, None, :])).tril_()[:, None]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward pass: R rows of L tokens with one or more sequences each, and N tokens with a loss.

    Positions count along prompt and response, also after a shared prompt.
    """

    token_ids: Int[Tensor, "R L"]
    """Padded with 0 at the end of each row."""
    position_ids: Int[Tensor, "... R L"] | None
    """Position in the sequence. None if rows hold one sequence. With images [4, R, L]: also time, height, width."""
    spans: Spans | None
    """None: each token attends to all earlier ones in its row."""
    sources: Int[Tensor, "N"]
    """Flattened index of the token that predicts each trained token."""
    targets: Int[Tensor, "N"]
    temperatures: Float[Tensor, "N"]
    """Divisor of the logits."""
    indices: Int[Tensor, "N"]
    """Index in `Tokens`."""
    copies: Int[Tensor, "R L"]
    """Samples that use each input token: 0 for padding."""
    pixel_values: Float[Tensor, "P D"] | None = None
    """Patches of all images, in the order of their tokens."""
    image_grids: Int[Tensor, "K 3"] | None = None
    """Patches per image along time, height, and width."""
    is_image: Bool[Tensor, "R L"] | None = None
    experts: Int[Tensor, "R L M K"] | None = None
    """Per input token and router. None: the routers choose."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    def to(self, device: torch.device) -> "Microbatch":
        if self.token_ids.device == device:
            return self
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved = {k: v.to(device, non_blocking=True) for k, v in fields.items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **moved)


@torch.no_grad()
def recompute(
    batch: Batch,
    microbatches: Sequence[Microbatch],
    forward: Callable[[Microbatch], Mapping[str, Tensor]],
    *,
    names: Sequence[str],
    ranks: Ranks,
) -> dict[str, Tensor]:
    """Outputs `names` of forward passes over a whole step as columns, float32[N]. Collective.

    Ranks hold equally many microbatches and each token at most once. Missing tokens are 0.
    """
    columns = {name: torch.zeros_like(batch.tokens.generator_logprobs) for name in names}
    for microbatch in microbatches:
        outputs = forward(microbatch)
        for name, column in columns.items():
            column[microbatch.indices] = outputs[name].float()
    return {name: ranks.sum(column) for name, column in columns.items()}


_KEPT_BYTES = 2**30
"""Limit on encoded images, besides the current step's."""


class PromptImages:
    """Cache of prompt images, identical on every rank. Life: (missing -> keep -> of*)*, once per step."""

    def __init__(self, model_path: str) -> None:
        self._vision = VisionModel(model_path)
        self._images: OrderedDict[str, bytes] = OrderedDict()

    def missing(self, names: Collection[str]) -> list[str]:
        return sorted({name for name in names if name not in self._images})

    def keep(self, names: Collection[str], fetched: Mapping[str, bytes]) -> None:
        """Add images of a step that needs `names`. Raises BatchError if one is missing or altered."""
        for name, data in fetched.items():
            if image_id(data) != name:
                raise BatchError(f"an image must match the hash in its name, got different bytes for {name}.")
            self._images[name] = data
        if lost := self.missing(names):
            raise BatchError(f"images of prompts must be stored, got {len(lost)} without bytes, such as {lost[0]}.")
        for name in sorted(set(names)):
            self._images.move_to_end(name)
        while sum(map(len, self._images.values())) > _KEPT_BYTES and next(iter(self._images)) not in names:
            self._images.popitem(last=False)

    def of(self, trajectory: Trajectory, start: int, end: int) -> SampleImages | None:
        """Images between two tokens. Raises BatchError."""
        media = [each for each in trajectory.media if start <= each.first_token < end]
        if not media:
            return None
        vision = self._vision
        try:
            grids = [vision.grid(self._images[each.checksum]) for each in media]
        except (KeyError, ConfigError) as error:
            raise BatchError(f"the images of {trajectory.id} must be readable, got {error}") from error
        for each, grid in zip(media, grids, strict=True):
            num_tokens = vision.num_tokens(grid)
            own: Any = trajectory.token_ids[each.first_token : each.first_token + num_tokens]
            if each.num_tokens != num_tokens or not np.all(own == vision.token_id):
                raise BatchError(
                    f"an image must have {num_tokens} tokens {vision.token_id} for this learner, got "
                    f"{each.num_tokens} in {trajectory.id} of {trajectory.generator_id}: generator and learner must "
                    "load the same model."
                )
        placed = [(each.first_token - start, grid) for each, grid in zip(media, grids, strict=True)]
        is_image = np.zeros(end - start, dtype=np.bool_)
        for each in media:
            is_image[each.first_token - start :][: each.num_tokens] = True
        return SampleImages(
            ids=[each.checksum for each in media],
            grids=grids,
            merge_size=vision.merge_size,
            is_image=is_image,
            positions=vision.positions(end - start, placed),
            patches=lambda name: vision.patches(self._images[name]),
        )
