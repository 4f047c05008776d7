"""Publishing: a version on its way to the generators while the learner goes on with the next step.

Consumes: weights and canary of a version, copied before this returns.
Produces: announced and committed versions in the store.
Waits for: the previous version, before the next one is staged.
Invariant: one version is on its way at a time, and the publisher belongs to the thread that carries it.
"""

from collections.abc import Iterable
from concurrent.futures import Future, wait
from threading import Thread

import structlog
from torch import Tensor

from buffer.records import VersionEntry
from buffer.store import Store
from learner.publisher import Canary, Published, Publisher

log = structlog.get_logger(__name__)


class Publishing:
    """Life: (publish -> take)* -> close. In the serial run everything happens within `publish`."""

    def __init__(self, publisher: Publisher, store: Store, *, in_background: bool) -> None:
        self._publisher = publisher
        self._store = store
        self._in_background = in_background
        self._underway: Future[Published] | None = None
        self._finished: Published | None = None

    def publish(self, *, version: int, step: int, weights: Iterable[tuple[str, Tensor]], canary: Canary) -> None:
        """Copy the weights after `step` and send them off. Blocks while the previous version is still on its way."""
        self.finish()
        self._publisher.stage(version=version, weights=weights, canary=canary)
        self._store.record_version(VersionEntry(version, step, self._publisher.staged_checksum))
        self._store.announce_version(version)
        self._start()

    def finish(self) -> None:
        """Block until nothing is on its way; every phase of a publish has its own deadline. Raises what it raised."""
        if self._underway:
            self._finished, self._underway = self._underway.result(), None

    def take(self) -> Published | None:
        """What a publish did that has ended since the last call; None while it is on its way. Raises what it raised."""
        if self._underway and self._underway.done():
            self.finish()
        finished, self._finished = self._finished, None
        return finished

    def look_after_members(self, *, timeout_s: float) -> None:
        """Bring the current version to generators that joined or failed since; waits at most `timeout_s` for news."""
        if self._underway and self._underway not in wait([self._underway], timeout=timeout_s).done:
            return
        self.finish()
        self._publisher.read_news(timeout_s=timeout_s)
        if self._publisher.is_due:
            published = self._publisher.synchronize()
            log.info("synchronized", version=published.version, generators=published.num_members)

    def who_holds_what(self) -> str:
        """One phrase about the generators, for a wait that lasts."""
        alive, holding = self._publisher.num_alive, self._publisher.num_holding
        if alive == 0:
            return "no generator is alive (start one with `python -m generators`)"
        return f"{alive} generators alive, {holding} of them hold version {self._publisher.staged_version}"

    def close(self) -> None:
        """Wait for what is on its way, then tear the weight group down."""
        self.finish()
        self._publisher.close()

    def _start(self) -> None:
        self._underway = Future()
        if self._in_background:
            # A daemon: a learner that is told to stop does not wait for generators.
            Thread(target=self._carry, args=(self._underway,), name="publish", daemon=True).start()
        else:
            self._carry(self._underway)

    def _carry(self, underway: Future[Published]) -> None:
        try:
            published = self._publisher.synchronize()
            self._store.commit_version(published.version)
            underway.set_result(published)
        except BaseException as error:
            underway.set_exception(error)
