"""Time of a search in a made corpus, one query at a time and many at once.

Words follow Zipf's law, the most frequent ones are English stop words, and a query is a sample of the words of one
passage. Every query is another one, so that none is answered from memory.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness import make_parser, write_result
from slipstream.generators.tools.search import LocalIndex, write_index

_STOP_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
]
_NUM_WORDS = 30_000
_PASSAGE_WORDS = 80
_QUERY_WORDS = 8

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Make the corpus and its index, and measure every number of concurrent queries."""
    random = np.random.default_rng(0)
    texts = _make_texts(arguments.passages, random)
    with tempfile.TemporaryDirectory(prefix="search-") as folder:
        corpus, index = Path(folder) / "corpus.jsonl", Path(folder) / "index"
        corpus.write_text("\n".join(json.dumps({"contents": f"passage {n}\n{text}"}) for n, text in enumerate(texts)))
        started = time.perf_counter()
        write_index(corpus, index)
        build_s = time.perf_counter() - started
        size_mib = sum(file.stat().st_size for file in index.iterdir()) / 2**20
        console.print(f"{arguments.passages} passages: {build_s:.1f} s, {size_mib:.0f} MiB")
        rows = [
            asyncio.run(_measure(LocalIndex(index), _make_queries(texts, arguments.queries, random), num_clients))
            for num_clients in arguments.concurrency
        ]
    table = Table("queries at once", "p50, ms", "p99, ms", "queries/s")
    for row in rows:
        table.add_row(f"{row['concurrency']}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}", f"{row['per_s']:,.0f}")
    console.print(table)
    write_result(arguments, {"build_s": build_s, "size_mib": size_mib, "rows": rows})


def _make_texts(number: int, random: np.random.Generator) -> list[str]:
    letters = random.integers(ord("a"), ord("z") + 1, (_NUM_WORDS, 10)).astype(np.uint8)
    lengths = random.integers(3, 11, _NUM_WORDS)
    words = [*_STOP_WORDS, *(row[:length].tobytes().decode() for row, length in zip(letters, lengths, strict=True))]
    shares = 1 / np.arange(1, _NUM_WORDS + 1)
    drawn = random.choice(_NUM_WORDS, (number, _PASSAGE_WORDS), p=shares / shares.sum())
    return [" ".join(words[word] for word in row) for row in drawn]


def _make_queries(texts: list[str], number: int, random: np.random.Generator) -> Iterator[str]:
    for text in random.integers(0, len(texts), number):
        yield " ".join(random.choice(texts[text].split(), _QUERY_WORDS, replace=False))


async def _measure(index: LocalIndex, queries: Iterator[str], num_clients: int) -> dict[str, float]:
    times: list[float] = []
    waiting = iter(list(queries))

    async def ask() -> None:
        for query in waiting:
            started = time.perf_counter()
            await index.find(query, 3)
            times.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(num_clients)))
    p50, p99 = np.percentile(np.array(times) * 1e3, [50, 99])
    per_s = len(times) / (time.perf_counter() - started)
    return {"concurrency": num_clients, "p50_ms": float(p50), "p99_ms": float(p99), "per_s": per_s}


if __name__ == "__main__":
    parser = make_parser("benchmarks.generators.search", __doc__)
    parser.add_argument("--passages", type=int, default=50_000, help="passages of the corpus (50000)")
    parser.add_argument("--queries", type=int, default=4000, help="queries of a measurement (4000)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64], help="queries at once (1 64)")
    main(parser.parse_args())
