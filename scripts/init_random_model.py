"""Makes a randomly initialized Qwen2 model with a character tokenizer, in transformers format.

    python -m slipstream.scripts.init_random_model --layers=4 --width=128 --out=models/digits-random

Heads are 32 wide and embeddings are not tied: every engine that supports Qwen2 loads it.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
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


HEAD_WIDTH = 32
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


def make_model(*, layers: int, width: int, seed: int, max_length: int = 256) -> Qwen2ForCausalLM:
    """Build a float32 model whose weights depend on `seed` only. Raises ConfigError."""
    if width % HEAD_WIDTH:
        raise ConfigError(f"--width must be a multiple of {HEAD_WIDTH}, the width of a head, got {width}.")
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_WIDTH,
        num_key_value_heads=width // HEAD_WIDTH,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    # Forked, so that the caller's random numbers do not depend on the size of the model.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


@fail_cleanly()
def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(
        "python -m slipstream.scripts.init_random_model",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks (4)")
    parser.add_argument(
        "--width", type=int, default=128, help=f"of the residual stream, a multiple of {HEAD_WIDTH} (128)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument(
        "--out", type=Path, default=Path("models/digits-random"), help="folder to write (models/digits-random)"
    )
    options = parser.parse_args(arguments)
    disable_progress_bar()
    model = make_model(layers=options.layers, width=options.width, seed=options.seed)
    save_model(options.out, model=model, tokenizer=make_tokenizer())
    print(f"{options.out}: {model.num_parameters():,} parameters, {options.layers} layers of width {options.width}")


if __name__ == "__main__":
    main()
