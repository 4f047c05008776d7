"""A real model learns to follow constraints that a program checks: short descriptions in lowercase.

python -m examples.smollm2_lora.make_task        into data/smollm2_lora
"""

import random
from pathlib import Path

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardInput
from slipstream.scripts.make_digits_data import make_row, split_rows, write_pair

DATA, HELDOUT_ROWS = Path("data/smollm2_lora"), 24
LEAST_WORDS, MOST_WORDS = 4, 12
THINGS = """
apple beach bear bell bicycle bird boat book bread bridge candle castle cat chair cheese church city clock
cloud coffee cow desert dog door dragon farm fire fish flower forest frog garden glass grass guitar hammer
harbor hill honey horse hotel house ice island key king kitchen knife ladder lake lamp leaf lemon letter
library lion map market milk mirror money moon mountain mouse museum night ocean orange owl paper park pencil
piano planet queen rain river road robot rose salt sand school sea sheep ship shoe snow spider spoon star
stone storm summer sun table tea tiger train tree valley village violin water whale wheel wind window winter
wolf
"""


def check(sample: RewardInput) -> Reward:
    """Reward the share of kept constraints; correct if all are kept."""
    words = sample.response.split()
    kept = {
        "lowercase": sample.response == sample.response.lower(),
        "length": LEAST_WORDS <= len(words) <= MOST_WORDS,
        "mention": sample.ground_truth in [word.strip(".,:;!?\"'").lower() for word in words],
        "end": sample.stop_reason == "stop",
    }
    parts = {name: float(is_kept) for name, is_kept in kept.items()}
    return Reward(total=sum(parts.values()) / len(parts), parts=parts, is_correct=all(kept.values()))


def main() -> None:
    """Write the prompts."""
    things = THINGS.split()
    random.Random(0).shuffle(things)

    def convert(thing: str, **place: object) -> dict[str, object]:
        text = f"Describe a {thing} in at most {MOST_WORDS} words. Use only lowercase letters."
        return make_row([{"role": "user", "content": text}], ground_truth=thing, data_source="constraints", **place)

    write_pair(DATA, **split_rows(things, len(things) - HELDOUT_ROWS, convert))


if __name__ == "__main__":
    main()
