"""Makes demonstrations of spelling words backward, and an untrained GPT-2.

    python -m examples.reasoning_gym.make_task     into data/spelling, next to the prompts, and models/spelling

The prompts come from reasoning-gym through `make_prompts`. Each of their sentences is one token; everything else is
characters. More than half of the demonstrations have a wrong letter, so the model learns the task and to make mistakes.
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
    """Write tokenizer, model, and demonstrations for the existing prompts."""
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
