"""Growth of a run with its steps: sizes of store, archive, and metrics, and the time of what reads them.

The data is synthetic: the keys that a run leaves in the store for good, the archive's ledger, and rows of metrics.
"""

import argparse
import json
import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import structlog
from rich.console import Console

from benchmarks.harness import make_parser, make_table, peak_mib, write_result
from slipstream.broker.archiver import Archiver
from slipstream.buffer.archive.archive import Archive
from slipstream.buffer.archive.index import LEDGER, MANIFEST
from slipstream.buffer.codec import encode
from slipstream.buffer.records import METRICS_KEPT, CheckpointPointer, StepEntry, VersionEntry
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.observe.dashboard.viewed_run import ViewedRun
from slipstream.observe.reader import RunReader
from slipstream.runtime.run_folder import RunFolder

_GROUP_SIZE = 8
_TIMEOUT_S = 600.0
_MIB = 2**20
_ROW_KEYS = 120
"""Numbers of a metrics row, as in `experiment=smollm2_cpu`: 5 kB."""
_REPEATS = 5

console = Console()


def main(arguments: argparse.Namespace) -> None:
    """Build and measure a run of each length."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows = []
    for steps in arguments.steps:
        console.print(f"building a run of {steps:,} steps ...", highlight=False)
        with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
            overrides = [f"runs_dir={folder}", "name=long", f"learner.max_steps={steps + 2}", *arguments.overrides]
            rows.append({"steps": steps} | _measure(load(overrides), steps, arguments))
        write_result(arguments, {"rows": rows})
    for title, columns in _TABLES.items():
        console.print(make_table(rows, {"steps": "{steps:,}"} | columns, title=title))


_TABLES = {
    "Sizes, MiB": {
        "store, ledger not moved": "{store_unmoved_mib:,.1f}",
        "store": "{store_mib:,.1f}",
        "store's log": "{log_mib:,.1f}",
        "archive: ledger": "{ledger_mib:,.1f}",
        "archive: manifest": "{manifest_mib:,.2f}",
        "metrics": "{metrics_mib:,.1f}",
    },
    "Times, s": {
        "status": "{status_s:.4f}",
        "watch, first": "{watch_first_s:.2f}",
        "watch, update": "{watch_update_s:.4f}",
        "explain step 1": "{explain_first_s:.3f}",
        "explain newest step": "{explain_last_s:.4f}",
        "resume: store": "{resume_store_s:.2f}",
        "resume: archiver": "{resume_archiver_s:.2f}",
        "resume: learner": "{resume_learner_s:.2f}",
        "peak memory, MiB": "{peak_mib:,.0f}",
    },
}


def _measure(run: RunConfig, steps: int, arguments: argparse.Namespace) -> dict[str, float]:
    folder = RunFolder(run)
    folder.open()
    server = EmbeddedRedis(folder.store)
    server.start()
    try:
        with closing(open_run_store(server.url, run.name, timeout_s=_TIMEOUT_S)) as store:
            found = _fill(store, folder, run, steps, num_groups=arguments.trajectories // _GROUP_SIZE)
            found |= _sizes(folder) | _read(folder, store, steps)
    finally:
        server.stop()
    return found | _resume(server, folder, run, steps) | {"peak_mib": peak_mib()}


# --- the run ---------------------------------------------------------------------------------------------------------
def _fill(store: RedisStore, folder: RunFolder, run: RunConfig, steps: int, *, num_groups: int) -> dict[str, float]:
    """Write the steps, and let the archiver move their ledger."""
    config_json = msgspec.json.encode(run).decode()
    store.open_run(run.name, config_json=config_json, num_rows=1000, seed=0, keeps_finished=True)
    moved, every_steps = 0, run.learner.checkpoint.every_steps
    with closing(Archiver(store, folder.archive, run.buffer.archive)) as archiver:
        # The groups count as archived.
        archiver._steps._shards.groups_since = lambda _: _Everything()  # type: ignore[method-assign,assignment]
        for covered in range(0, steps, every_steps):
            if covered:
                store.checkpoint(CheckpointPointer(covered, covered, f"step-{covered:08}"), fence=0)
                moved += store._client.memory_usage(store._key("ledger"), samples=0)
                archiver.flush()
            _commit(store, range(covered + 1, min(covered + every_steps, steps) + 1), num_groups=num_groups)
    with folder.metrics.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in _metrics(range(1, steps + 1)))
    store_mib = store.memory().used_bytes / _MIB
    return {"store_unmoved_mib": store_mib + moved / _MIB, "store_mib": store_mib}


class _Everything(set[str]):
    """The set of all groups."""

    def __rsub__(self, _: object) -> set[str]:
        return set()


def _commit(store: RedisStore, steps: range, *, num_groups: int) -> None:
    """Write what a step leaves for good once a checkpoint covers it."""
    key, pipeline = store._key, store._client.pipeline(transaction=False)
    for step in steps:
        groups = [str(number) for number in range((step - 1) * num_groups, step * num_groups)]
        names = [[f"{group}-0-{index}" for index in range(_GROUP_SIZE)] for group in groups]
        entry = StepEntry(step, step - 1, 2 * step, 0, "0123456789abcdef", groups, names)
        pipeline.hset(key("ledger"), str(step), encode(entry))
        pipeline.hset(key("consumed_at"), str(step), step * num_groups)
        pipeline.rpush(key("versions"), encode(VersionEntry(step, step, "9f86d081884c7d65")))
        pipeline.hset(key("version_steps"), str(step), step)
        pipeline.hdel(key("version_steps"), str(step - 1))
    pipeline.rpush(key("metrics"), *map(encode, _metrics(steps[-1:])))
    pipeline.ltrim(key("metrics"), -METRICS_KEPT, -1)
    num_done = steps[-1] * num_groups
    pipeline.setbit(key("done"), num_done, 0)
    fields: dict[str, int | str] = {
        "step": steps[-1],
        "version": steps[-1],
        "announced_version": steps[-1],
        "consumed": num_done,
    }
    fields |= {"next_ordinal": num_done, "admitted": num_done, "consumed_by_version": num_done, "phase": "training"}
    pipeline.hset(key("run"), mapping=fields)
    pipeline.execute()


def _metrics(steps: range) -> Iterator[dict[str, Any]]:
    chance = np.random.default_rng(steps[0])
    for step in steps:
        values = chance.random(_ROW_KEYS).tolist()
        named = {f"learner/synthetic/{number:03}": value for number, value in enumerate(values)}
        yield {"step": step, "version": step, "time_s": 2.0 * step} | named


# --- its readers -----------------------------------------------------------------------------------------------------
def _sizes(folder: RunFolder) -> dict[str, float]:
    files = {
        "ledger_mib": folder.archive / LEDGER,
        "manifest_mib": folder.archive / MANIFEST,
        "metrics_mib": folder.metrics,
    }
    return {name: path.stat().st_size / _MIB for name, path in files.items()}


def _read(folder: RunFolder, store: RedisStore, steps: int) -> dict[str, float]:
    reader = RunReader(folder.path, store=store)
    status_s = _best(reader.status)
    viewed = ViewedRun(folder.path, run_id="long")
    viewed._store = store
    first_s = _timed(viewed.poll)

    def update() -> None:
        with folder.metrics.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in _metrics(range(steps + 1, steps + 2)))
        viewed.poll()
        viewed.view()

    return {
        "status_s": status_s,
        "watch_first_s": first_s,
        "watch_update_s": _best(update),
        "explain_first_s": _timed(lambda: RunReader(folder.path, store=store).find_step(1)),
        "explain_last_s": _best(lambda: reader.find_step(steps)),
    }


def _resume(server: EmbeddedRedis, folder: RunFolder, run: RunConfig, steps: int) -> dict[str, float]:
    """Time what a resume reads: the server its log, the archiver its ledger, the learner its metrics."""
    store_s = _timed(server.start)
    try:
        with closing(open_run_store(server.url, run.name, timeout_s=_TIMEOUT_S)) as store:
            log_mib = sum(path.stat().st_size for path in folder.store.rglob("*.aof*")) / _MIB
            archiver = list[Archiver]()
            archiver_s = _timed(lambda: archiver.append(Archiver(store, folder.archive, run.buffer.archive)))
            archiver[0].close()

            def learner() -> None:
                pointer = store.run_state().checkpoint
                assert pointer
                store.roll_back(to_step=pointer.step, to_version=pointer.version)
                deque(folder.keep_metrics(up_to_step=pointer.step), maxlen=0)

            learner_s = _timed(learner)
            assert len(Archive(folder.archive).steps(first_step=steps - run.learner.checkpoint.every_steps)) > 0
    finally:
        server.stop()
    times = {"resume_store_s": store_s, "resume_archiver_s": archiver_s, "resume_learner_s": learner_s}
    return times | {"log_mib": log_mib}


def _timed(call: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    call()
    return time.perf_counter() - began_at


def _best(call: Callable[[], object]) -> float:
    return min(_timed(call) for _ in range(_REPEATS))


if __name__ == "__main__":
    parser = make_parser("benchmarks.long_run", __doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 100_000], help="lengths (10000 100000)")
    parser.add_argument("--trajectories", type=int, default=64, help="trajectories per step (64)")
    parser.add_argument("overrides", nargs="*", help="settings of the run, after --")
    main(parser.parse_args())
