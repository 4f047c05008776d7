"""Makes the calculator task: products of two-digit numbers, demonstrations, and a GPT-2 that knows nothing.

    python -m examples.calculator.make_task        into data/calculator and models/calculator

A demonstration either calls the calculator and copies its result, or writes the product at once. Both are right, so
supervised training teaches the form of both, and how to multiply hardly.
"""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AddedToken, GPT2Config, GPT2LMHeadModel, Qwen2Tokenizer

from slipstream.scripts.init_random_model import save_model
from slipstream.scripts.make_digits_data import make_row, write_file, write_pair

DATA, MODEL = Path("data/calculator"), Path("models/calculator")
HELDOUT_ROWS, DEMONSTRATIONS, SHARE_OF_CALLS = 600, 4000, 0.25
CALL, END_OF_CALL = "Action: calculator\nAction Input: ", "\nObservation:"
"""Call format `react`; one token each."""


def make_tokenizer() -> Qwen2Tokenizer:
    """Build a tokenizer with one id per character, and one for each end of a call."""
    # Space and line break as byte-level BPE writes them.
    characters = ["<pad>", "<eos>", *"0123456789*=.-", "Ġ", "Ċ"]
    tokenizer = Qwen2Tokenizer(
        {character: index for index, character in enumerate(characters)},
        [],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (CALL, END_OF_CALL)])
    return tokenizer


def make_demonstration(question: str, answer: str, *, calls: bool, tokenizer: Qwen2Tokenizer) -> dict[str, list[Any]]:
    """Row of a file of demonstrations: the prompt and the calculator's result are read, the rest is learned."""
    expression = question.removesuffix("=")
    pieces = [(question, False)]
    if calls:
        pieces += [(CALL + expression + END_OF_CALL, True), (f" {answer}\n", False)]
    pieces += [(f"{answer}<eos>", True)]
    encoded = [(tokenizer.encode(text, add_special_tokens=False), is_model) for text, is_model in pieces]
    return {
        "token_ids": [token for ids, _ in encoded for token in ids],
        "model_mask": [is_model for ids, is_model in encoded for _ in ids],
    }


def main() -> None:
    """Write the files."""
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(0).shuffle(pairs)
    problems = [(f"{left}*{right}=", str(left * right)) for left, right in pairs]
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=64, n_embd=64, n_layer=2, n_head=2, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, dtype="float32",
    )  # fmt: skip
    save_model(MODEL, model=GPT2LMHeadModel(config), tokenizer=tokenizer)
    splits = {"heldout": problems[:HELDOUT_ROWS], "train": problems[HELDOUT_ROWS:]}
    rows = {
        split: [
            make_row(question, ground_truth=answer, data_source="multiplication", index=index, split=split)
            for index, (question, answer) in enumerate(rows)
        ]
        for split, rows in splits.items()
    }
    chance = random.Random(1)
    demonstrations = [
        make_demonstration(question, answer, calls=chance.random() < SHARE_OF_CALLS, tokenizer=tokenizer)
        for question, answer in splits["train"][:DEMONSTRATIONS]
    ]
    DATA.mkdir(parents=True, exist_ok=True)
    write_file(DATA / "demonstrations.parquet", demonstrations)
    write_pair(DATA, train=rows["train"], heldout=rows["heldout"])


if __name__ == "__main__":
    main()
