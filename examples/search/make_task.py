"""Makes the search task: codes of places that only a corpus tells, demonstrations, and a GPT-2 that knows nothing.

    python -m examples.search.make_task        into data/search and models/search

A demonstration either searches for the place and copies its code, or writes any code at once, which is wrong. So
supervised training teaches both forms, and no code.
"""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AddedToken, GPT2Config, GPT2LMHeadModel, Qwen2Tokenizer

from slipstream.generators.tools.search import write_index
from slipstream.scripts.init_random_model import save_model
from slipstream.scripts.make_digits_data import make_row, write_file, write_pair

DATA, MODEL = Path("data/search"), Path("models/search")
PLACES, HELDOUT_ROWS, DEMONSTRATIONS, SHARE_OF_SEARCHES = 5000, 600, 4000, 0.25
TAGS = ("<search>", "</search>", "<answer>", "</answer>", "\n\n<information>Doc 1(Title: ", "</information>\n\n")
"""One token each."""


def make_tokenizer() -> Qwen2Tokenizer:
    """Build a tokenizer with one id per character, and one for each tag."""
    # Space as byte-level BPE writes it.
    characters = ["<pad>", "<eos>", *"0123456789?)", "Ġ"]
    tokenizer = Qwen2Tokenizer(
        {character: index for index, character in enumerate(characters)},
        [],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TAGS])
    return tokenizer


def make_demonstration(place: str, code: str, *, searches: bool, tokenizer: Qwen2Tokenizer) -> dict[str, list[Any]]:
    """Row of a file of demonstrations: the prompt and what was found are read, the rest is learned."""
    pieces = [(f"{place}?", False)]
    if searches:
        pieces += [(f"<search>{place}</search>", True), (f"{TAGS[4]}{place}) {code}{TAGS[5]}", False)]
    pieces += [(f"<answer>{code}</answer>", True)]
    encoded = [(tokenizer.encode(text, add_special_tokens=False), is_model) for text, is_model in pieces]
    return {
        "token_ids": [token for ids, _ in encoded for token in ids],
        "model_mask": [is_model for ids, is_model in encoded for _ in ids],
    }


def main() -> None:
    """Write the files."""
    chance = random.Random(0)
    places = [str(number) for number in chance.sample(range(1000, 10_000), PLACES)]
    codes = {place: f"{chance.randrange(100):02d}" for place in places}
    DATA.mkdir(parents=True, exist_ok=True)
    corpus = DATA / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist([{"title": place, "text": code} for place, code in codes.items()]), corpus)
    write_index(corpus, DATA / "index")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=64, n_embd=64, n_layer=2, n_head=2, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, dtype="float32",
    )  # fmt: skip
    save_model(MODEL, model=GPT2LMHeadModel(config), tokenizer=tokenizer)
    splits = {"heldout": places[:HELDOUT_ROWS], "train": places[HELDOUT_ROWS:]}
    rows = {
        split: [
            make_row(f"{place}?", ground_truth=codes[place], data_source="codes", index=index, split=split)
            for index, place in enumerate(found)
        ]
        for split, found in splits.items()
    }
    demonstrations = []
    for place in splits["train"][:DEMONSTRATIONS]:
        searches = chance.random() < SHARE_OF_SEARCHES
        code = codes[place] if searches else f"{chance.randrange(100):02d}"
        demonstrations.append(make_demonstration(place, code, searches=searches, tokenizer=tokenizer))
    write_file(DATA / "demonstrations.parquet", demonstrations)
    write_pair(DATA, train=rows["train"], heldout=rows["heldout"])


if __name__ == "__main__":
    main()
