"""parent_watch: a process that multiprocessing started ends with the process that started it.

vLLM's engine process does not notice that its parent was killed. The kernel's own signal for that (PR_SET_PDEATHSIG) is
tied to the thread that started the process, which may end long before; so a thread of ours waits instead.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection


def die_with_parent() -> None:
    """Start the watch; does nothing in a process that multiprocessing did not start."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        thread = threading.Thread(target=_wait_and_die, args=(parent.sentinel,), name="parent-watch", daemon=True)
        thread.start()


def _wait_and_die(sentinel: int) -> None:
    # The sentinel is a pipe whose other end lives in the parent alone: it is ready when the parent is gone. There is no
    # deadline, because waiting for that moment is all this thread is for.
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
