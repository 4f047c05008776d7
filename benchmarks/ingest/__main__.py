"""Throughput of trajectories from generator to learner, of 1k and 32k tokens, beside bare alternatives in one run.

With --transfer-queue: TransferQueue is among them, installed into .venv-transfer-queue beside this environment.
With --sockets: over unix sockets and ports, encrypted as in every run and plain, in turn.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness import make_parser, quartiles, rotate, write_result
from benchmarks.ingest.bare_paths import RawRedis, RayQueue, TransferQueuePath
from benchmarks.ingest.paths import ANY_LEASE, IngestPath, Passage, make_payloads, make_trajectory
from benchmarks.ingest.served_run import GROUP_SIZE, SOCKETS, ServedRun
from benchmarks.ingest.slipstream_path import SlipstreamPath
from slipstream.buffer.codec import check_header, pack
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import Durability

_OURS, _RAW = "Slipstream", "raw Redis"
_LEVELS = ("fast", "standard", "strict")
_VOLATILE_BESIDE: Durability = "standard"
"""Contestants without durability are measured in the rounds of this level."""
_TRANSFER_QUEUE = Path(__file__).parents[2] / ".venv-transfer-queue"
_TRANSFER_QUEUE_PACKAGES = ("TransferQueue==0.1.11", "tensordict==0.15.3", "pyvers", "orjson")
_INSTALL_S = 300.0
_STAGE_S = 0.3
"""Processor time over which a single stage is averaged."""

console = Console(width=120) if not Console().is_terminal else Console()


def main(arguments: argparse.Namespace) -> None:
    """Measure every contestant at every durability and length, or every socket at every length."""
    if arguments.sockets:
        _compare_sockets(arguments)
        return
    skipped = _skipped(_install_transfer_queue() if arguments.transfer_queue else "")
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
    console.print(_rates_table(rows))
    console.print(_stages_table([row for row in rows if row["path"] == _OURS]))


# --- measuring -----------------------------------------------------------------------------------------------------
def _measure(
    served: ServedRun, level: str, num_tokens: int, *, skipped: dict[str, str], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    payload_bytes = len(make_payloads(1, num_tokens=num_tokens)[0])
    count = max(1, arguments.mib * 2**20 // payload_bytes // GROUP_SIZE) * GROUP_SIZE
    with ExitStack() as stack:
        paths = {
            name: stack.enter_context(closing(build()))
            for name, build in _builders(served, level, num_tokens).items()
            if name not in skipped
        }
        scripts_before = _scripts_us(served)
        passages = _measure_in_turn(paths, count=count, rounds=arguments.rounds)
        ours = paths[_OURS]
        assert isinstance(ours, SlipstreamPath)
        stages = {
            "encode": statistics.median(ours.encode_us),
            "check": _check_us(num_tokens),
            "commit": statistics.median(ours.commit_us),
            "script": (_scripts_us(served) - scripts_before) / (count * (arguments.rounds + 1)),
        }
    for name, rounds in passages.items():
        yield {
            "tokens": num_tokens,
            "payload_bytes": payload_bytes,
            "durability": level if name in (_OURS, _RAW) else "none",
            "path": name,
            "put_per_s": [count / each.put_s for each in rounds],
            "take_per_s": [count / each.take_s for each in rounds],
            "to_raw": [raw.put_s / each.put_s for raw, each in zip(passages[_RAW], rounds, strict=True)],
            "cpu_us": {part: statistics.median(each.cpu_us[part] for each in rounds) for part in rounds[0].cpu_us},
            "stages_us": stages if name == _OURS else {},
        }


def _compare_sockets(arguments: argparse.Namespace) -> None:
    """Measure the way through brokers that differ in their sockets alone, each with a store of its own."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ingest-") as folder, ExitStack() as stack:
        runs = {
            name: ServedRun(Path(folder) / name.replace(" ", "-"), durability=_VOLATILE_BESIDE, sockets=name)
            for name in SOCKETS
        }
        for served in runs.values():
            stack.enter_context(_serving(served))
        for num_tokens in arguments.tokens:
            console.print(f"measuring {num_tokens} tokens over {', '.join(SOCKETS)} ...", highlight=False)
            rows += _measure_sockets(runs, num_tokens, arguments=arguments)
            write_result(arguments, {"group_size": GROUP_SIZE, "rows": rows})
    console.print(_sockets_table(rows))


