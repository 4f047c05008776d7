"""Fsyncer: brings what a Redis server has appended to its log onto the disk, about once a second.

Done outside the server because the server, told to do it (`appendfsync everysec`), answers before it has written while
an fsync of its own is under way: docs/decisions/0008-what-survives-a-killed-store.md.
"""

import os
import threading
import time
from collections import deque
from pathlib import Path


# @@ sync_path: what was written survives the machine.
def sync_path(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


SYNC_EVERY_S = 1.0
"""Between the end of one and the beginning of the next."""
_SLOW_S = 2.0
"""A sync that takes longer is told of: it is how much a dying machine may take along."""


class Fsyncer:
    """Syncs the append-only files of one data folder, on a thread of its own: the disk may take its time.

    A rewrite of the log replaces files; they are found again by inode, and the folder is synced then, too.
    """

    def __init__(self, directory: Path) -> None:
        """`directory` is the server's; the files need not be there yet."""
        self._directory = directory
        self._open: dict[int, int] = {}
        self._sayings: deque[str] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsyncer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """End after the sync under way; blocks at most `timeout_s`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=timeout_s)

    def take_sayings(self) -> list[str]:
        """What a user should know, since the last call: syncs that failed or were slow."""
        return [self._sayings.popleft() for _ in range(len(self._sayings))]

    def sync(self) -> None:
        """One round, now. Raises OSError when the disk fails."""
        paths = self._files()
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

    def _files(self) -> list[Path]:
        """Redis 6 keeps one file, Redis 7 and Valkey keep a folder of them."""
        return [*self._directory.glob("appendonly.aof"), *self._directory.glob("appendonlydir/*")]

    def _run(self) -> None:
        while not self._stopping.wait(SYNC_EVERY_S):
            started_at = time.monotonic()
            try:
                self.sync()
            except FileNotFoundError:
                continue  # replaced between looking and opening: the next round finds the new one
            except OSError as error:
                self._sayings.append(f"the store's log cannot be made durable: {error}")
            if (took_s := time.monotonic() - started_at) > _SLOW_S:
                self._sayings.append(f"making the store's log durable took {took_s:.1f} s: its disk is slow")
        self._close(set(self._open))

    def _close(self, inodes: set[int]) -> None:
        for inode in inodes:
            os.close(self._open.pop(inode))
