"""Shared by the example tasks: a character tokenizer, demonstrations, data files, and a tiny GPT-2."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AddedToken, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase, Qwen2Tokenizer

from slipstream.scripts.init_random_model import save_model
from slipstream.scripts.make_digits_data import make_row, write_file, write_pair

Problem = tuple[str | list[dict[str, str]], str]
"""Prompt, as text or chat messages, and correct answer."""


def make_tokenizer(characters: str, *, texts: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Build a tokenizer with one id per character and per text in `texts`."""
    # Byte-level BPE writes space and line break like this.
    names = ["<pad>", "<eos>", *characters.replace(" ", "Ġ").replace("\n", "Ċ")]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Qwen2Tokenizer(vocabulary, [], unk_token="<pad>", pad_token="<pad>", eos_token="<eos>")
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return tokenizer


def encode_demonstration(
    pieces: Sequence[tuple[str, bool]], *, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Any]]:
    """Encode one demonstration. Each piece is a text and whether the model learns to write it."""
    encoded = [(tokenizer.encode(text, add_special_tokens=False), is_model) for text, is_model in pieces]
    return {
        "token_ids": [token for ids, _ in encoded for token in ids],
        "model_mask": [is_model for ids, is_model in encoded for _ in ids],
    }


def write_model(folder: Path, *, tokenizer: Qwen2Tokenizer, vocabulary_size: int) -> None:
    """Write a randomly initialized GPT-2 with 0.1 million parameters."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary_size, n_positions=64, n_embd=64, n_layer=2, n_head=2, embd_pdrop=0.0, resid_pdrop=0.0,
        attn_pdrop=0.0, tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )  # fmt: skip
    save_model(folder, model=GPT2LMHeadModel(config), tokenizer=tokenizer)


def write_data(
    folder: Path,
    *,
    data_source: str,
    train: Sequence[Problem],
    heldout: Sequence[Problem],
    demonstrations: list[dict[str, list[Any]]],
) -> None:
    """Write the demonstrations, then the prompts."""
    rows = {
        split: [
            make_row(question, ground_truth=answer, data_source=data_source, index=index, split=split)
            for index, (question, answer) in enumerate(problems)
        ]
        for split, problems in (("train", train), ("heldout", heldout))
    }
    write_file(folder / "demonstrations.parquet", demonstrations)
    write_pair(folder, train=rows["train"], heldout=rows["heldout"])