def _measure_sockets(
    runs: dict[str, ServedRun], num_tokens: int, *, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    payload_bytes = len(make_payloads(1, num_tokens=num_tokens)[0])
    count = max(1, arguments.mib * 2**20 // payload_bytes // GROUP_SIZE) * GROUP_SIZE
    with ExitStack() as stack:
        paths: dict[str, IngestPath] = {
            name: stack.enter_context(closing(SlipstreamPath(served, num_tokens=num_tokens)))
            for name, served in runs.items()
        }
        passages = _measure_in_turn(paths, count=count, rounds=arguments.rounds)
    for name, rounds in passages.items():
        yield {
            "tokens": num_tokens,
            "payload_bytes": payload_bytes,
            "sockets": name,
            "put_per_s": [count / each.put_s for each in rounds],
            "to_default": [
                default.put_s / each.put_s for default, each in zip(passages[SOCKETS[0]], rounds, strict=True)
            ],
            "cpu_us": {part: statistics.median(each.cpu_us[part] for each in rounds) for part in rounds[0].cpu_us},
        }


def _builders(served: ServedRun, level: str, num_tokens: int) -> dict[str, Callable[[], IngestPath]]:
    builders: dict[str, Callable[[], IngestPath]] = {
        _OURS: lambda: SlipstreamPath(served, num_tokens=num_tokens),
        _RAW: lambda: RawRedis(served, num_tokens=num_tokens),
    }
    if level == _VOLATILE_BESIDE:
        builders["Ray queue"] = lambda: RayQueue(num_tokens=num_tokens)
        builders["TransferQueue"] = lambda: TransferQueuePath(num_tokens=num_tokens)
    return builders


def _measure_in_turn(paths: dict[str, IngestPath], *, count: int, rounds: int) -> dict[str, list[Passage]]:
    """Measure each path once a round, after one round of warm-up."""
    passages: dict[str, list[Passage]] = {name: [] for name in paths}
    for number, name in rotate(list(paths), rounds=rounds + 1):
        passage = paths[name].pass_through(count)
        if number > 0:
            passages[name].append(passage)
    return passages


def _check_us(num_tokens: int) -> float:
    """Time the broker's validation of one header and payload, microseconds of processor time."""
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


def _install_transfer_queue() -> str:
    """Make TransferQueue importable; returns why that failed, or nothing."""
    if not (_TRANSFER_QUEUE / "transfer_queue").is_dir():
        # Without dependencies, and behind all else on the path: no version of this environment changes.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(_TRANSFER_QUEUE)]
        try:
            subprocess.run([*command, *_TRANSFER_QUEUE_PACKAGES], check=True, timeout=_INSTALL_S, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"cannot be installed into {_TRANSFER_QUEUE}: {error}"
    sys.path.append(str(_TRANSFER_QUEUE))
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    # For Ray's workers.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_TRANSFER_QUEUE))))
    return ""


def _skipped(failure: str) -> dict[str, str]:
    """Return the contestants that are not installed, with the reason."""
    needed = {"Ray queue": ["ray"], "TransferQueue": ["ray", "transfer_queue", "tensordict"]}
    missing = {name: [each for each in modules if not find_spec(each)] for name, modules in needed.items()}
    return {name: failure or f"{' and '.join(modules)} not installed" for name, modules in missing.items() if modules}


@contextmanager
def _ray(skipped: dict[str, str]) -> Iterator[None]:
    if "Ray queue" in skipped:
        yield
        return
    import ray

    # TransferQueue reserves a core for each of its parts: with the true number it would wait forever.
    ray.init(
        "local",  # whatever other cluster there is on this machine
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


# --- tables --------------------------------------------------------------------------------------------------------
def _rates_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("tokens", "durability", "path", "put/s", "MB/s", "ratio to raw", "quartiles", "fetched/s", "MB/s")
    for row in rows:
        put, take = statistics.median(row["put_per_s"]), statistics.median(row["take_per_s"])
        megabytes = row["payload_bytes"] / 1e6
        low, high = quartiles(row["to_raw"])
        table.add_row(
            f"{row['tokens']:,}",
            row["durability"],
            row["path"],
            f"{put:,.0f}",
            f"{put * megabytes:,.0f}",
            f"{statistics.median(row['to_raw']):.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{take:,.0f}",
            f"{take * megabytes:,.0f}",
        )
    return table


def _sockets_table(rows: list[dict[str, Any]]) -> Table:
    processes = ("generator", "broker", "store")
    table = Table("tokens", "sockets", "put/s", "MB/s", "ratio to ipc", "quartiles", *processes)
    table.title = "Processor time of each process in microseconds per trajectory"
    for row in rows:
        put = statistics.median(row["put_per_s"])
        low, high = quartiles(row["to_default"])
        table.add_row(
            f"{row['tokens']:,}",
            row["sockets"],
            f"{put:,.0f}",
            f"{put * row['payload_bytes'] / 1e6:,.0f}",
            f"{statistics.median(row['to_default']):.2f}",
            f"{low:.2f} to {high:.2f}",
            *(f"{row['cpu_us'][name]:,.1f}" for name in processes),
        )
    return table


def _stages_table(rows: list[dict[str, Any]]) -> Table:
    # The processes add up; `check` is part of the broker's time, `script` of the store's.
    stages = ("encode", "check", "script", "commit")
    processes = ("generator", "broker", "store")
    table = Table("tokens", "durability", *processes, *stages, title="Processor time, microseconds per trajectory")
    for row in rows:
        times = [row["cpu_us"][name] for name in processes] + [row["stages_us"][name] for name in stages]
        table.add_row(f"{row['tokens']:,}", row["durability"], *(f"{each:,.1f}" for each in times))
    return table


if __name__ == "__main__":
    parser = make_parser("benchmarks.ingest", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contestant (5)")
    parser.add_argument("--mib", type=int, default=40, help="size of a round's trajectories, MiB (40)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 32768], help="per trajectory (1024 32768)")
    parser.add_argument("--durability", nargs="+", choices=_LEVELS, default=list(_LEVELS), help="levels (all)")
    parser.add_argument("--sockets", action="store_true", help="compare unix sockets and ports, encrypted and plain")
    parser.add_argument("--transfer-queue", action="store_true", help="install and measure TransferQueue, too")
    main(parser.parse_args())
