"""`python -m tests.chaos.guard FOLDER`: at the end of stdin, kill every process that works in a folder.

The harness holds the other end of the pipe, so its store ends with it, even after SIGKILL.
"""

import subprocess
import sys
import time
from pathlib import Path

from tests.runs import ROOT, kill_processes_of

_ROUNDS, _GAP_S = 5, 0.2
"""More than one round: a role that is dying may still start a process."""


def start_guard(folder: Path) -> "subprocess.Popen[bytes]":
    """Start the guard of a folder, in a session of its own; its end is `guard.stdin.close()`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.guard", str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        # Not the harness's output, because its reader waits until every process has closed it.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(folder: Path) -> None:
    sys.stdin.buffer.read()
    for _ in range(_ROUNDS):
        kill_processes_of(folder)
        time.sleep(_GAP_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
