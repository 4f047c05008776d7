"""Makes the search task: codes of places that only a corpus contains, demonstrations, and an untrained GPT-2.

    python -m examples.search.make_task        into data/search and models/search

A demonstration either searches for the place and copies its code, or directly writes a random code, which is wrong. So
supervised training teaches both formats, but no codes.
"""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import Qwen2Tokenizer

from examples.tiny_task import encode_demonstration, make_tokenizer, write_data, write_model
from slipstream.generators.tools.search import write_index

DATA, MODEL = Path("data/search"), Path("models/search")
PLACES, HELDOUT_ROWS, DEMONSTRATIONS, SHARE_OF_SEARCHES = 5000, 600, 4000, 0.25
TAGS = ("<search>", "</search>", "<answer>", "</answer>", "\n\n<information>Doc 1(Title: ", "</information>\n\n")
"""Each is one token."""


def make_demonstration(place: str, code: str, *, searches: bool, tokenizer: Qwen2Tokenizer) -> dict[str, list[Any]]:
    """Encode a demonstration: the model learns everything except the prompt and the search result."""
    pieces = [(f"{place}?", False)]
    if searches:
        pieces += [(f"<search>{place}</search>", True), (f"{TAGS[4]}{place}) {code}{TAGS[5]}", False)]
    pieces += [(f"<answer>{code}</answer>", True)]
    return encode_demonstration(pieces, tokenizer=tokenizer)


def main() -> None:
    """Write tokenizer, model, prompts, and demonstrations."""
    chance = random.Random(0)
    places = [str(number) for number in chance.sample(range(1000, 10_000), PLACES)]
    codes = {place: f"{chance.randrange(100):02d}" for place in places}
    DATA.mkdir(parents=True, exist_ok=True)
    corpus = DATA / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist([{"title": place, "text": code} for place, code in codes.items()]), corpus)
    write_index(corpus, DATA / "index")
    tokenizer = make_tokenizer("0123456789?) ", texts=TAGS)
    write_model(MODEL, tokenizer=tokenizer, vocabulary_size=32)
    problems = [(f"{place}?", code) for place, code in codes.items()]
    demonstrations = []
    for place in places[HELDOUT_ROWS:][:DEMONSTRATIONS]:
        searches = chance.random() < SHARE_OF_SEARCHES
        code = codes[place] if searches else f"{chance.randrange(100):02d}"
        demonstrations.append(make_demonstration(place, code, searches=searches, tokenizer=tokenizer))
    heldout, train = problems[:HELDOUT_ROWS], problems[HELDOUT_ROWS:]
    write_data(DATA, data_source="codes", train=train, heldout=heldout, demonstrations=demonstrations)


if __name__ == "__main__":
    main()
