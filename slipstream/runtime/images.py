"""Images in prompts of Qwen-VL models: checks, tokens, positions, and patches.

All roles use this code, so that token counts and pixels agree. Only `VisionModel.patches` needs torch.
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

from slipstream.configs.base import ConfigError, require
from slipstream.runtime.model_files import VISION_FAMILIES, read_json

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
"""An image in these models' chat templates."""
MAX_BYTES = 32 * 2**20
MAX_PIXELS = 64 * 2**20
"""A few bytes can decode to gigabytes."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MAX_RATIO = 200

Grid = tuple[int, int, int]
"""Number of patches along time, height, and width."""


class PromptImage(NamedTuple):
    """An image of a prompt."""

    id: str
    grid: Grid
    data: bytes
    first_token: int
    num_tokens: int


def image_id(data: bytes) -> str:
    """The image's key, the hexadecimal SHA-256 of its bytes."""
    return hashlib.sha256(data).hexdigest()


def load_image(source: Any, *, folder: Path) -> bytes:
    """Read bytes, a path below `folder`, or a record with either. Raises ConfigError."""
    value = (source.get("bytes") or source.get("path")) if isinstance(source, dict) else source
    if isinstance(value, str):
        path = (folder / value).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ConfigError(f"an image must be below the folder of the prompt file, got {value!r}.")
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"an image must be a file of at most {MAX_BYTES} bytes, got {value!r}.")
        value = path.read_bytes()
    if not isinstance(value, bytes) or not 0 < len(value) <= MAX_BYTES:
        got = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
        raise ConfigError(f"an image must be a path or 1 to {MAX_BYTES} bytes, got {got}.")
    return value


def open_image(data: bytes) -> Pillow.Image:
    """Read an image's header; pixels load later. Raises ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)
            image = Pillow.open(io.BytesIO(data), formats=_FORMATS)
    # Decoders raise arbitrary errors for damaged bytes.
    except Exception as error:
        raise ConfigError(f"an image must be a readable {', '.join(_FORMATS)}, got {error}.") from None
    size = f"{image.width} x {image.height}"
    if image.width * image.height > MAX_PIXELS:
        raise ConfigError(f"an image must have at most {MAX_PIXELS} pixels, got {size}.")
    if max(image.size) > _MAX_RATIO * min(image.size):
        raise ConfigError(f"a side of an image must be at most {_MAX_RATIO} times the other, got {size}.")
    return image


def takes_images(path: str) -> bool:
    """Whether a model supports images."""
    return read_json(path, "config.json").get("model_type") in VISION_FAMILIES


class VisionModel:
    """Image tokens, positions, and patches of a checkpoint."""

    def __init__(self, path: str) -> None:
        self._path = path

    @cached_property
    def token_id(self) -> int:
        """Placeholder of image parts. Raises ConfigError for a model without images."""
        settings = read_json(self._path, "config.json")
        kind = settings.get("model_type", "unknown")
        what = "a vision-language model of another family" if "vision_config" in settings else "a text-only model"
        must, got = (
            f"have a model of the type {' or '.join(VISION_FAMILIES)}",
            f"model.path={self._path}, {what} ({kind})",
        )
        why = "choose another model, or leave the images out"
        require(kind in VISION_FAMILIES, "prompts with images", must, got=got, why=why)
        return int(settings.get("image_token_id", 151655))

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Newer checkpoints nest them in processor_config.json."""
        nested = read_json(self._path, "processor_config.json").get("image_processor")
        return read_json(self._path, "preprocessor_config.json") or nested or {}

    @property
    def merge_size(self) -> int:
        """Side length, in patches, of a token's square."""
        return int(self._settings.get("merge_size", 2))

    def grid(self, data: bytes) -> Grid:
        """Patch grid of an image, from its header. Raises ConfigError.

        Sides become multiples of a token's, within the checkpoint's limits of the area.
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
        return math.prod(grid) // self.merge_size**2

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[list[int], list[PromptImage]]:
        """Repeat each image's placeholder to its token count. Raises ConfigError if the numbers differ.

        Example: expand([7, 9, 8], [data]) == ([7, 9, 9, 9, 9, 8], [PromptImage(..., first_token=1, num_tokens=4)])
        """
        if (count := list(token_ids).count(self.token_id)) != len(images):
            raise ConfigError(f"the prompt must have one placeholder for each of {len(images)} images, got {count}.")
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
        """Positions along time, height, and width, int64[3, T]; `images`: (first token, grid) in order.

        Text increments all three. An image counts rows and columns; text after it continues from the largest position.

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
        """Visual encoder's input, float32[P, D]; cached, do not modify. Raises ConfigError."""
        return _patches(self._path, data)


@lru_cache(maxsize=16)
def _patches(path: str, data: bytes) -> np.ndarray:
    # All answers to a prompt use the same image.
    try:
        pixels = open_image(data).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"an image must be complete, got {error}.") from None
    found = _processor(path)(images=[pixels], return_tensors="np")
    return np.asarray(found["pixel_values"], dtype=np.float32)


@lru_cache(maxsize=1)
def _processor(path: str) -> Any:
    # The PIL version: torchvision rounds differently, and vLLM's CPU build lacks it.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(path)
