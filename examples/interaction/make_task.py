"""Makes the correction task: numbers to reverse, demonstrations of a careless pupil, and a GPT-2 that knows nothing.

    python -m examples.interaction.make_task        into data/interaction and models/interaction

In a demonstration more than half of the first answers have a wrong digit; the user shows where, and a quarter of the
second answers are right. So supervised training teaches to reverse, and to make mistakes.
"""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Tokenizer

from examples.interaction.user import hint
from slipstream.scripts.init_random_model import save_model
from slipstream.scripts.make_digits_data import make_row, reverse, write_file, write_pair

DATA, MODEL = Path("data/interaction"), Path("models/interaction")
DIGITS, TRAIN_ROWS, HELDOUT_ROWS, DEMONSTRATIONS = 4, 6000, 600, 6000
SHARE_WRONG, SHARE_HEEDED = 0.6, 0.25


def make_tokenizer() -> Qwen2Tokenizer:
    """Build a tokenizer with one id per character."""
    characters = ["<pad>", "<eos>", *"0123456789=~"]
    vocabulary = {character: index for index, character in enumerate(characters)}
    return Qwen2Tokenizer(vocabulary, [], unk_token="<pad>", pad_token="<pad>", eos_token="<eos>")


def make_demonstration(
    question: str, answer: str, chance: random.Random, *, tokenizer: Qwen2Tokenizer
) -> dict[str, list[Any]]:
    """Row of a file of demonstrations: prompt and hint are read, answers are learned."""
    first = answer
    if chance.random() < SHARE_WRONG:
        place = chance.randrange(DIGITS)
        wrong = chance.choice([digit for digit in "0123456789" if digit != answer[place]])
        first = answer[:place] + wrong + answer[place + 1 :]
    pieces = [(question, False), (f"{first}<eos>", True)]
    if first != answer:
        second = answer if chance.random() < SHARE_HEEDED else first
        pieces += [(hint(first, answer), False), (f"{second}<eos>", True)]
    encoded = [(tokenizer.encode(text, add_special_tokens=False), is_model) for text, is_model in pieces]
    return {
        "token_ids": [token for ids, _ in encoded for token in ids],
        "model_mask": [is_model for ids, is_model in encoded for _ in ids],
    }


def main() -> None:
    """Write the files."""
    chance = random.Random(0)
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_positions=64, n_embd=64, n_layer=2, n_head=2, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, dtype="float32",
    )  # fmt: skip
    save_model(MODEL, model=GPT2LMHeadModel(config), tokenizer=tokenizer)
    problems = [reverse(number, DIGITS) for number in chance.sample(range(10**DIGITS), TRAIN_ROWS + HELDOUT_ROWS)]
    splits = {"train": problems[:TRAIN_ROWS], "heldout": problems[TRAIN_ROWS:]}
    rows = {
        split: [
            make_row(question, ground_truth=answer, data_source="correction", index=index, split=split)
            for index, (question, answer) in enumerate(found)
        ]
        for split, found in splits.items()
    }
    demonstrations = [
        make_demonstration(question, answer, chance, tokenizer=tokenizer)
        for question, answer in splits["train"][:DEMONSTRATIONS]
    ]
    DATA.mkdir(parents=True, exist_ok=True)
    write_file(DATA / "demonstrations.parquet", demonstrations)
    write_pair(DATA, train=rows["train"], heldout=rows["heldout"])


if __name__ == "__main__":
    main()
