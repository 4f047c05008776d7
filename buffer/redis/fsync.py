"""Fsyncer: brings the log of a Redis server onto the disk, about once a second.

Done outside the server, because a server that syncs itself (`appendfsync everysec`) answers before it has written while
an fsync is under way: docs/decisions/0008-what-survives-a-killed-store.md.
"""

import os
import threading
import time
from collections import deque
from pathlib import Path

from slipstream.buffer.durable_files import sync_path

SYNC_EVERY_S = 1.0
"""From the end of one sync to the start of the next."""
_SLOW_S = 2.0
"""A sync that takes longer is reported: its duration is the data that a dying machine may lose."""


class Fsyncer:
    """Syncs the append-only files of one data folder, in a thread of its own: the disk may be slow.

    A rewrite of the log replaces files; they are found again by inode, and their folder is synced then, too.
    """

    def __init__(self, directory: Path) -> None:
        """`directory` is the server's data folder; the files need not exist yet."""
        self._directory = directory
        self._open: dict[int, int] = {}
        self._warnings: deque[str] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsyncer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """End after the sync under way; block at most `timeout_s`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=timeout_s)

    def take_warnings(self) -> list[str]:
        """Return the syncs that failed or were slow since the last call, as sentences for the user."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def sync(self) -> None:
        """Sync once. Raises OSError when the disk fails."""
        # Redis 6 writes one file, Redis 7 and Valkey a folder of them.
        paths = [*self._directory.glob("appendonly.aof"), *self._directory.glob("appendonlydir/*")]
        inodes = {path.stat().st_ino: path for path in paths}
        self._close(set(self._open) - set(inodes))
        is_new = [inode for inode in inodes if inode not in self._open]
        for inode in is_new:
            self._open[inode] = os.open(inodes[inode], os.O_RDONLY)
        for descriptor in self._open.values():
            os.fdatasync(descriptor)
        if is_new:
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
