"""PromptImages: the images that trajectories refer to, kept by name, and what a sample needs of them."""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from slipstream.buffer.trajectory import Media, Trajectory
from slipstream.configs.base import ConfigError
from slipstream.learner.batching.microbatch import SampleImages
from slipstream.learner.errors import BatchError
from slipstream.runtime.images import VisionModel, image_id

_KEPT_BYTES = 2**30
"""Encoded images beyond this leave, those first that were needed longest ago."""


class PromptImages:
    """One per rank, with the same images on each. Life: (missing -> keep -> of*)*, once for each step."""

    def __init__(self, model_path: str, *, kept_bytes: int = _KEPT_BYTES) -> None:
        self._vision = VisionModel(model_path)
        self._kept_bytes = kept_bytes
        self._images: OrderedDict[str, bytes] = OrderedDict()

    def missing(self, names: Collection[str]) -> list[str]:
        """Those of these images that must be fetched."""
        return sorted({name for name in names if name not in self._images})

    def keep(self, names: Collection[str], fetched: Mapping[str, bytes]) -> None:
        """Take in what was fetched for a step that needs `names`. Raises BatchError for one that is not there."""
        for name, data in fetched.items():
            if image_id(data) != name:
                raise BatchError(f"an image must have the content that it is named after, got other bytes for {name}.")
            self._images[name] = data
        if lost := self.missing(names):
            raise BatchError(
                f"every image of a prompt must be stored, got {len(lost)} without bytes, such as {lost[0]}."
            )
        for name in sorted(set(names)):
            self._images.move_to_end(name)
        while sum(map(len, self._images.values())) > self._kept_bytes and next(iter(self._images)) not in names:
            self._images.popitem(last=False)

    def of(self, trajectory: Trajectory, start: int, end: int) -> SampleImages | None:
        """Images among the tokens from `start` to `end`; None without any. Raises BatchError."""
        media = [each for each in trajectory.media if start <= each.first_token < end]
        if not media:
            return None
        vision = self._vision
        try:
            grids = [vision.grid(self._images[each.checksum]) for each in media]
        except (KeyError, ConfigError) as error:
            raise BatchError(f"the images of {trajectory.id} must be readable, got {error}") from error
        for each, grid in zip(media, grids, strict=True):
            self._check(trajectory, each, vision.num_tokens(grid))
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

    def _check(self, trajectory: Trajectory, media: Media, num_tokens: int) -> None:
        own: Any = trajectory.token_ids[media.first_token : media.first_token + num_tokens]
        if media.num_tokens != num_tokens or not np.all(own == self._vision.token_id):
            raise BatchError(
                f"an image must have {num_tokens} tokens {self._vision.token_id} for this learner, got "
                f"{media.num_tokens} in {trajectory.id} of {trajectory.generator_id}: generator and learner must load "
                "the same model."
            )
