"""RedisSupervisor: restarts the embedded server if it dies. Fsyncer: makes its log durable.

The server does not fsync: with `appendfsync everysec`, it would answer before it writes while an fsync runs,
docs/decisions/0008-what-survives-a-killed-store.md.
"""

import os
import threading
import time
from collections import deque
from pathlib import Path

from slipstream.buffer.durable_files import sync_path
from slipstream.buffer.errors import StoreLostError, StoreUnavailableError
from slipstream.buffer.redis.embedded import EmbeddedRedis

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
