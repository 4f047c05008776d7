"""Images of prompts: the bytes that are let in, and what models of the Qwen-VL type make of them.

One implementation serves broker, generators and learner, so that all count the same tokens and compute on the same
numbers. Without torch, except for `VisionModel.patches`.
"""

import hashlib
import io
import math
import warnings
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as Pillow

from slipstream.configs.base import ConfigError
from slipstream.runtime.model_files import read_json

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Values of `model_type` in config.json of the models that are given images."""
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
"""Text that stands for an image in these models' chat templates."""
MAX_BYTES = 32 * 2**20
"""Limit of an image as it is stored."""
MAX_PIXELS = 64 * 2**20
"""Limit of an image that is decoded: a few bytes can stand for gigabytes."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MAX_RATIO = 200
"""Longer sides against shorter ones that these models refuse."""

Grid = tuple[int, int, int]
"""Patches of an image along time, height and width."""


class PromptImage(NamedTuple):
    """An image of a prompt, as engines take it."""

    id: str
    """`image_id` of its bytes."""
    grid: Grid
    data: bytes
    first_token: int
    """First of its tokens, an index into the prompt's."""
    num_tokens: int


def image_id(data: bytes) -> str:
    """SHA-256 of the bytes, hexadecimal: the name under which an image is stored and fetched once."""
    return hashlib.sha256(data).hexdigest()


def load_image(source: Any, *, folder: Path) -> bytes:
    """Bytes of an image as a row has it: bytes, a path within the file's folder, or a record of `bytes` or `path`.

    Raises ConfigError.
    """
    value = (source.get("bytes") or source.get("path")) if isinstance(source, dict) else source
    if isinstance(value, str):
        path = (folder / value).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ConfigError(f"an image must lie in the folder of the file of prompts, got {value!r}.")
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"an image must be a file of at most {MAX_BYTES} bytes, got {value!r}.")
        value = path.read_bytes()
    if not isinstance(value, bytes) or not 0 < len(value) <= MAX_BYTES:
        got = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise ConfigError(f"an image must be a path or 1 to {MAX_BYTES} bytes, got {got}.")
    return value


def open_image(data: bytes) -> Pillow.Image:
    """Read the header of an image, whose pixels are read later. Raises ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)
            image = Pillow.open(io.BytesIO(data), formats=_FORMATS)
    # A decoder may raise anything on damaged bytes, and PIL on sizes that it will not decode.
    except Exception as error:
        raise ConfigError(f"an image must be a readable {', '.join(_FORMATS)}, got {error}.") from None
    if image.width * image.height > MAX_PIXELS:
        raise ConfigError(f"an image must have at most {MAX_PIXELS} pixels, got {image.width} x {image.height}.")
    if max(image.size) > _MAX_RATIO * min(image.size):
        raise ConfigError(
            f"a side of an image must be at most {_MAX_RATIO} times the other, got {image.width} x {image.height}."
        )
    return image


def takes_images(path: str) -> bool:
    """Whether the model in this folder, or of this name in the hub's cache, is of a family that is given images."""
    return read_json(path, "config.json").get("model_type") in FAMILIES


