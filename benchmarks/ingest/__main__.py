"""Throughput of trajectories (1k and 32k tokens) from generator to learner, compared with bare alternatives.

With --sockets: Unix sockets and ports, encrypted (as in every run) and plain, in turn.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.harness import make_parser, make_table, quartiles, rotate, write_result
from benchmarks.ingest.bare_paths import RawRedis, RayQueue, TransferQueuePath
from benchmarks.ingest.paths import ANY_LEASE, IngestPath, Passage, make_payloads, make_trajectory
from benchmarks.ingest.served_run import GROUP_SIZE, SOCKETS, ServedRun
from benchmarks.ingest.slipstream_path import SlipstreamPath
from slipstream.buffer.codec import check_header, pack
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import Durability

_OURS, _RAW = "Slipstream", "raw Redis"
_LEVELS = ("fast", "standard", "strict")
_VOLATILE_LEVEL: Durability = "standard"
"""Contestants without durability are measured in the rounds of this level."""
_KIND = {"tokens": "{tokens:,}", "durability": "{durability}"}
_RATES = {
    "put/s": "{put:,.0f}",
    "MB/s": "{put_mb:,.0f}",
    "ratio": "{ratio:.2f}",
    "quartiles": "{low:.2f} to {high:.2f}",
}
_FETCHED = {"fetched/s": "{take:,.0f}", "fetched MB/s": "{take_mb:,.0f}"}
_PROCESSES = {name: f"{{cpu_us[{name}]:,.1f}}" for name in ("generator", "broker", "store")}
_TIMES = "Processor time, microseconds per trajectory"
_STAGE_S = 0.3
"""CPU time over which a single stage is averaged."""

console = Console(width=120) if not Console().is_terminal else Console()


def main(arguments: argparse.Namespace) -> None:
    """Measure every contestant at every durability and length, or every socket at every length."""
    if arguments.sockets:
        _compare_sockets(arguments)
        return
    skipped = _skipped()
    for name, reason in skipped.items():
        console.print(f"skipping {name}: {reason}", highlight=False)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ingest-") as folder, _ray(skipped):
        for level in arguments.durability:
            with _serving(ServedRun(Path(folder) / level, durability=level)) as served:
                for num_tokens in arguments.tokens:
                    console.print(f"measuring {num_tokens} tokens, {level} ...", highlight=False)
                    rows += _measure(served, level, num_tokens, skipped=skipped, arguments=arguments)
                    write_result(arguments, {"group_size": GROUP_SIZE, "skipped": skipped, "rows": rows})
    console.print(make_table(rows, _KIND | {"path": "{path}"} | _RATES | _FETCHED, title="ratio: of puts to raw Redis"))
    # The processes add up. `check` is part of the broker's time, `script` of the store's.
    stages = {name: f"{{stages_us[{name}]:,.1f}}" for name in ("encode", "check", "script", "commit")}
    ours = [row for row in rows if row["path"] == _OURS]
    console.print(make_table(ours, _KIND | _PROCESSES | stages, title=_TIMES))


# --- measuring -----------------------------------------------------------------------------------------------------
def _measure(
    served: ServedRun, level: str, num_tokens: int, *, skipped: dict[str, str], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        paths = {
            name: stack.enter_context(closing(build()))
            for name, build in _builders(served, level, num_tokens).items()
            if name not in skipped
        }
        scripts_before = _scripts_us(served)
        rows = _measure_paths(paths, num_tokens, base=_RAW, arguments=arguments)
        ours = paths[_OURS]
        assert isinstance(ours, SlipstreamPath)
        num_passed = rows[0]["count"] * (arguments.rounds + 1)
        stages = {
            "encode": statistics.median(ours.encode_us),
            "check": _check_us(num_tokens),
            "commit": statistics.median(ours.commit_us),
            "script": (_scripts_us(served) - scripts_before) / num_passed,
        }
    for row in rows:
        durability = level if row["path"] in (_OURS, _RAW) else "none"
        yield row | {"durability": durability, "stages_us": stages if row["path"] == _OURS else {}}


def _compare_sockets(arguments: argparse.Namespace) -> None:
    """Measure Slipstream through brokers that differ only in their sockets, each with its own store."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ingest-") as folder, ExitStack() as stack:
        runs = {
            name: ServedRun(Path(folder) / name.replace(" ", "-"), durability=_VOLATILE_LEVEL, sockets=name)
            for name in SOCKETS
        }
        for served in runs.values():
            stack.enter_context(_serving(served))
        for num_tokens in arguments.tokens:
            console.print(f"measuring {num_tokens} tokens over {', '.join(SOCKETS)} ...", highlight=False)
            with ExitStack() as paths:
                open_paths = {
                    name: paths.enter_context(closing(SlipstreamPath(served, num_tokens=num_tokens)))
                    for name, served in runs.items()
                }
                rows += _measure_paths(open_paths, num_tokens, base=SOCKETS[0], arguments=arguments)
            write_result(arguments, {"group_size": GROUP_SIZE, "rows": rows})
    title = f"{_TIMES}; ratio: of puts to {SOCKETS[0]}"
    console.print(make_table(rows, {"tokens": "{tokens:,}", "sockets": "{path}"} | _RATES | _PROCESSES, title=title))


