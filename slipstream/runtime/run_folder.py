"""RunFolder: the files of a run.

runs/<name>/            accessible only to its owner
    run.lock            held by the launcher or a broker started by hand
    token               secret of the sockets, unless the user provides one
    guests/<name>       token of a guest, see docs/cluster.md
    address             broker address for other machines; further brokers: address-broker-1, ...
    doors/<generator>   address of a generator for user agents
    sockets/            unix sockets of broker and learner
    config.yaml         the resolved configuration
    origins.json        origin of each value
    overrides.json      overrides of the command that started or last resumed the run
    versions.json       versions of Python and libraries
    untrained           exists until weights are published: the name may be reused
    logs/<role>.log     one per role
    stages.jsonl        for `slipstream explain start`
    store/              data of the embedded Redis
    metrics.jsonl       one row per step
    summary.json        results
    curve.png           plot of the metrics
    loggers/            positions of loggers in the metrics
    profile/            recorded steps, see docs/profiling.md
    checkpoints/        for resuming
    weights/            versions that generators fetch; deleted at the end
    archive/            finished groups, in Parquet
    token_stats/        per-token values of each step, in Parquet
    final_model/        transformers format
    best_model/         same, of the best checkpoint, named in best.json
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
import structlog

from slipstream.configs.base import ConfigError, require
from slipstream.configs.broker import FIRST_BROKER
from slipstream.configs.run import NAME_PATTERN, RunConfig
from slipstream.runtime.disk import is_disk_full
from slipstream.runtime.process import versions

_CONFIG = "config.yaml"
_LOCK = "run.lock"
_UNTRAINED = "untrained"
ORIGINS = "origins.json"
OVERRIDES = "overrides.json"
STAGES = "stages.jsonl"
_OWNER_ONLY = 0o700
_NAMES_SHOWN = 5
_MAX_SOCKETS_BYTES = 85
"""The kernel allows 107 bytes with the socket's name."""
_SHORT_FOLDERS = Path("/tmp")
"""Not TMPDIR, which may differ between roles."""
log = structlog.get_logger(__name__)


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self.path = Path(run.runs_dir) / run.name
        self.logs = self.path / "logs"
        self.store = self.path / "store"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights"
        self.final_model = self.path / "final_model"
        self.best_model = self.path / "best_model"
        self.archive = self.path / "archive"
        self.token_stats = self.path / "token_stats"
        self.profile = self.path / "profile"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.token = self.path / "token"
        self.guests = self.path / "guests"
        self.doors = self.path / "doors"
        self._lock: IO[str] | None = None
        self._is_new = False

    @property
    def sockets(self) -> Path:
        """Folder of unix sockets; `short_folder` if its path is too long."""
        path = self.path.resolve() / "sockets"
        return path if len(bytes(path)) <= _MAX_SOCKETS_BYTES else short_folder(path)

    @property
    def has_run(self) -> bool:
        """Whether a run was started here."""
        return (self.path / _CONFIG).is_file()

    @property
    def is_untrained(self) -> bool:
        """Whether the run has not published weights yet."""
        made = (self.metrics, self.summary, *self.checkpoints.glob("*"), *self.archive.glob("shard-*"))
        return (self.path / _UNTRAINED).is_file() and not any(path.exists() for path in made)

    @property
    def broker_address(self) -> str:
        return self.broker_addresses[FIRST_BROKER]

    @property
    def broker_addresses(self) -> dict[str, str]:
        """Broker name -> endpoint; further ones after `broker.address`."""
        config, first = self._run.broker, self._run.broker.address
        if first is None:
            return {name: f"ipc://{self.sockets}/{name}.sock" for name in config.names}
        host, _, port = first.rpartition(":")
        further = [f"{host}:{int(port) + n}" if port.isdecimal() else f"{first}-{n}" for n in range(1, config.shards)]
        return dict(zip(config.names, [first, *further], strict=True))

    def claim(self) -> None:
        """Create or reopen the folder and lock it. Raises as `check_name`."""
        self._is_new = not self.path.exists()
        self.check_name()
        self.lock()
        self.begin()

    def begin(self) -> None:
        """Open the folder; an untrained run starts over."""
        if self.is_untrained:
            # The store may hold rejected settings. All else is rewritten or empty.
            shutil.rmtree(self.store, ignore_errors=True)
            print(f"{self.path} is reused: its run ended before it published weights", flush=True)
        elif not self.has_run:
            self.make()
            (self.path / _UNTRAINED).touch()
        self.open()

    def record_training(self) -> None:
        """Prevent reuse of the name. Raises OSError."""
        (self.path / _UNTRAINED).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the folder if `claim` created it."""
        if self._is_new:
            for folder in (self.path, self.sockets):
                shutil.rmtree(folder, ignore_errors=True)
            self.unlock()

    def check_name(self) -> None:
        """Raise ConfigError if a new run exists, a resumed one does not (without `storage.uri`), or it is live."""
        if self.path.is_dir() and not self._lock:
            self.lock()
            self.unlock()
        run, is_used = self._run, self.has_run and not self.is_untrained
        must, got = f"be false with mode={run.mode}, which keeps its state in memory", f"{run.resume} for {run.name!r}"
        why = f"delete the folder, or start another run, also with model.path of a model below {self.checkpoints}"
        require(not (is_used and run.resume and run.is_one_process), "resume", must, got=got, why=why)
        must, got = f"be unused in {run.runs_dir}/", f"{run.name!r}, which exists"
        again = "" if run.is_one_process else "continue it with resume=true, "
        why = f"choose another with name=..., {again}or delete the folder"
        require(bool(run.resume) or not is_used, "name", must, got=got, why=why)
        if run.resume is True and not self.has_run and not run.storage.uri:
            others = describe_others(Path(run.runs_dir), run.name)
            must = (
                f"name must be that of a run with resume=true, got {run.name!r}, but there is no {self.path}: {others}"
            )
            raise ConfigError(f"{must}; correct name=..., or use resume=auto, which starts a run that does not exist.")

    def lock(self) -> None:
        """Lock the run until this process ends; idempotent. Raises ConfigError if another has."""
        if self._lock:
            return
        self.make()
        # Append mode: a rejected process must not erase the holder's pid.
        lock = (self.path / _LOCK).open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read(32).strip()
            lock.close()
            must = f"run {self._run.name!r} must have one launcher, or one broker started by hand"
            why = "choose another name with name=..., or stop that process"
            raise ConfigError(f"{must}, but process {holder} runs it: {why}.") from None
        self._lock = lock
        # On a full disk, the pid is missing but the lock holds.
        with suppress(OSError):
            lock.truncate(0)
            os.write(lock.fileno(), f"{os.getpid()}\n".encode())

    def unlock(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock:
            if self.sockets.parent == _SHORT_FOLDERS:
                with suppress(OSError):  # sockets in use are in it
                    self.sockets.rmdir()
            self._lock.close()
            self._lock = None

    def make(self) -> None:
        """Create the run and socket folders. Raises as `make_private`."""
        for folder in (self.path, self.sockets):
            make_private(folder)

    def open(self) -> None:
        """Create missing folders; write configuration and versions. Raises ConfigError, OSError."""
        try:
            self.make()
            for folder in (self.logs, self.store, self.checkpoints):
                folder.mkdir(exist_ok=True)
            _replace(self.path / _CONFIG, msgspec.yaml.encode(self._run))
            _replace(self.path / "versions.json", json.dumps(versions(), indent=2).encode() + b"\n")
        except OSError as error:
            if not (self.has_run and is_disk_full(error)):
                raise
            # A role restarted on a full disk; the files exist since the start.
            log.warning("run_folder_not_updated", folder=str(self.path), reason=str(error))

    def read_address(self, broker: str = FIRST_BROKER) -> str:
        """Newest address for other machines, or empty."""
        file = self._address_file(broker)
        return file.read_text().strip() if file.is_file() else ""

    def write_address(self, address: str, *, broker: str = FIRST_BROKER) -> None:
        """Record a broker's TCP address; for any other, remove the file."""
        file = self._address_file(broker)
        if address.startswith("tcp://"):
            _replace(file, f"{address}\n".encode())
        else:
            file.unlink(missing_ok=True)

    def _address_file(self, broker: str) -> Path:
        return self.path / ("address" if broker == FIRST_BROKER else f"address-{broker}")

    def write_origins(self, origins: dict[str, str], *, overrides: list[str]) -> None:
        for name, content in ((ORIGINS, origins), (OVERRIDES, overrides)):
            _replace(self.path / name, json.dumps(content, indent=2).encode() + b"\n")

    def record_stage(self, role: str, stage: str, *, at: float | None = None) -> None:
        """Append a moment of a role's start or end, if the folder is here. `at`: seconds since 1970, default now."""
        line = json.dumps({"at": round(at or time.time(), 3), "role": role, "pid": os.getpid(), "stage": stage})
        # A full disk must not end the role.
        with suppress(OSError), (self.path / STAGES).open("a") as file:
            file.write(f"{line}\n")

    def record_process(self, role: str) -> None:
        """Record when this process started."""
        # psutil's times since 1970 are off by up to a second.
        since_boot_s = psutil.Process().create_time() - psutil.boot_time()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s
        self.record_stage(role, "process started", at=time.time() - age_s)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append a row atomically. Raises OSError; safe to retry."""
        line = memoryview(json.dumps(row).encode() + b"\n")
        with self.metrics.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                # A disk that fills up may accept part of the line.
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(size)
                raise

    def keep_metrics(self, *, up_to_step: int) -> Iterator[dict[str, Any]]:
        """Drop damaged rows and rows after `up_to_step`; return the rest. Raises OSError; safe to retry.

        Holds one row at a time, because the rows of a long run take gigabytes.
        """
        damaged, num_kept, num_rows = list[int](), 0, 0
        for num_rows, (row, _) in enumerate(self._rows(), start=1):
            damaged += [num_rows] if row is None else []
            num_kept += row is not None and row["step"] <= up_to_step
        if damaged:
            log.warning("damaged_metrics_dropped", file=str(self.metrics), lines=damaged, whole=num_rows - len(damaged))
        if num_kept < num_rows:
            rows = self._rows()
            _rewrite(self.metrics, (line for row, line in rows if row is not None and row["step"] <= up_to_step))
        return (row for row, _ in self._rows() if row is not None)

    def _rows(self) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
        """Yield the rows of the metrics, None if damaged, with their lines."""
        if self.metrics.exists():
            with self.metrics.open("rb") as file:
                for line in file:
                    yield parse_row(line), line

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the results atomically. Raises OSError; safe to retry."""
        _replace(self.summary, json.dumps(summary, indent=2).encode() + b"\n")


