"""Seconds that `slipstream view` takes per key press, and its catalog per query, over an archive of a million rows.

The archive is created in --folder (by default a temporary one, removed at the end): rows of 13 tokens as written by the
default experiment, about 60 bytes each on disk. A key press is timed until the list shows the result.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import Input, OptionList
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from benchmarks.harness import make_parser, make_table, write_result
from slipstream.buffer.archive.index import MANIFEST, ManifestWriter, ShardEntry, next_shard
from slipstream.buffer.archive.shards import SCHEMA, tabulate
from slipstream.buffer.archive.trajectory_filter import StoredTrajectory, TrajectoryFilter
from slipstream.buffer.trajectory import Reward, Sampling, Trajectory, VersionSpan
from slipstream.observe.catalog.catalog import SORTABLE, Catalog, CatalogQuery, open_catalog
from slipstream.observe.viewer.list_screen import ViewerApp
from slipstream.observe.viewer.screens import SortScreen

_GROUP_SIZE = 8
_SHARD_ROWS = 65536
_PROMPT, _TOKENS = 6, 13
_SIZE = (160, 48)
_PIECES = [*"0123456789", "=", "<eos>"]

console = Console(highlight=False)


def main(arguments: argparse.Namespace) -> None:
    """Create the archive and print medians over rounds."""
    with tempfile.TemporaryDirectory(prefix="slipstream-viewer-") as temporary:
        folder = arguments.folder or Path(temporary)
        archive = make_archive(folder, num_rows=arguments.rows)
        size = sum(file.stat().st_size for file in archive.iterdir()) / 2**20
        console.print(f"{arguments.rows:,} rows, {size:,.0f} MiB")
        started = time.perf_counter()
        with open_catalog(str(archive), tokenizer=folder) as catalog:
            figures = {"open": [time.perf_counter() - started]}
            figures |= _time_queries(catalog, rounds=arguments.rounds)
            keys = asyncio.run(_time_keys(catalog, rounds=arguments.rounds))
    _print("query", figures)
    _print("key", keys)
    write_result(arguments, {"archive_mib": size, "queries": figures, "keys": keys})


def _print(title: str, figures: dict[str, list[float]]) -> None:
    rows = [{"name": name, "median": statistics.median(each), "max": max(each)} for name, each in figures.items()]
    console.print(make_table(rows, {title: "{name}", "median, s": "{median:.3f}", "largest, s": "{max:.3f}"}))


# --- queries ---------------------------------------------------------------------------------------------------------
def _time_queries(catalog: Catalog, *, rounds: int) -> dict[str, list[float]]:
    """Return query -> seconds of each round. Nothing is cached between rounds."""
    last = catalog.rows["id"][-1].as_py()
    queries: dict[str, Callable[[], Any]] = {
        f"sort by {column}": lambda column=column: catalog.page(CatalogQuery(sort_by=column)) for column in SORTABLE
    }
    conditions: dict[str, dict[str, Any]] = {
        "reward": {"min_reward": 0.9},
        "steps": {"min_step": 100, "max_step": 200},
        "versions": {"version": 50},
        "group": {"group_id": "1000"},
        "text": {"text": "12345"},
        "text and reward": {"text": "543", "min_reward": 0.5},
    }
    for name, fields in conditions.items():
        queries[f"filter by {name}"] = lambda fields=fields: catalog.page(CatalogQuery(TrajectoryFilter(**fields)))
    queries["one trajectory"] = lambda: catalog.trajectory(last)
    queries["one group"] = lambda: catalog.group(last.split("-")[0])
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, query in queries.items():
            _drop_cache(catalog)
            started = time.perf_counter()
            query()
            found.setdefault(name, []).append(time.perf_counter() - started)
    return found


def _drop_cache(catalog: Catalog) -> None:
    """Drop the results that the catalog caches for the following pages."""
    catalog._select.cache_clear()
    catalog._found = "", {}


# --- keys ------------------------------------------------------------------------------------------------------------
async def _time_keys(catalog: Catalog, *, rounds: int) -> dict[str, list[float]]:
    """Return key -> seconds of each round, from key press to drawn list."""
    found: dict[str, list[float]] = {}
    app = ViewerApp(catalog, name="benchmark")
    async with app.run_test(size=_SIZE) as pilot:
        await _settle(pilot)

        async def timed(name: str, press: Callable[[], Awaitable[None]]) -> None:
            _drop_cache(catalog)
            started = time.perf_counter()
            await press()
            await _settle(pilot)
            found.setdefault(name, []).append(time.perf_counter() - started)

        for _ in range(rounds):
            for key in ("down", "pagedown", "end", "home", "r", "enter", "c", "t", "n", "escape", "g", "escape"):
                await timed(key, lambda key=key: pilot.press(key))
            for column in ("reward_total", "id"):
                await timed(f"s, {column}", lambda column=column: _sort(pilot, column))
            await timed("f, reward>=0.5 step<=100", lambda: _enter(pilot, "f", "reward>=0.5 step<=100"))
            await timed("/, 12345", lambda: _enter(pilot, "slash", "12345"))
            await timed("x", lambda: pilot.press("x"))
    return found


async def _settle(pilot: Pilot[None]) -> None:
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def _sort(pilot: Pilot[None], column: str) -> None:
    await pilot.press("s")
    await _settle(pilot)
    assert isinstance(pilot.app.screen, SortScreen)
    choices = pilot.app.screen.query_one(OptionList)
    choices.highlighted = choices.get_option_index(column)
    await pilot.press("enter")


async def _enter(pilot: Pilot[None], key: str, line: str) -> None:
    await pilot.press(key)
    pilot.app.screen.query_one(Input).value = line
    await pilot.press("enter")


# --- the archive -----------------------------------------------------------------------------------------------------
def make_archive(folder: Path, *, num_rows: int) -> Path:
    """Create an archive of `num_rows` rows and a tokenizer in the folder, unless they exist."""
    archive = folder / f"archive-{num_rows}"
    vocabulary = {piece: number for number, piece in enumerate(_PIECES)}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    if (archive / MANIFEST).exists():
        return archive
    archive.mkdir()
    manifest = ManifestWriter(archive)
    # Building a million records would take minutes, so build a few thousand and renumber their columns.
    pattern = tabulate([_make_stored(number) for number in range(min(num_rows, _SHARD_ROWS))])
    for first in range(0, num_rows, _SHARD_ROWS):
        path = archive / next_shard(manifest.shards)
        rows = _renumbered(pattern.slice(0, min(_SHARD_ROWS, num_rows - first)), first)
        pq.write_table(rows, path, compression="zstd", row_group_size=1024)
        checksum = xxhash.xxh3_64_hexdigest(path.read_bytes())
        groups = -(-rows.num_rows // _GROUP_SIZE)
        entry = ShardEntry(path.name, rows.num_rows, groups, None, None, path.stat().st_size, checksum, 0.0)
        manifest.append(entry)
    return archive


def _make_stored(number: int) -> StoredTrajectory:
    random = np.random.default_rng(number)
    mask = np.arange(_TOKENS) >= _PROMPT
    group, index = divmod(number, _GROUP_SIZE)
    trajectory = Trajectory(
        id=f"{group}-0-{index}",
        group_id=str(group),
        index=index,
        prompt_uid=f"train/{group:05d}",
        attempt=0,
        token_ids=random.integers(0, 10, _TOKENS).astype(np.int32),
        model_mask=mask,
        generator_logprobs=np.where(mask, -random.random(_TOKENS), 0).astype(np.float32),
        version_spans=[VersionSpan(_PROMPT, group // 100)],
        reward=Reward(float(random.integers(0, 7)) / 6),
        stop_reason="stop",
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=_TOKENS, seed=number),
        generator_id=f"generator-{number % 4}",
        started_at=number / 1000,
        finished_at=number / 1000 + 0.5,
        data_source="digits",
    )
    return StoredTrajectory(trajectory, "retired", "", [1 + group // 32], 0.0)


def _renumbered(pattern: pa.Table, first: int) -> pa.Table:
    """Replace the ids and steps in the rows of a shard."""
    numbers = np.arange(first, first + pattern.num_rows)
    groups = numbers // _GROUP_SIZE
    offsets = pa.array(np.arange(len(groups) + 1), pa.int32())
    own = {
        "id": [f"{group}-0-{number % _GROUP_SIZE}" for group, number in zip(groups, numbers, strict=True)],
        "group_id": groups.astype(str).tolist(),
        "steps": pa.ListArray.from_arrays(offsets, pa.array(1 + groups // 32)),
    }
    for name, values in own.items():
        column = values if isinstance(values, pa.Array) else pa.array(values, SCHEMA.field(name).type)
        pattern = pattern.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), column)
    return pattern


if __name__ == "__main__":
    parser = make_parser("benchmarks.viewer", __doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="trajectories (1,000,000)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (3)")
    parser.add_argument("--folder", type=Path, help="keep the archive here, and reuse an existing one")
    main(parser.parse_args())
