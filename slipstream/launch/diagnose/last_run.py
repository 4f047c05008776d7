"""Findings about the last run: its end, deaths of roles, and errors in logs."""

import re
from collections.abc import Sequence
from pathlib import Path

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import EVENTS_KEPT, Event
from slipstream.buffer.role_reports import LAUNCHER
from slipstream.cluster.role_process import find_error
from slipstream.configs.base import ConfigError
from slipstream.launch.diagnose.machine import Result, Verdict
from slipstream.observe.metrics_rows import read_tail
from slipstream.observe.reader import RunReader

_READ_BYTES = 2**18
_EVENTS_SHOWN = 3
_DEATH = re.compile(r" died \(| is abandoned|ends the run|was killed")
_REMEDIES = {
    r"out of memory|OutOfMemoryError|Cannot allocate memory|bad_alloc": "lower learner.tokens_per_microbatch, "
    "generators.engine.gpu_memory_utilization or kv_cache_gib: `slipstream plan` shows what each takes",
    r"No space left|Disk quota|disk_full": "make room on the disk, or set runs_dir to a folder on another",
    r"SIGKILL": "look for `oom_kill` in `dmesg` or in the container's events: most often memory ran out",
    r"SIGBUS|Bus error": "raise the shared memory of the container: docker run --shm-size=8g",
    r"SIGILL|Illegal instruction": "install the build for this processor: see the check `instructions`",
    r"no kernel image|CUDA driver version|libcuda|undefined symbol": "install the build for this GPU and driver: see "
    "the checks `wheels` and `GPUs`",
    r"NCCL|ncclSystemError|Gloo|connectFullMesh": "run `slipstream diagnose cluster` on each machine, and set "
    "NCCL_DEBUG=INFO",
    r"Too many open files": "ulimit -n 65536, or LimitNOFILE of its service",
    r"Address already in use": "end the other run, or choose another broker.address or cluster.ports",
    r"No module named|ModuleNotFoundError|ImportError": "install what is missing: see the check `packages`",
    r"\b(?:nan|NaN)\b|non-finite": "see `slipstream watch` for the metric that left its range first",
}
"""Pattern in an error -> remedy."""


def check_last_run(folder: Path, *, is_live: bool) -> list[Result]:
    """Check a run's state, events, and logs."""
    has_ended = (folder / "summary.json").is_file()
    events, problem = read_events(folder, is_live=is_live)
    deaths = [event for event in events if _DEATH.search(event.text)]
    whole = "is in progress" if is_live else "has finished" if has_ended else "ended without results"
    rows = read_tail(folder / "metrics.jsonl")
    reached = f" at step {rows[-1]['step']}" if rows else ", with no step in metrics.jsonl"
    first = Result("last run", "ok", f"{folder.name} {whole}{reached}")
    if not (is_live or has_ended):
        fatal = next((event.text for event in reversed(deaths) if event.role == LAUNCHER), "")
        fix = _remedy(fatal, f"look at {folder}/logs; continue it with `slipstream run name={folder.name} resume=true`")
        found = f"{first.found}: {fatal}" if fatal else first.found
        first = Result("last run", "fail" if fatal else "warn", found, fix=fix)
    return [first, _judge_events(deaths, problem), *_judge_logs(folder, is_over=not (is_live or has_ended))]


def read_events(folder: Path, *, is_live: bool) -> tuple[list[Event], str]:
    """(events, oldest first; why they cannot be read). Starts the store of a stopped run."""
    try:
        with RunReader(folder, starts_server=not is_live) as reader:
            return reader.store.events(limit=EVENTS_KEPT), ""
    except (ConfigError, ReplayBufferError) as error:
        return [], str(error)


def log_tail(path: Path, *, num_bytes: int = _READ_BYTES) -> list[str]:
    """The log's last complete lines."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - num_bytes)
        if start:
            # Skip a partial line, in which masking would miss a partial secret.
            file.seek(start - 1)
            file.readline()
        return file.read().decode(errors="replace").splitlines()


def _judge_events(deaths: Sequence[Event], problem: str) -> Result:
    if problem:
        return Result("events", "skipped", problem)
    if not deaths:
        return Result("events", "ok", "no role died")
    shown = "; ".join(f"{each.role}: {each.text.splitlines()[0]}" for each in deaths[-_EVENTS_SHOWN:])
    fix = _remedy(shown, "see the logs of these roles, and `slipstream status`")
    return Result("events", "warn", f"{len(deaths)} deaths, most recently {shown}", fix=fix)


def _judge_logs(folder: Path, *, is_over: bool) -> list[Result]:
    found = []
    for path in sorted((folder / "logs").glob("*.log")):
        if error := find_error(log_tail(path)):
            # Not fatal if the run continued or finished.
            verdict: Verdict = "fail" if is_over else "warn"
            found.append(Result(f"log of {path.stem}", verdict, error, fix=_remedy(error, f"see the end of {path}")))
    return found or [Result("logs", "ok", "no error and no traceback at their ends")]


def _remedy(error: str, otherwise: str) -> str:
    return next((fix for pattern, fix in _REMEDIES.items() if re.search(pattern, error)), otherwise)
