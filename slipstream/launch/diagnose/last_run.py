"""The last run: its end, deaths of roles, errors in logs, and a bug report bundle without secrets."""

import io
import os
import re
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from slipstream.buffer.errors import ReplayBufferError
from slipstream.buffer.records import EVENTS_KEPT, Event
from slipstream.buffer.role_reports import LAUNCHER
from slipstream.cluster.role_process import find_error
from slipstream.configs.base import ConfigError
from slipstream.configs.load import to_plain
from slipstream.configs.run import RunConfig
from slipstream.launch.diagnose.machine import Result, Verdict, installed_packages
from slipstream.observe.metrics_rows import read_tail
from slipstream.observe.reader import RunReader
from slipstream.runtime.credentials import find_token, known_secrets, mask, without_secrets
from slipstream.runtime.process import read_text, versions

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
_ENDING = ".tar.gz"
_LINES, _LOG_BYTES = 300, 2**22
"""Lines kept per file, and bytes read for them."""


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
    logs = []
    for path in sorted((folder / "logs").glob("*.log")):
        if error := find_error(log_tail(path)):
            # Not fatal if the run continued or finished.
            verdict: Verdict = "warn" if is_live or has_ended else "fail"
            logs.append(Result(f"log of {path.stem}", verdict, error, fix=_remedy(error, f"see the end of {path}")))
    logs = logs or [Result("logs", "ok", "no error and no traceback at their ends")]
    return [first, _judge_events(deaths, problem), *logs]


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


def _remedy(error: str, otherwise: str) -> str:
    return next((fix for pattern, fix in _REMEDIES.items() if re.search(pattern, error)), otherwise)


class Subject(NamedTuple):
    """Settings to check, and the run to diagnose, if any."""

    run: RunConfig
    folder: Path | None
    is_live: bool
    origin: str
    is_over: bool = False
    """Whether the run is finished and needs no disk space."""


def check_bundle(path: Path) -> None:
    """Raise ConfigError if `path` cannot become a bundle."""
    if not path.name.endswith(_ENDING) or path.exists() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--bundle must name a new file that ends in {_ENDING}, in a folder that exists, got {path}.")


def secrets_of(run: RunConfig, folder: Path | None) -> set[str]:
    """Known secrets, with tokens of run and guests."""
    # Unreadable tokens cannot reach the bundle.
    files = [folder / "token", *(folder / "guests").glob("*")] if folder else []
    tokens = [read_text(file).strip() for file in files]
    with suppress(ConfigError, OSError):
        tokens.append(find_token(run))
    return known_secrets(os.environ, *tokens)


def write_bundle(path: Path, subject: Subject, findings: Sequence[Result], *, known: Iterable[str]) -> None:
    """Write the bundle, readable only by its owner. Raises ConfigError."""
    draft = path.with_name(f"{path.name}.new")
    try:
        with draft.open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            draft.chmod(0o600)
            for name, text in _contents(subject, findings, known=known):
                # Mask again: the writers of these files may not have known all secrets.
                data = mask(text, known=known).encode()
                entry = tarfile.TarInfo(f"{path.name.removesuffix(_ENDING)}/{name}")
                entry.size, entry.mtime = len(data), int(time.time())
                archive.addfile(entry, io.BytesIO(data))
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"--bundle must name a file that can be written, got {path}: {error}.") from None


def _contents(subject: Subject, findings: Sequence[Result], *, known: Iterable[str]) -> Iterator[tuple[str, str]]:
    yield "diagnosis.json", _json(findings)
    yield "config.json", _json(without_secrets(to_plain(subject.run), known=known))
    yield "versions.json", _json({"of the run": versions(), "installed": installed_packages()})
    # Names only: values may be secret.
    yield "environment.txt", "".join(f"{name}\n" for name in sorted(os.environ))
    if not (folder := subject.folder):
        return
    events, problem = read_events(folder, is_live=subject.is_live)
    yield "events.json", _json(events or problem)
    for file in [*sorted((folder / "logs").glob("*.log")), folder / "store/redis.log", folder / "metrics.jsonl"]:
        if file.is_file():
            yield f"run/{file.name}", "\n".join([*log_tail(file, num_bytes=_LOG_BYTES)[-_LINES:], ""])
    for name in ("summary.json", "versions.json", "origins.json"):
        if text := read_text(folder / name):
            yield f"run/{name}", text


def _json(data: object) -> str:
    return msgspec.json.format(msgspec.json.encode(data)).decode() + "\n"
