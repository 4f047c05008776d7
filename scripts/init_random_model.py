"""Make a random GPT-2, Qwen2, or Qwen2.5-VL model with a character tokenizer, in transformers format.

    python -m slipstream.scripts.init_random_model --architecture=gpt2 --layers=2 --width=64 --out=models/digits

GPT-2 reverses digits with one attention step; the rotary positions of Qwen2 need two. Heads have width 32, the smallest
of vLLM's CPU build. An image token covers 8 x 8 pixels.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.utils.logging import disable_progress_bar

from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import fail_cleanly, make_parser
from slipstream.runtime.images import takes_images
from slipstream.runtime.lora import language_model_class
from slipstream.runtime.model_files import IMAGE_FILES


def save_model(folder: Path, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model and tokenizer in transformers format, atomically."""
    unfinished = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    # transformers may import DeepSpeed here, which warns about a missing GPU.
    logging.getLogger("DeepSpeed").disabled = True
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if takes_images(str(unfinished)):
        (unfinished / IMAGE_FILES[0]).write_text(json.dumps(_PICTURES, indent=2))
    # Preparation only checks whether the folder exists, so it must appear complete.
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def load_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read model (float32) and tokenizer. Raises ConfigError."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} must be a model in transformers format, but has no config.json.")
    model = language_model_class(str(folder)).from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


CHARACTERS = "0123456789+="
PAD, EOS = "<pad>", "<eos>"
VOCABULARY_SIZE = 16
"""Characters and special tokens, rounded up to a power of two."""


VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""Ids 14 to 17."""
_PATCH = 4
_LIVELY = 0.1
"""Standard deviation of weights: with 0.02, so narrow a model does not learn to see."""
_PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": _PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
"""Images of up to 64 tokens are not resized."""


def make_tokenizer(*, architecture: str = "qwen2") -> Qwen2Tokenizer:
    """Build a tokenizer with one id per character. It silently drops unknown characters, so callers must check.

    transformers ignores other classes than Qwen2Tokenizer in such a folder.
    """
    more = [*VISION_TOKENS] if architecture == "qwen2_5_vl" else []
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS, *more])}
    return Qwen2Tokenizer(
        vocabulary, [], unk_token=PAD, pad_token=PAD, eos_token=EOS, additional_special_tokens=more or None
    )


def make_model(
    *, architecture: str = "qwen2", layers: int, width: int, seed: int, head_width: int = 32, max_length: int = 256
) -> PreTrainedModel:
    """Build a float32 model without dropout; its weights depend only on `seed`. Raises ConfigError."""
    if width % head_width:
        raise ConfigError(f"--width must be a multiple of {head_width}, the width of a head, got {width}.")
    build = _ARCHITECTURES[architecture]
    # Keep the caller's random numbers independent of the model size.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(layers=layers, width=width, num_heads=width // head_width, max_length=max_length)


def _sizes(*, layers: int, width: int, num_heads: int, max_length: int) -> dict[str, Any]:
    """Arguments by names that the configs of all architectures accept."""
    return _SHARED | {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": max_length,
    }


def _make_qwen2(*, width: int, num_heads: int, **sizes: int) -> Qwen2ForCausalLM:
    own = {"intermediate_size": width * 11 // 4, "num_key_value_heads": num_heads, "pad_token_id": 0}
    return Qwen2ForCausalLM(Qwen2Config(**own, **_sizes(width=width, num_heads=num_heads, **sizes)))


def _make_qwen2_5_vl(*, layers: int, width: int, num_heads: int, max_length: int) -> Qwen2_5_VLForConditionalGeneration:
    text = _make_qwen2(layers=layers, width=width, num_heads=num_heads, max_length=max_length).config.to_dict()
    # A quarter of each half head encodes time, the rest rows and columns.
    half = width // num_heads // 2
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half // 4, half * 3 // 8, half * 3 // 8]}
    text |= {
        "vocab_size": 2 * VOCABULARY_SIZE,
        "rope_parameters": rope,
        "model_type": None,
        "initializer_range": _LIVELY,
    }
    vision = {
        "initializer_range": _LIVELY, "depth": layers, "hidden_size": width, "intermediate_size": width * 2,
        "num_heads": num_heads, "out_hidden_size": width, "patch_size": _PATCH, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": _PATCH * 4, "fullatt_block_indexes": [layers - 1],
    }  # fmt: skip
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids: dict[str, Any] = dict(zip(names, range(len(CHARACTERS) + 2, len(CHARACTERS) + 6), strict=True))
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids, **_SHARED)
    )


_SHARED: dict[str, Any] = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 1, "dtype": "float32"}
_ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "gpt2": lambda **sizes: GPT2LMHeadModel(
        GPT2Config(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, **_sizes(**sizes))
    ),
    "qwen2": _make_qwen2,
    "qwen2_5_vl": _make_qwen2_5_vl,
}


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Write the files."""
    parser = make_parser("slipstream.scripts.init_random_model", __doc__)
    parser.add_argument("--architecture", choices=sorted(_ARCHITECTURES), default="qwen2", help="model family (qwen2)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (4)")
    parser.add_argument("--width", type=int, default=128, help="width of the residual stream (128)")
    parser.add_argument(
        "--head-width", type=int, default=32, help="width of an attention head, a divisor of --width (32)"
    )
    parser.add_argument("--max-length", type=int, default=256, help="longest sequence, tokens (256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (0)")
    parser.add_argument(
        "--out", type=Path, default=Path("models/digits-random"), help="folder to write (models/digits-random)"
    )
    options = vars(parser.parse_args(arguments))
    disable_progress_bar()
    out = options.pop("out")
    model = make_model(**options)
    save_model(out, model=model, tokenizer=make_tokenizer(architecture=options["architecture"]))
    print(f"{out}: {model.num_parameters():,} parameters, {options['layers']} layers of width {options['width']}")


if __name__ == "__main__":
    main()
