"""Makes the correction task: numbers to reverse, demonstrations with mistakes, and an untrained GPT-2.

    python -m examples.interaction.make_task        into data/interaction and models/interaction

In more than half of the demonstrations the first answer has a wrong digit. The user then shows where, and a quarter of
the second answers are right. So supervised training teaches the model to reverse numbers and to make mistakes.
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
    """Encode a demonstration: the model learns the answers, not the prompt and the hint."""
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
    """Write tokenizer, model, prompts, and demonstrations."""
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
