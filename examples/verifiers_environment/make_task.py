"""Makes demonstrations of unsure answers for the environment `sums_v1`, and an untrained GPT-2.

    python -m examples.verifiers_environment.make_task     into data/sums_v1, next to the rows, and models/sums_v1

The first answer is always right. When asked whether it is sure, half of the demonstrations change to another number.
"""

import random
from pathlib import Path

from examples.tiny_task import encode_demonstration, make_tokenizer, write_model
from slipstream.broker.dataset import Dataset
from slipstream.scripts.make_digits_data import write_file

DATA, MODEL = Path("data/sums_v1"), Path("models/sums_v1")
DEMONSTRATIONS, SHARE_TIMID = 8000, 0.5
DOUBT = "are you sure?"


def main() -> None:
    """Write tokenizer, model, and demonstrations for the existing prompts."""
    chance = random.Random(0)
    tokenizer = make_tokenizer("0123456789+? \n", texts=("what is ", " + ", DOUBT))
    ends = "{{ '\n' if message.role == 'user' else '<eos>' }}"
    tokenizer.chat_template = f"{{% for message in messages %}}{{{{ message.content }}}}{ends}{{% endfor %}}"
    write_model(MODEL, tokenizer=tokenizer, vocabulary_size=32)
    rows, demonstrations = [*Dataset(DATA / "train.parquet")], []
    for _ in range(DEMONSTRATIONS):
        row = chance.choice(rows)
        last = str(chance.randrange(20, 99)) if chance.random() < SHARE_TIMID else row.ground_truth
        pieces = [(f"{row.prompt[0]['content']}\n", False), (f"{row.ground_truth}<eos>", True)]
        pieces += [(f"{DOUBT}\n", False), (f"{last}<eos>", True)]
        demonstrations.append(encode_demonstration(pieces, tokenizer=tokenizer))
    write_file(DATA / "demonstrations.parquet", demonstrations)


if __name__ == "__main__":
    main()
