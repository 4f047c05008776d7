"""Makes demonstrations of words that are spelled backward, and a GPT-2 that knows nothing.

    python -m examples.reasoning_gym.make_task     into data/spelling, beside the prompts, and models/spelling

The prompts are reasoning-gym's own, by `make_prompts`: their sentences are one token each, all else is characters. In
more than half of the demonstrations a letter is wrong, so that the model learns the task, and to be careless.
"""

import random
from pathlib import Path
from string import ascii_letters, ascii_lowercase

from examples.tiny_task import encode_demonstration, make_tokenizer, write_model
from slipstream.broker.dataset import Dataset
from slipstream.scripts.make_digits_data import write_file
from slipstream.scripts.make_prompts import TAGS

DATA, MODEL = Path("data/spelling"), Path("models/spelling")
SENTENCES = ("Spell this word backward (example: sun -> nus):", f" {TAGS}", "<answer>", "</answer>")
SHARE_WRONG = 0.6


def main() -> None:
    """Write the tokenizer and model, and demonstrations for the prompts that are there."""
    tokenizer = make_tokenizer(ascii_letters + " ", texts=SENTENCES)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    write_model(MODEL, tokenizer=tokenizer, vocabulary_size=64)
    chance, demonstrations = random.Random(0), []
    for row in Dataset(DATA / "train.jsonl"):
        (message,) = row.prompt
        letters = [*row.ground_truth["answer"]]
        if chance.random() < SHARE_WRONG:
            letters[chance.randrange(len(letters))] = chance.choice(ascii_lowercase)
        pieces = [(message["content"], False), (f"<answer>{''.join(letters)}</answer><eos>", True)]
        demonstrations.append(encode_demonstration(pieces, tokenizer=tokenizer))
    write_file(DATA / "demonstrations.parquet", demonstrations)


if __name__ == "__main__":
    main()
