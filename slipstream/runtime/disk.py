"""Full disks: detect, describe, and wait for a person to free space, without a deadline."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space | quota exceeded | `ulimit -f`, a full disk in tests."""
_TEXTS = tuple(os.strerror(number) for number in _FULL)
"""For safetensors and Redis, which report only the text."""
_RETRY_EVERY_S = 1.0
_MAX_DELAY_S = 60.0
_MORE_ROOM_BYTES = 2**20
_LOG_EVERY_S = 5.0

log = structlog.get_logger(__name__)


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(text in str(error) for text in _TEXTS)


def describe_disk(path: Path) -> str:
    """Describe the disk of a path, which need not exist: `/data (12 MiB of 9216 MiB free), which holds /data/x`."""
    path = path.absolute()
    existing = nearest_folder(path)
    mount = next(folder for folder in (existing, *existing.parents) if folder.is_mount())
    usage = shutil.disk_usage(existing)
    return f"{mount} ({usage.free // 2**20} MiB of {usage.total // 2**20} MiB free), which holds {path}"


def nearest_folder(path: Path) -> Path:
    """Path, or its nearest existing parent."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(nearest_folder(path)).free


class DiskWait:
    """Retries writes on a full disk. Used by one thread; any may read `reason`."""

    def __init__(
        self, *, while_waiting: Callable[[], object] = lambda: None, retry_every_s: float = _RETRY_EVERY_S
    ) -> None:
        """`while_waiting` is called every few seconds during a wait."""
        self._while_waiting = while_waiting
        self._retry_every_s = retry_every_s
        self._log_at = 0.0
        self.reason = ""
        """Such as `waiting 12 s for room for metrics ...`; empty without a wait."""

    def retry(self, write: Callable[[], T], *, what: str, path: Path) -> T:
        """Retry `write`, which must be atomic, until the disk has room."""
        began_at, delay_s = time.monotonic(), self._retry_every_s
        while True:
            try:
                result = write()
            except Exception as error:
                if not is_disk_full(error):
                    raise
                self._await_room(what, path, error, began_at=began_at, at_most_s=delay_s)
                # A checkpoint may take minutes to fail.
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            else:
                if self.reason:
                    log.info("disk_has_room", what=what, after_s=round(time.monotonic() - began_at, 1))
                self.reason = ""
                return result

    def _await_room(self, what: str, path: Path, error: Exception, *, began_at: float, at_most_s: float) -> None:
        """Wait until free space grows or, because a quota may be the limit, for `at_most_s`."""
        free, ends_at = _free_bytes(path), time.monotonic() + at_most_s
        while (now := time.monotonic()) < ends_at and _free_bytes(path) < free + _MORE_ROOM_BYTES:
            self.reason = f"waiting {now - began_at:.0f} s for room for {what} on the disk {describe_disk(path)}"
            if now >= self._log_at:
                self._log_at = now + _LOG_EVERY_S
                log.warning("disk_full", reason=self.reason, error=str(error))
                self._while_waiting()
            time.sleep(self._retry_every_s)