def _replace(path: Path, content: bytes) -> None:
    """Write a file unless it has this content. On OSError the old file remains."""
    if not path.is_file() or path.read_bytes() != content:
        _rewrite(path, [content])


def _rewrite(path: Path, parts: Iterable[bytes]) -> None:
    # Rename into place, so that no partial file remains.
    draft = path.with_name(f"{path.name}.new")
    try:
        with draft.open("wb") as file:
            file.writelines(parts)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Decode a metrics row; None if a crash damaged it."""
    try:
        # Only the slower decoder accepts NaN and Infinity.
        decode = json.loads if b"NaN" in line or b"Infinity" in line else msgspec.json.decode
        row = decode(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def short_folder(path: Path) -> Path:
    """Replacement for a long path, the same in every process."""
    digest = hashlib.sha256(bytes(path)).hexdigest()[:16]
    return _SHORT_FOLDERS / f"slipstream-{os.getuid()}-{digest}"


def make_private(folder: Path) -> None:
    """Create a folder for its owner only, or restrict one. Raises ConfigError if it is not ours."""
    if folder.parent == _SHORT_FOLDERS and folder.is_symlink():
        # Any user can write there.
        raise ConfigError(f"{folder} must be a folder, got a symbolic link: delete it.")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=_OWNER_ONLY)
    except FileNotFoundError:
        # As below /proc, where no folder can be made.
        raise ConfigError(f"{folder} must be a path where a folder can be made: choose another runs_dir.") from None
    found = folder.stat()
    if os.getuid() not in (found.st_uid, 0):
        raise ConfigError(f"{folder} must belong to this user, got one of user {found.st_uid}: choose another folder.")
    if stat.S_IMODE(found.st_mode) != _OWNER_ONLY:
        folder.chmod(_OWNER_ONLY)


def is_held(folder: Path, name: str = _LOCK) -> bool:
    """Whether a process on this machine holds a folder's lock file."""
    try:
        with (folder / name).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def find_run(words: Sequence[str], *, command: str) -> Path:
    """The run's folder, by default the newest.

    `words`: the run's name, its folder, or name=RUN; and runs_dir=FOLDER. Raises ConfigError.
    """
    chosen = {"runs_dir": "runs", "name": ""}
    for word in words:
        key, value = word.split("=", 1) if "=" in word else ("name", word)
        if key not in chosen:
            raise ConfigError(f"{command} takes the name or the folder of a run and runs_dir=FOLDER, got {word!r}.")
        if key == "name" and chosen[key] not in ("", value):
            raise ConfigError(f"{command} takes one run, got {chosen[key]!r} and {value!r}.")
        chosen[key] = value
    runs_dir, name = Path(chosen["runs_dir"]), chosen["name"]
    if not name:
        runs = list_runs(runs_dir)
        require(bool(runs), "there", f"be a run in {runs_dir}/", got="none", why="start one with `slipstream run`")
        return runs[0]
    if (Path(name) / _CONFIG).is_file():
        return Path(name)
    if not re.match(NAME_PATTERN, name):
        raise ConfigError(f"{command} takes the name or the folder of a run, got {name!r}, which is neither.")
    if not ((folder := runs_dir / name) / _CONFIG).is_file():
        raise ConfigError(f"{folder} must be a run folder, but has no {_CONFIG}: {describe_others(runs_dir, name)}.")
    return folder


def list_runs(runs_dir: Path) -> list[Path]:
    """Run folders in `runs_dir`, newest first."""
    configs = sorted(runs_dir.glob(f"*/{_CONFIG}"), key=lambda config: config.stat().st_mtime, reverse=True)
    return [config.parent for config in configs]


def describe_others(runs_dir: Path, name: str) -> str:
    """Describe the runs in `runs_dir`, for an error about `name`."""
    names = [folder.name for folder in list_runs(runs_dir)]
    if close := get_close_matches(name, names, n=1):
        return f"did you mean {close[0]!r}?"
    if not names:
        return f"there is no run in {runs_dir}/"
    return f"there are {', '.join(map(repr, names[:_NAMES_SHOWN]))}{', ...' if len(names) > _NAMES_SHOWN else ''}"
