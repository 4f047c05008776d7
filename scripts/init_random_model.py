"""Makes a randomly initialized GPT-2 or Qwen2 model with a character tokenizer, in transformers format.

    python -m slipstream.scripts.init_random_model --architecture=gpt2 --layers=2 --width=64 --out=models/digits

GPT-2 learns its positions and reverses digits with one attention step; the rotary positions of Qwen2 need two. Heads
are 32 wide, the narrowest that vLLM's CPU build knows, and embeddings are not tied.
"""

import argparse
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.utils.logging import disable_progress_bar

from slipstream.configs.base import ConfigError
from slipstream.runtime.command_line import fail_cleanly


def save_model(folder: Path, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model and tokenizer in transformers format; replaces an existing folder, completely or not at all."""
    unfinished = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    # Where accelerate is, which peft needs, transformers imports DeepSpeed here, which warns that there is no GPU.
    logging.getLogger("DeepSpeed").disabled = True
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    # The folder's presence means that it is complete: preparation steps check for it.
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def load_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read model (float32) and tokenizer. Raises ConfigError."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} must be a model in transformers format, but has no config.json.")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


CHARACTERS = "0123456789+="
PAD, EOS = "<pad>", "<eos>"
VOCABULARY_SIZE = 16
"""Ids of characters and special tokens, rounded up to a power of two."""


def make_tokenizer() -> Qwen2Tokenizer:
    """Build a tokenizer with one id per character. It drops unknown characters silently, so that readers must check.

    Of class Qwen2Tokenizer, because transformers loads no other for a model of this type, whatever the folder says.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    return Qwen2Tokenizer(vocabulary, [], unk_token=PAD, pad_token=PAD, eos_token=EOS)


def make_model(
    *, architecture: str = "qwen2", layers: int, width: int, seed: int, head_width: int = 32, max_length: int = 256
) -> PreTrainedModel:
    """Build a float32 model, without dropout, whose weights depend on `seed` only. Raises ConfigError."""
    if width % head_width:
        raise ConfigError(f"--width must be a multiple of {head_width}, the width of a head, got {width}.")
    build = _ARCHITECTURES[architecture]
    # Forked, so that the caller's random numbers do not depend on the size of the model.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(layers=layers, width=width, num_heads=width // head_width, max_length=max_length)


def _make_gpt2(*, layers: int, width: int, num_heads: int, max_length: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY_SIZE,
            n_positions=max_length,
            n_embd=width,
            n_layer=layers,
            n_head=num_heads,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            **_SHARED,
        )
    )


def _make_qwen2(*, layers: int, width: int, num_heads: int, max_length: int) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads,
            max_position_embeddings=max_length,
            pad_token_id=0,
            **_SHARED,
        )
    )


_SHARED: dict[str, Any] = {
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "dtype": "float32",
}
_ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {"gpt2": _make_gpt2, "qwen2": _make_qwen2}


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(
        "python -m slipstream.scripts.init_random_model",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--architecture", choices=sorted(_ARCHITECTURES), default="qwen2", help="model family (qwen2)")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (4)")
    parser.add_argument("--width", type=int, default=128, help="of the residual stream (128)")
    parser.add_argument("--head-width", type=int, default=32, help="of an attention head, a divisor of --width (32)")
    parser.add_argument("--max-length", type=int, default=256, help="longest sequence, tokens (256)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument(
        "--out", type=Path, default=Path("models/digits-random"), help="folder to write (models/digits-random)"
    )
    options = parser.parse_args(arguments)
    disable_progress_bar()
    model = make_model(
        architecture=options.architecture,
        layers=options.layers,
        width=options.width,
        seed=options.seed,
        head_width=options.head_width,
        max_length=options.max_length,
    )
    save_model(options.out, model=model, tokenizer=make_tokenizer())
    print(f"{options.out}: {model.num_parameters():,} parameters, {options.layers} layers of width {options.width}")


if __name__ == "__main__":
    main()
