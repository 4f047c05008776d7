"""Makes demonstrations of a timid pupil for the environment `sums_v1`, and a GPT-2 that knows nothing.

    python -m examples.verifiers_environment.make_task     into data/sums_v1, beside the rows, and models/sums_v1

The pupil adds rightly. Asked whether it is sure, it gives in most of the time, and says another number.
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
    """Write the tokenizer and model, and demonstrations for the prompts that are there."""
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