class VisionModel:
    """A checkpoint's view of images: tokens, positions, patches. Reads its small files when they are needed."""

    def __init__(self, path: str) -> None:
        self._path = path

    @cached_property
    def token_id(self) -> int:
        """Token that stands for each part of an image. Raises ConfigError for a model that is given none, by name."""
        settings = read_json(self._path, "config.json")
        if settings.get("model_type") not in FAMILIES:
            kind = settings.get("model_type", "unknown")
            what = "a vision-language model of another family" if "vision_config" in settings else "a text-only model"
            raise ConfigError(
                f"prompts with images need a model of the type {' or '.join(FAMILIES)}, got model.path={self._path}, "
                f"{what} ({kind}): choose another model, or leave the images out."
            )
        return int(settings.get("image_token_id", 151655))

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Settings of the image processor, in older and newer checkpoints."""
        nested = read_json(self._path, "processor_config.json").get("image_processor")
        return read_json(self._path, "preprocessor_config.json") or nested or {}

    @property
    def merge_size(self) -> int:
        """Patches along each side of the square that one token stands for."""
        return int(self._settings.get("merge_size", 2))

    def grid(self, data: bytes) -> Grid:
        """Patches of an image once it is resized, from its header. Raises ConfigError.

        Both sides become multiples of a token's, and the area comes within the limits of the checkpoint.
        """
        patch = int(self._settings.get("patch_size", 14))
        unit, size = patch * self.merge_size, self._settings.get("size") or {}
        least = self._settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = self._settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        image = open_image(data)
        sides = image.height, image.width
        found = [round(side / unit) * unit for side in sides]
        if math.prod(found) > most:
            shrink = math.sqrt(math.prod(sides) / most)
            found = [max(unit, math.floor(side / shrink / unit) * unit) for side in sides]
        elif math.prod(found) < least:
            grow = math.sqrt(least / math.prod(sides))
            found = [math.ceil(side * grow / unit) * unit for side in sides]
        return 1, found[0] // patch, found[1] // patch

    def num_tokens(self, grid: Grid) -> int:
        """Tokens of the prompt that stand for an image."""
        return math.prod(grid) // self.merge_size**2

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[list[int], list[PromptImage]]:
        """Repeat the token of each image as often as the model reads it. Raises ConfigError unless there is one each.

        Example: expand([7, 9, 8], [data]) == ([7, 9, 9, 9, 9, 8], [PromptImage(..., first_token=1, num_tokens=4)])
        """
        if (count := list(token_ids).count(self.token_id)) != len(images):
            raise ConfigError(f"there must be a place for each of {len(images)} images, got {count} places.")
        expanded: list[int] = []
        placed: list[PromptImage] = []
        waiting = iter(images)
        for token in token_ids:
            repeats = 1
            if token == self.token_id:
                data = next(waiting)
                grid = self.grid(data)
                repeats = self.num_tokens(grid)
                placed.append(PromptImage(image_id(data), grid, data, len(expanded), repeats))
            expanded += [token] * repeats
        return expanded, placed

    def positions(self, num_tokens: int, images: Sequence[tuple[int, Grid]]) -> np.ndarray:
        """Positions along time, height and width, int64[3, T]; `images`: first token and grid of each, in order.

        Text counts up in all three; an image counts its rows and columns, and the text behind it goes on from the
        largest of them.

        Source: M-RoPE, arXiv:2409.12191, section 2.1.
        """
        positions = np.empty((3, num_tokens), dtype=np.int64)
        token, position = 0, 0
        for first, (time, height, width) in images:
            positions[:, token:first] = np.arange(position, position + first - token)
            position += first - token
            rows, columns = height // self.merge_size, width // self.merge_size
            token = first + time * rows * columns
            positions[:, first:token] = position + np.indices((time, rows, columns)).reshape(3, -1)
            position += max(rows, columns)
        positions[:, token:] = np.arange(position, position + num_tokens - token)
        return positions

    def patches(self, data: bytes) -> np.ndarray:
        """Pixels as the visual encoder takes them, float32[P, D]; not to be written to. Raises ConfigError for damaged
        bytes."""
        return _patches(self._path, data)


@lru_cache(maxsize=16)
def _patches(path: str, data: bytes) -> np.ndarray:
    # Remembered for a moment, because all answers to a prompt read the same image.
    try:
        pixels = open_image(data).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"an image must be complete, got {error}.") from None
    found = _processor(path)(images=[pixels], return_tensors="np")
    return np.asarray(found["pixel_values"], dtype=np.float32)


@lru_cache(maxsize=1)
def _processor(path: str) -> Any:
    # PIL's, wherever it runs: torchvision rounds otherwise, and is not installed with vLLM's CPU build.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(path)
