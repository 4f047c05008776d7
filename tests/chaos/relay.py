"""`python -m tests.chaos.relay LISTEN CONNECT SEED`: a relay between two unix sockets that cuts connections.

It cuts after forwarding a trajectory and before the acknowledgment returns, or instead of forwarding an answer. It
only sees encrypted bytes, so it decides by size.
"""

import random
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

_LARGE = 500
"""Larger chunks count as trajectories or prompts; heartbeats and acknowledgments are smaller."""
_CUT_SHARE = {"up": 0.03, "down": 0.02}
"""Fraction of large chunks that cut their connection: trajectories going up, prompts going down."""
_DEAF_S = 0.06
"""Time between forwarding a trajectory and the cut, in which the broker stores and acknowledges it."""
_CHUNK = 1 << 16
_TICK_S = 0.02


class Relay:
    """Forwards between every connection to `listen` and a new one to `connect`."""

    def __init__(self, listen: str, connect: str, *, seed: int) -> None:
        self._connect = connect
        self._random = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._pairs: list[SimpleNamespace] = []
        """Connections of a peer, with the one to the broker and the time of its cut."""
        Path(listen).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(listen)
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._pairs:
                    self._forward(key.data, key.fileobj)
            now = time.monotonic()
            for pair in [each for each in self._pairs if each.ends_at is not None and each.ends_at <= now]:
                self._end(pair)

    def _accept(self) -> None:
        peer, _ = self._listener.accept()
        broker = socket.socket(socket.AF_UNIX)
        try:
            broker.connect(self._connect)
        except OSError:
            peer.close()
            return
        pair = SimpleNamespace(peer=peer, broker=broker, ends_at=None)
        self._pairs.append(pair)
        for end in (peer, broker):
            self._selector.register(end, selectors.EVENT_READ, pair)

    def _forward(self, pair: SimpleNamespace, source: socket.socket) -> None:
        is_up = source is pair.peer
        try:
            data = source.recv(_CHUNK)
            if not data:
                self._end(pair)
                return
            if pair.ends_at is not None:
                return  # answers within this time are lost
            is_cut = len(data) > _LARGE and self._random.random() < _CUT_SHARE["up" if is_up else "down"]
            if is_cut:
                pair.ends_at = time.monotonic() + _DEAF_S
            if is_up or not is_cut:
                (pair.broker if is_up else pair.peer).sendall(data)
        except OSError:
            self._end(pair)

    def _end(self, pair: SimpleNamespace) -> None:
        with suppress(ValueError):
            self._pairs.remove(pair)
        for end in (pair.peer, pair.broker):
            with suppress(KeyError, ValueError):
                self._selector.unregister(end)
            end.close()


def main(arguments: Sequence[str]) -> None:
    listen, connect, seed = arguments
    Relay(listen, connect, seed=int(seed)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
