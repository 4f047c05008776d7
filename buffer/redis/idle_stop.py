"""Program that stops an idle embedded server; one instance per server.

A server outlives its starter, so that one role's death does not affect the others. When all are gone, this program
makes it save its data and exit. Standard library only, run by path: starts in milliseconds and stays small.

python -I -S idle_stop.py SOCKET LOCK IDLE_SECONDS
"""

import fcntl
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

_LONGEST_TICK_S = 5.0
_SHUTDOWN_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.2


def main(path: str, lock: str, idle_s: float) -> None:
    """Detach from the parent, then watch the server at socket `path` until it exits."""
    tick_s = min(_LONGEST_TICK_S, idle_s / 4)
    connection = _connect(path, timeout_s=tick_s)
    if connection is None:
        return
    # The socket's peer credentials name the listening process.
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    server = _Server(pid)
    # The starter waits only for this parent. The orphaned child never becomes its zombie.
    if os.fork():
        os._exit(0)
    unused_since: float | None = None
    while not server.has_ended(within_s=tick_s):
        connection = connection or _connect(path, timeout_s=tick_s)
        # Without a socket, no client can reach the server.
        is_used = Path(path).exists()
        if connection:
            try:
                is_used = _count_users(connection) > 0
            except OSError:
                # Suspended or overloaded. Reconnect, or a late answer would be taken for the next one.
                connection.close()
                connection, is_used = None, True
        if is_used:
            unused_since = None
            continue
        now = time.monotonic()
        unused_since = now if unused_since is None else unused_since
        if now - unused_since >= idle_s:
            _stop(server, connection, lock)


class _Server:
    """A process by pid and start time, to detect pid reuse. Many Python builds lack pidfds."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._started_at = _started_at(pid)

    def has_ended(self, *, within_s: float) -> bool:
        ends_at = time.monotonic() + within_s
        while is_running := self._started_at is not None and _started_at(self._pid) == self._started_at:
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(_LOOK_EVERY_S, left_s))
        return not is_running

    def send(self, number: int) -> None:
        if not self.has_ended(within_s=0):
            os.kill(self._pid, number)


def _started_at(pid: int) -> str | None:
    """Start time in kernel ticks; None for ended processes and zombies."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else fields[18]


def _stop(server: _Server, connection: socket.socket | None, lock: str) -> None:
    # Servers are started and adopted under this lock, so none adopts this one between the last check and its end.
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        # The folder was deleted, so it cannot save its data.
        server.send(signal.SIGKILL)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if connection is None or _count_users(connection) == 0:
            server.send(signal.SIGTERM)
            server.has_ended(within_s=_SHUTDOWN_TIMEOUT_S)
    except OSError:
        # The server is being started or adopted, or has ended.
        pass
    finally:
        os.close(descriptor)


def _connect(path: str, *, timeout_s: float) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def _count_users(connection: socket.socket) -> int:
    """Number of other connections. Raises OSError."""
    connection.sendall(b"*2\r\n$6\r\nCLIENT\r\n$4\r\nLIST\r\n")
    with connection.makefile("rb") as answer:
        head = answer.readline()
        if not head.startswith(b"$"):
            # Still loading, for a client that just started it, or the connection was closed.
            return 1
        # One line per connection, including this one, and a final newline.
        return answer.read(int(head[1:]) + 2).count(b"\n") - 2


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
