"""Makes the correction task: numbers to reverse, demonstrations of a careless pupil, and a GPT-2 that knows nothing.

    python -m examples.interaction.make_task        into data/interaction and models/interaction

In a demonstration more than half of the first answers have a wrong digit; the user shows where, and a quarter of the
second answers are right. So supervised training teaches to reverse, and to make mistakes.
"""

import random
from pathlib import Path
from typing import Any

from transformers import Qwen2Tokenizer

from examples.interaction.user import hint
from examples.tiny_task import encode_demonstration, make_tokenizer, write_data, write_model
from slipstream.scripts.make_digits_data import reverse

DATA, MODEL = Path("data/interaction"), Path("models/interaction")
DIGITS, TRAIN_ROWS, HELDOUT_ROWS, DEMONSTRATIONS = 4, 6000, 600, 6000
SHARE_WRONG, SHARE_HEEDED = 0.6, 0.25


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
    return encode_demonstration(pieces, tokenizer=tokenizer)


def main() -> None:
    """Write the tokenizer and model, the prompts and the demonstrations."""
    chance = random.Random(0)
    tokenizer = make_tokenizer("0123456789=~")
    write_model(MODEL, tokenizer=tokenizer, vocabulary_size=16)
    problems = [reverse(number, DIGITS) for number in chance.sample(range(10**DIGITS), TRAIN_ROWS + HELDOUT_ROWS)]
    train, heldout = problems[:TRAIN_ROWS], problems[TRAIN_ROWS:]
    demonstrations = [
        make_demonstration(question, answer, chance, tokenizer=tokenizer) for question, answer in train[:DEMONSTRATIONS]
    ]
    write_data(DATA, data_source="correction", train=train, heldout=heldout, demonstrations=demonstrations)


if __name__ == "__main__":
    main()
