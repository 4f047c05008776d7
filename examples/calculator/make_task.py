"""Makes the calculator task: products of two-digit numbers, demonstrations, and an untrained GPT-2.

    python -m examples.calculator.make_task        into data/calculator and models/calculator

A demonstration either calls the calculator and copies its result, or writes the product directly. Both are correct, so
supervised training teaches both formats, but hardly how to multiply.
"""

import random
from pathlib import Path
from typing import Any

from transformers import Qwen2Tokenizer

from examples.tiny_task import encode_demonstration, make_tokenizer, write_data, write_model

DATA, MODEL = Path("data/calculator"), Path("models/calculator")
HELDOUT_ROWS, DEMONSTRATIONS, SHARE_OF_CALLS = 600, 4000, 0.25
CALL, END_OF_CALL = "Action: calculator\nAction Input: ", "\nObservation:"
"""Call format `react`; one token each."""


def make_demonstration(question: str, answer: str, *, calls: bool, tokenizer: Qwen2Tokenizer) -> dict[str, list[Any]]:
    """Encode a demonstration: the model learns everything except the prompt and the calculator's result."""
    expression = question.removesuffix("=")
    pieces = [(question, False)]
    if calls:
        pieces += [(CALL + expression + END_OF_CALL, True), (f" {answer}\n", False)]
    pieces += [(f"{answer}<eos>", True)]
    return encode_demonstration(pieces, tokenizer=tokenizer)


def main() -> None:
    """Write tokenizer, model, prompts, and demonstrations."""
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    random.Random(0).shuffle(pairs)
    problems = [(f"{left}*{right}=", str(left * right)) for left, right in pairs]
    tokenizer = make_tokenizer("0123456789*=.- \n", texts=(CALL, END_OF_CALL))
    write_model(MODEL, tokenizer=tokenizer, vocabulary_size=32)
    heldout, train = problems[:HELDOUT_ROWS], problems[HELDOUT_ROWS:]
    chance = random.Random(1)
    demonstrations = [
        make_demonstration(question, answer, calls=chance.random() < SHARE_OF_CALLS, tokenizer=tokenizer)
        for question, answer in train[:DEMONSTRATIONS]
    ]
    write_data(DATA, data_source="multiplication", train=train, heldout=heldout, demonstrations=demonstrations)


if __name__ == "__main__":
    main()
