"""Where a server's unix socket lies."""

import hashlib
import tempfile
from pathlib import Path

LONGEST_PATH_BYTES = 100
"""The kernel takes 107; some room is left for temporary suffixes."""


def socket_path(directory: Path) -> Path:
    """`<directory>/redis.sock`, or a short name in the temporary folder when that is too long for the kernel.

    The same directory always gives the same path, so that every process of a run finds it.
    """
    path = directory.resolve() / "redis.sock"
    if len(bytes(path)) <= LONGEST_PATH_BYTES:
        return path
    digest = hashlib.sha256(bytes(path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"slipstream-{digest}.sock"
