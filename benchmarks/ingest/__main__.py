"""What the way from generator to learner carries: trajectories of 1k and 32k tokens, beside bare ways, in one run.

python -m benchmarks.ingest [--rounds N] [--mib N] [--tokens N ...] [--durability LEVEL ...] [--out FILE.json]
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.ingest.bare_paths import TransferQueuePath
from benchmarks.ingest.paths import IngestPath, Passage, make_payloads
from benchmarks.ingest.raw_redis import RawRedis
from benchmarks.ingest.ray_queue import RayQueue
from benchmarks.ingest.served_run import GROUP_SIZE, ServedRun
from benchmarks.ingest.slipstream_path import SlipstreamPath
from benchmarks.ingest.stages import check_us, script_us

_OURS, _RAW = "Slipstream", "raw Redis"
_LEVELS = ("fast", "standard", "strict")
_OTHERS_BESIDE = "standard"
"""Contestants that keep nothing are measured in the rounds of this level."""

console = Console(width=120) if not Console().is_terminal else Console()


def main(arguments: argparse.Namespace) -> None:
    """Measure, show, write."""
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
    result = {
        "machine": {
            "cores": os.cpu_count(),
            "at": datetime.now(UTC).isoformat("T", "seconds"),
            "load": psutil.getloadavg(),
        },
        "settings": {"rounds": arguments.rounds, "mib": arguments.mib, "group_size": GROUP_SIZE},
        "skipped": skipped,
        "rows": rows,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
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
        script_before = script_us(served)
        passages = _alternate(paths, count=count, rounds=arguments.rounds)
        ours = paths[_OURS]
        assert isinstance(ours, SlipstreamPath)
        stages = _stages(ours, num_tokens)
        stages["script"] = (script_us(served) - script_before) / (count * (arguments.rounds + 1))
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


def _builders(served: ServedRun, level: str, num_tokens: int) -> dict[str, Callable[[], IngestPath]]:
    builders: dict[str, Callable[[], IngestPath]] = {
        _OURS: lambda: SlipstreamPath(served, num_tokens=num_tokens),
        _RAW: lambda: RawRedis(served, num_tokens=num_tokens),
    }
    if level == _OTHERS_BESIDE:
        builders["Ray queue"] = lambda: RayQueue(num_tokens=num_tokens)
        builders["TransferQueue"] = lambda: TransferQueuePath(num_tokens=num_tokens)
    return builders


def _alternate(paths: dict[str, IngestPath], *, count: int, rounds: int) -> dict[str, list[Passage]]:
    """Each once a round after a warm-up; every round begins with the next one, so that none is always first."""
    names = list(paths)
    passages: dict[str, list[Passage]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            passage = paths[name].pass_through(count)
            if number > 0:
                passages[name].append(passage)
    return passages


def _stages(ours: SlipstreamPath, num_tokens: int) -> dict[str, float]:
    return {
        "encode": statistics.median(ours.encode_us),
        "check": check_us(num_tokens),
        "commit": statistics.median(ours.commit_us),
    }


def _skipped() -> dict[str, str]:
    """Contestants that cannot take part, and why."""
    needed = {"Ray queue": ["ray"], "TransferQueue": ["ray", "transfer_queue", "tensordict"]}
    missing = {name: [each for each in modules if not find_spec(each)] for name, modules in needed.items()}
    return {name: f"{' and '.join(modules)} not installed" for name, modules in missing.items() if modules}


@contextmanager
def _ray(skipped: dict[str, str]) -> Iterator[None]:
    if "Ray queue" in skipped:
        yield
        return
    import ray

    # More than there are cores, because TransferQueue asks for one for each of its parts, and else waits for ever.
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level="error", configure_logging=False)
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


# --- the tables ----------------------------------------------------------------------------------------------------
def _rates_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("tokens", "durability", "path", "put/s", "MB/s", "ratio to raw", "quartiles", "fetched/s", "MB/s")
    for row in rows:
        put, take = statistics.median(row["put_per_s"]), statistics.median(row["take_per_s"])
        megabytes = row["payload_bytes"] / 1e6
        low, high = _quartiles(row["to_raw"])
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


def _stages_table(rows: list[dict[str, Any]]) -> Table:
    """Processes add up; `check` is part of the broker's, `script` of the store's."""
    stages = ("encode", "check", "script", "commit")
    processes = ("generator", "broker", "store")
    table = Table("tokens", "durability", *processes, *stages, title="Processor time, microseconds per trajectory")
    for row in rows:
        times = [row["cpu_us"][name] for name in processes] + [row["stages_us"][name] for name in stages]
        table.add_row(f"{row['tokens']:,}", row["durability"], *(f"{each:,.1f}" for each in times))
    return table


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contestant (5)")
    parser.add_argument("--mib", type=int, default=40, help="trajectories of a round, MiB (40)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 32768], help="per trajectory (1024 32768)")
    parser.add_argument("--durability", nargs="+", choices=_LEVELS, default=list(_LEVELS), help="levels (all)")
    parser.add_argument("--out", type=Path, help="write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
