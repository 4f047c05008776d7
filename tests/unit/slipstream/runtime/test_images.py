"""Images of prompts: what is let in, and that tokens, positions and patches are those of transformers."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from slipstream.configs.base import ConfigError
from slipstream.runtime import images as images_module
from slipstream.runtime.images import VisionModel, image_id, load_image, open_image, takes_images
from tests.pictures import IMAGE, PLACE, make_picture, make_vision_model
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.mark.parametrize("size", [(16, 8), (24, 40), (7, 100), (200, 130), (3, 5), (64, 64), (1, 20)])
def test_patches_and_grids_are_those_of_the_image_processor(folder: Path, size: tuple[int, int]) -> None:
    data, vision = make_picture(*size), VisionModel(str(folder))
    found = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[open_image(data)], return_tensors="np")
    assert vision.grid(data) == tuple(found["image_grid_thw"][0].tolist())
    assert np.array_equal(vision.patches(data), found["pixel_values"])


def test_positions_are_those_of_the_model(folder: Path) -> None:
    model, vision = AutoModelForImageTextToText.from_pretrained(folder), VisionModel(str(folder))
    pictures = [make_picture(24, 16), make_picture(8, 40), make_picture(16, 16)]
    token_ids, placed = vision.expand([3, *PLACE, 4, 5, *PLACE, *PLACE, 6, 7], pictures)
    ids = torch.tensor([token_ids])
    expected, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=torch.tensor([image.grid for image in placed])
    )
    found = vision.positions(len(token_ids), [(image.first_token, image.grid) for image in placed])
    assert found.tolist() == expected[:, 0].tolist()
    assert vision.positions(5, []).tolist() == [[0, 1, 2, 3, 4]] * 3


def test_an_image_takes_as_many_tokens_as_it_has_squares(folder: Path) -> None:
    vision, data = VisionModel(str(folder)), make_picture(16, 24)
    token_ids, (image,) = vision.expand([3, *PLACE, 4], [data])
    assert token_ids == [3, 14, *[IMAGE] * 6, 16, 4]
    assert (image.first_token, image.num_tokens, image.grid, image.id) == (2, 6, (1, 6, 4), image_id(data))
    with pytest.raises(ConfigError, match="one placeholder for each of 2 images, got 1"):
        vision.expand([3, *PLACE], [data, data])


def test_other_models_are_refused_by_name(tmp_path: Path, folder: Path) -> None:
    text = make_tiny_model(tmp_path / "text")
    assert takes_images(str(folder))
    assert not takes_images(str(text))
    with pytest.raises(ConfigError, match=r"have a model of the type qwen2_vl or .*a text-only model \(qwen2\)"):
        VisionModel(str(text)).token_id  # noqa: B018
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    with pytest.raises(ConfigError, match=r"a vision-language model of another family \(gemma3\)"):
        VisionModel(str(tmp_path / "other")).token_id  # noqa: B018


def _bomb(side: int) -> bytes:
    """A PNG header of that size, with no more behind it."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data, b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x89PNG", "a readable PNG"),
        (b"GIF89a", "a readable PNG"),
        (_bomb(10_000), "at most 67108864 pixels, got 10000 x 10000"),
        (_bomb(100_000), "a readable PNG"),
        (make_picture(401, 2), "at most 200 times the other"),
    ],
)
def test_what_is_no_image_or_too_large_a_one_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_image(data)


def test_a_damaged_image_is_found_when_it_is_decoded(folder: Path) -> None:
    with pytest.raises(ConfigError, match="must be complete"):
        VisionModel(str(folder)).patches(make_picture(64, 64)[:-500])


def test_images_come_from_bytes_or_from_within_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = tmp_path / "data", make_picture()
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.png").write_bytes(data)
    (tmp_path / "secret.png").write_bytes(data)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    for source in (data, {"bytes": data, "path": "b.png"}, "images/a.png", {"path": "images/a.png"}):
        assert load_image(source, folder=folder) == data
    for source in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
        with pytest.raises(ConfigError, match="must be below the folder"):
            load_image(source, folder=folder)
    for bad, reason in (("c.png", "a file of at most"), (3, "got int"), (b"", "got 0 bytes"), ({}, "got NoneType")):
        with pytest.raises(ConfigError, match=reason):
            load_image(bad, folder=folder)
    monkeypatch.setattr(images_module, "MAX_BYTES", len(data) - 1)
    for source in (data, "images/a.png"):
        with pytest.raises(ConfigError, match=f" {len(data) - 1} bytes"):
            load_image(source, folder=folder)
