"""Program that ends an embedded server which no role has used for a while; started beside each server.

A server outlives the processes that started it, so that the death of one costs the others nothing. When all of them are
gone, this program remains, and has the server save its data and end.

It imports the standard library alone, and is run by its path: it starts in milliseconds, and stays small.

python -I -S idle_stop.py SOCKET LOCK IDLE_SECONDS
"""

import fcntl
import os
import select
import socket
import sys
import time

_ANSWER_TIMEOUT_S = 5.0
_SHUTDOWN_TIMEOUT_S = 60.0


def main(path: str, lock: str, idle_s: float) -> None:
    """Detach from the parent, then watch the server at the unix socket `path` until it has ended."""
    # The parent waits for its child only: no zombie is left to it, whenever this ends.
    if os.fork():
        os._exit(0)
    unused_since: float | None = None
    connection = _connect(path)
    while connection and not _has_ended(connection, within_s=min(5.0, idle_s / 4)):
        try:
            is_used = _count_users(connection) > 0
        except OSError:
            # Suspended, or overloaded: a late answer would be taken for the next one.
            connection.close()
            connection, is_used = _connect(path), True
        if is_used:
            unused_since = None
            continue
        now = time.monotonic()
        unused_since = now if unused_since is None else unused_since
        if connection and now - unused_since >= idle_s:
            _stop(connection, lock)


def _stop(connection: socket.socket, lock: str) -> None:
    # The lock of those who start or adopt a server: nobody may adopt this one between the last look and its end.
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        # Its folder was deleted: nobody finds it any more, and it has nowhere to save to.
        connection.sendall(_encode("SHUTDOWN", "NOSAVE"))
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _count_users(connection) == 0:
            connection.sendall(_encode("SHUTDOWN"))
            _has_ended(connection, within_s=_SHUTDOWN_TIMEOUT_S)
    except OSError:
        # Somebody starts or adopts it now; or it has ended.
        pass
    finally:
        os.close(descriptor)


def _connect(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER_TIMEOUT_S)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def _has_ended(connection: socket.socket, *, within_s: float) -> bool:
    """Block until the server closes the connection, at most `within_s`; whatever else it sends is a refusal."""
    readable, _, _ = select.select([connection], [], [], within_s)
    if not readable:
        return False
    try:
        return connection.recv(4096) == b""
    except OSError:
        return True


def _count_users(connection: socket.socket) -> int:
    """Return the number of other connections. Raises OSError."""
    connection.sendall(_encode("CLIENT", "LIST"))
    with connection.makefile("rb") as answer:
        head = answer.readline()
        if not head.startswith(b"$"):
            # Still loading its data, for somebody who has just started it.
            return 1
        listed = answer.read(int(head[1:]) + 2)
    # One line each, this connection's among them; the answer itself ends with a line end, too.
    return listed.count(b"\n") - 2


def _encode(*words: str) -> bytes:
    parts = [b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words]
    return b"*%d\r\n%s" % (len(parts), b"".join(parts))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
