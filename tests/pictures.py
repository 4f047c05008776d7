"""Pictures, a tiny model that reads them, and rows that have them, for tests without downloads."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from slipstream.scripts.init_random_model import make_model, make_tokenizer, save_model

IMAGE = 15
"""Token that stands for a part of a picture."""
PLACE = [14, IMAGE, 16]


def make_picture(width: int = 16, height: int = 8, *, seed: int = 0) -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def make_vision_model(folder: Path, family: str = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """Write a Qwen2.5-VL or Qwen2-VL of two layers; a token of a picture is a square of 8 x 8 pixels."""
    model = make_model(architecture="qwen2_5_vl", layers=2, width=64, seed=seed, max_length=128)
    if family == "qwen2_vl":
        shared = model.config.to_dict()
        vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4}
        text = shared["text_config"] | {"model_type": "qwen2_vl_text"}
        more = {name: shared[name] for name in shared if name.endswith("token_id")}
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **more)
        )
    save_model(folder, model=model, tokenizer=make_tokenizer(architecture="qwen2_5_vl"))
    return folder


def make_picture_row(images: list[Any], *, prompt: Any = "<image>=", **more: Any) -> dict[str, Any]:
    """A row of a prompt file."""
    return {"prompt": prompt, "images": images, "reward_model": {"ground_truth": "12"}} | more
