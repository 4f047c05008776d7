"""Makes the task of the real model: products of two-digit numbers as chat messages, and demonstrations.

    python -m examples.smollm2_calculator.make_task        into data/smollm2_calculator

Half of the demonstrations call the calculator, the others write the product directly, as in examples/calculator.
"""

import random
from itertools import product
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from examples.tiny_task import encode_demonstration, write_data
from slipstream.configs.load import cache_folder

DATA, MODEL = Path("data/smollm2_calculator"), "smollm2-135m-instruct"
TRAIN_ROWS, HELDOUT_ROWS, DEMONSTRATIONS, SHARE_OF_CALLS = 600, 64, 128, 0.5


def messages(left: int, right: int) -> list[dict[str, str]]:
    """Chat messages of a prompt."""
    return [
        {"role": "system", "content": "Reply with the number only."},
        {"role": "user", "content": f"What is {left} * {right}?"},
    ]


def make_demonstration(left: int, right: int, *, calls: bool, tokenizer: Any) -> dict[str, list[Any]]:
    """Encode a demonstration: the model learns everything except the prompt and the calculator's result."""
    prompt = tokenizer.apply_chat_template(messages(left, right), add_generation_prompt=True, tokenize=False)
    pieces = [(prompt, False)]
    if calls:
        call = f"Action: calculator\nAction Input: {left}*{right}\nObservation:"
        pieces += [(call, True), (f" {left * right}\n", False)]
    pieces += [(f"{left * right}{tokenizer.eos_token}", True)]
    return encode_demonstration(pieces, tokenizer=tokenizer)


def main() -> None:
    """Write prompts and demonstrations."""
    pairs = list(product(range(10, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    tokenizer = AutoTokenizer.from_pretrained(cache_folder(MODEL))
    chance = random.Random(1)
    demonstrations = [
        make_demonstration(left, right, calls=chance.random() < SHARE_OF_CALLS, tokenizer=tokenizer)
        for left, right in pairs[:DEMONSTRATIONS]
    ]
    problems = [(messages(left, right), str(left * right)) for left, right in pairs[DEMONSTRATIONS:]]
    train, heldout = problems[:TRAIN_ROWS], problems[TRAIN_ROWS : TRAIN_ROWS + HELDOUT_ROWS]
    write_data(DATA, data_source="products", train=train, heldout=heldout, demonstrations=demonstrations)


if __name__ == "__main__":
    main()
