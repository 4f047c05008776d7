"""Makes preference pairs with a hidden criterion: five digits, with as many sevens as possible.

python -m examples.reward_model.make_pairs        data/digits -> data/digits_pairs
"""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.generators.rewards.reward import RewardInput

SOURCE, OUT = Path("data/digits/train.parquet"), Path("data/digits_pairs")
PAIRS, HELDOUT_PAIRS = 12_000, 500


def taste(sample: RewardInput) -> float:
    """Reward the fraction of sevens among the first five digits, minus 0.2 per extra or missing digit."""
    return liking(sample.response)


def liking(answer: str) -> float:
    """Like `taste`, for a text."""
    return (answer[:5].count("7") - abs(len(answer) - 5)) / 5


def make_answer(rng: random.Random) -> str:
    """Write digits with a random fraction of sevens, mostly five digits."""
    share, length = rng.random(), rng.choice([5] * 6 + [1, 2, 3, 4, 6, 7])
    return "".join("7" if rng.random() < share else rng.choice("012345689") for _ in range(length))


def main() -> None:
    """Write training and held-out pairs as Parquet."""
    rng = random.Random(0)
    prompts = pq.read_table(SOURCE).column("prompt").to_pylist()
    rows = []
    while len(rows) < PAIRS:
        rejected, chosen = sorted((make_answer(rng), make_answer(rng)), key=liking)
        if liking(chosen) > liking(rejected):
            rows.append({"prompt": rng.choice(prompts), "chosen": chosen, "rejected": rejected})
    OUT.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows[HELDOUT_PAIRS:]), OUT / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:HELDOUT_PAIRS]), OUT / "heldout.parquet")


if __name__ == "__main__":
    main()