def _measure_paths(
    paths: Mapping[str, IngestPath], num_tokens: int, *, base: str, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure each path once per round after a warm-up round, and compare it with the path `base`."""
    payload_bytes = len(make_payloads(1, num_tokens=num_tokens)[0])
    count = max(1, arguments.mib * 2**20 // payload_bytes // GROUP_SIZE) * GROUP_SIZE
    passages: dict[str, list[Passage]] = {name: [] for name in paths}
    for number, name in rotate(list(paths), rounds=arguments.rounds + 1):
        passage = paths[name].pass_through(count)
        if number > 0:
            passages[name].append(passage)
    rows = []
    for name, rounds in passages.items():
        put = count / statistics.median(each.put_s for each in rounds)
        take = count / statistics.median(each.take_s for each in rounds)
        ratios = [other.put_s / each.put_s for other, each in zip(passages[base], rounds, strict=True)]
        low, high = quartiles(ratios)
        rows.append(
            {
                "path": name,
                "tokens": num_tokens,
                "payload_bytes": payload_bytes,
                "count": count,
                "put": put,
                "put_mb": put * payload_bytes / 1e6,
                "take": take,
                "take_mb": take * payload_bytes / 1e6,
                "ratios": ratios,
                "ratio": statistics.median(ratios),
                "low": low,
                "high": high,
                "cpu_us": {part: statistics.median(each.cpu_us[part] for each in rounds) for part in rounds[0].cpu_us},
            }
        )
    return rows


def _builders(served: ServedRun, level: str, num_tokens: int) -> dict[str, Callable[[], IngestPath]]:
    builders: dict[str, Callable[[], IngestPath]] = {
        _OURS: lambda: SlipstreamPath(served, num_tokens=num_tokens),
        _RAW: lambda: RawRedis(served, num_tokens=num_tokens),
    }
    if level == _VOLATILE_LEVEL:
        builders["Ray queue"] = lambda: RayQueue(num_tokens=num_tokens)
        builders["TransferQueue"] = lambda: TransferQueuePath(num_tokens=num_tokens)
    return builders


def _check_us(num_tokens: int) -> float:
    """Return the CPU microseconds of the broker's validation of one header and payload."""
    trajectory = make_trajectory(ANY_LEASE, 0, num_tokens=num_tokens, rng=np.random.default_rng(0))
    header, payload = pack(trajectory, lease_id=ANY_LEASE.id, purpose="train", group_size=GROUP_SIZE)
    count, started_at = 0, time.process_time()
    while time.process_time() - started_at < _STAGE_S:
        check_header(header, payload)
        count += 1
    return 1e6 * (time.process_time() - started_at) / count


def _scripts_us(served: ServedRun) -> float:
    """Return the server's time in scripts so far, microseconds; nearly all of it is inserts."""
    with closing(connect(served.store_url)) as client:
        return float(client.info("commandstats").get("cmdstat_evalsha", {"usec": 0})["usec"])


def _skipped() -> dict[str, str]:
    """Return contestants that are not installed -> reason."""
    needed = {"Ray queue": ["ray"], "TransferQueue": ["ray", "transfer_queue", "tensordict"]}
    missing = {name: [each for each in modules if not find_spec(each)] for name, modules in needed.items()}
    return {name: f"{' and '.join(modules)} not installed" for name, modules in missing.items() if modules}


@contextmanager
def _ray(skipped: dict[str, str]) -> Iterator[None]:
    if "Ray queue" in skipped:
        yield
        return
    import ray

    # TransferQueue reserves a core for each part, and would wait forever with the true number.
    ray.init(
        "local",  # ignore any other cluster on this machine
        num_cpus=6,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _serving(served: ServedRun) -> Iterator[ServedRun]:
    try:
        served.start()
        yield served
    finally:
        served.stop()


if __name__ == "__main__":
    parser = make_parser("benchmarks.ingest", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements per contestant (5)")
    parser.add_argument("--mib", type=int, default=40, help="size of the trajectories per round, MiB (40)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 32768], help="per trajectory (1024 32768)")
    parser.add_argument("--durability", nargs="+", choices=_LEVELS, default=list(_LEVELS), help="levels (all)")
    parser.add_argument("--sockets", action="store_true", help="compare Unix sockets and ports, encrypted and plain")
    main(parser.parse_args())
