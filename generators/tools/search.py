"""Search: finds passages in a local index or through a service."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, reduce
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.configs.base import ConfigError
from slipstream.generators.errors import ToolError


class Passage(NamedTuple):
    """A passage of a corpus."""

    title: str
    text: str


# --- local index -----------------------------------------------------------------------------------------------------
_ANALYZER = "passages"
_NUM_THREADS = min(4, os.cpu_count() or 1)
_MAX_WORDS = 64
"""Search time grows with the number of words."""
_WRITER_BYTES = 256 * 2**20
_CACHED_QUERIES = 4096
"""The answers of a group often send the same query."""


def _tantivy() -> Any:
    try:
        import tantivy
    except ImportError as error:
        raise ConfigError("a search index needs tantivy: pip install 'slipstream[search]'.") from error
    return tantivy


def _analyzer(language: str) -> Any:
    from tantivy import Filter, TextAnalyzerBuilder, Tokenizer

    steps = [Filter.lowercase(), Filter.remove_long(64), Filter.ascii_fold()]
    if language:
        steps += [Filter.stopword(language), Filter.stemmer(language)]
    return reduce(TextAnalyzerBuilder.filter, steps, TextAnalyzerBuilder(Tokenizer.simple())).build()


def write_index(corpus: Path, folder: Path, *, language: str = "english") -> int:
    """Index a file's passages and return their number. Never leaves a partial index. Raises ConfigError.

    `language`: for stop words and stemming; empty = neither.
    """
    tantivy = _tantivy()
    builder = tantivy.SchemaBuilder()
    for field in Passage._fields:
        builder.add_text_field(field, stored=True, tokenizer_name=_ANALYZER)
    unfinished = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    index = tantivy.Index(builder.build(), path=str(unfinished))
    try:
        index.register_tokenizer(_ANALYZER, _analyzer(language))
    except ValueError as error:
        raise ConfigError(f"--language must be one that tantivy knows, such as english, got {language!r}.") from error
    # One thread makes the order of equal scores deterministic.
    writer = index.writer(_WRITER_BYTES, num_threads=1)
    count = 0
    for passage in read_corpus(corpus):
        writer.add_document(tantivy.Document(**passage._asdict()))
        count += 1
    if not count:
        raise ConfigError(f"{corpus} must contain at least one passage, but is empty.")
    writer.commit()
    writer.wait_merging_threads()
    (unfinished / "language").write_text(language)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return count


def read_corpus(path: Path) -> Iterator[Passage]:
    """Read the passages of a JSON lines or Parquet file. Raises ConfigError.

    A row has `contents` with the title in the first line, as in Search-R1's corpora; or `text` and optionally `title`.
    """
    try:
        rows: Iterator[Any] = _json_lines(path)
        if path.suffix == ".parquet":
            rows = (row for batch in pq.ParquetFile(path).iter_batches() for row in batch.to_pylist())
        for number, values in enumerate(rows):
            row = values if isinstance(values, dict) else {}
            title, text = row.get("title") or "", row.get("text")
            if isinstance(contents := row.get("contents"), str):
                title, _, text = contents.partition("\n")
            if not isinstance(title, str) or not isinstance(text, str):
                raise ConfigError(
                    f"{path}, row {number} must have a string `contents`, or strings `text` and `title`, got "
                    f"{str(values)[:80]}."
                )
            yield Passage(title, text)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path} must be JSON lines or a Parquet file, but cannot be read: {error}.") from error


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


class LocalIndex:
    """A tantivy index, ranked by BM25. Generators on a machine share its memory."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder holds no index."""
        try:
            index = _tantivy().Index.open(str(folder))
            index.register_tokenizer(_ANALYZER, _analyzer((folder / "language").read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"index must be a folder written by `python -m slipstream.scripts.make_search_index`, or an address "
                f"such as http://127.0.0.1:8000/retrieve, got {str(folder)!r}: {error}."
            ) from error
        self._index, self._searcher = index, index.searcher()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="search")
        self._find = lru_cache(_CACHED_QUERIES)(self._search)

    async def find(self, query: str, topk: int) -> list[Passage]:
        """At most `topk` passages, best first. Runs in a thread."""
        # Punctuation would act as query operators.
        words = " ".join(re.findall(r"\w+", query.lower())[:_MAX_WORDS])
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._find, words, topk)

    def _search(self, words: str, topk: int) -> list[Passage]:
        try:
            query = self._index.parse_query(words, list(Passage._fields))
        except ValueError:
            return []  # only stop words
        hits = self._searcher.search(query, topk, count=False).hits
        found = (self._searcher.doc(address) for _, address in hits)
        return [Passage(document["title"][0], document["text"][0]) for document in found]


# --- retrieval service -----------------------------------------------------------------------------------------------
class RemoteIndex:
    """Service with the API of Search-R1's retrieval server: POST {queries, topk, return_scores}.

    Source: https://github.com/PeterGriffinJin/Search-R1, search_r1/search/retrieval_server.py
    """

    def __init__(self, address: str) -> None:
        self._address = address
        # As in HttpTool.
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def find(self, query: str, topk: int) -> list[Passage]:
        try:
            body = {"queries": [query], "topk": topk, "return_scores": True}
            answer = await self._client.post(self._address, json=body)
            answer.raise_for_status()
            found = (item.get("document", item)["contents"] for item in answer.json()["result"][0])
            return [Passage(*contents.partition("\n")[::2]) for contents in found][:topk]
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ToolError(
                f"the search at {self._address} must answer in the format of Search-R1's server, got "
                f"{type(error).__name__}: {error}"
            ) from error


@cache
def open_index(index: str) -> LocalIndex | RemoteIndex:
    """Open the index at an address or in a folder. Raises ConfigError."""
    return RemoteIndex(index) if index.startswith(("http://", "https://")) else LocalIndex(Path(index))


class Search:
    """Tool that searches an index."""

    def __init__(self, *, index: str, topk: int = 3) -> None:
        """`index`: folder or address. Raises ConfigError."""
        self._index = open_index(index)
        self._topk = topk

    async def __call__(self, query: str) -> str:
        """Search a corpus and read the passages that match best.

        Args:
            query: Words to look for.
        """
        passages = await self._index.find(query, self._topk)
        # Search-R1's format.
        shown = (f"Doc {number}(Title: {title}) {text}\n" for number, (title, text) in enumerate(passages, start=1))
        return "".join(shown) or "(nothing was found)"
