"""RedisSupervisor: keeps the embedded server running, and what it wrote on the disk, while a run goes on."""

import threading
import time
from collections import deque

from slipstream.buffer.errors import StoreLostError, StoreUnavailableError
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.fsync import Fsyncer

_LOOK_EVERY_S = 0.1
_MAX_DEATHS = 5
_WITHIN_S = 60.0


class RedisSupervisor:
    """The owner of an embedded server. Starts it again on its data when it dies, whatever it died of.

    Life: start -> (death -> restart)* -> stop. A store that keeps nothing (`fast`), and one that dies again and again,
    is given up: `poll` raises StoreLostError from then on.
    """

    def __init__(self, server: EmbeddedRedis, *, start_timeout_s: float = 60.0) -> None:
        """`start_timeout_s`: for a server to load its data and answer."""
        self._server = server
        self._start_timeout_s = start_timeout_s
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._sayings: deque[str] = deque()
        self._lost: StoreLostError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="store-keeper", daemon=True)
        self._fsyncer = Fsyncer(server.directory) if server.durability == "standard" else None
        self.num_restarts = 0
        """Since `start`."""

    @property
    def url(self) -> str:
        """Address for `open_run_store`."""
        return self._server.url

    def start(self) -> None:
        """Start the server, or adopt the one that runs, and begin to keep it. Raises StoreUnavailableError."""
        self._server.start(timeout_s=self._start_timeout_s)
        self._thread.start()
        if self._fsyncer:
            self._fsyncer.start()

    def poll(self) -> list[str]:
        """What happened since the last call, in sentences for the user. Raises StoreLostError; never blocks."""
        if self._lost:
            raise self._lost
        said = [self._sayings.popleft() for _ in range(len(self._sayings))]
        return said + (self._fsyncer.take_sayings() if self._fsyncer else [])

    def release(self) -> None:
        """Stop keeping; the server runs on, for whoever uses it."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=self._start_timeout_s)
        if self._fsyncer:
            self._fsyncer.stop()

    def stop(self) -> None:
        """Stop keeping, and the server; it writes what it has."""
        self.release()
        self._server.stop()

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY_S):
            if self._server.is_alive:
                continue
            try:
                self._bring_back()
            except StoreLostError as lost:
                self._lost = lost
                return

    def _bring_back(self) -> None:
        died_at = time.monotonic()
        self._deaths.append(died_at)
        how = self._server.last_words
        self._check_is_worth_it(how)
        self._sayings.append(f"the store died ({how}); starting it again")
        try:
            self._server.start(timeout_s=self._start_timeout_s)
        except StoreUnavailableError as fault:
            # Counts as another death at the next look.
            self._sayings.append(str(fault))
            return
        self.num_restarts += 1
        took_s = time.monotonic() - died_at
        self._sayings.append(
            f"the store is back after {took_s:.1f} s (pid {self._server.pid}, restart {self.num_restarts})"
        )

    def _check_is_worth_it(self, how: str) -> None:
        if self._server.durability == "fast":
            raise StoreLostError(
                f"the store died ({how}) and buffer.store.durability=fast keeps nothing: start the run anew, with "
                "buffer.store.durability=standard if it must survive this."
            )
        if len(self._deaths) == _MAX_DEATHS and self._deaths[-1] - self._deaths[0] <= _WITHIN_S:
            raise StoreLostError(
                f"the store must stay alive, but died {_MAX_DEATHS} times within {_WITHIN_S:g} s and is given up "
                f"({how}); {self._server.end_of_log()}"
            )
