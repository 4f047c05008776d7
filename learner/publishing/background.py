"""BackgroundPublisher: versions on their way to the generators while the learner goes on with its steps.

Consumes: weights and canary of a version, copied before `publish` returns.
Produces: announced and committed versions in the store.
Waits for: nothing within `publish`: a version that is still waiting to be sent when the next one is made is overtaken.
Invariant: one version is on its way and at most one waits, in two sets of buckets; the publisher belongs to the thread
that carries them.
"""

from collections.abc import Iterable
from concurrent.futures import Future, wait
from threading import Lock, Thread

import structlog
from torch import Tensor

from slipstream.buffer.records import VersionEntry
from slipstream.buffer.store import Store
from slipstream.learner.publishing.publisher import Published, Publisher
from slipstream.learner.publishing.staging import Canary, Staged, Stager

log = structlog.get_logger(__name__)


class BackgroundPublisher:
    """Life: (publish -> take)* -> close. In the serial run everything happens within `publish`."""

    def __init__(self, publisher: Publisher, stager: Stager, store: Store, *, in_background: bool) -> None:
        self._publisher = publisher
        self._stager = stager
        self._store = store
        self._in_background = in_background
        self._lock = Lock()
        self._waiting: Staged | None = None
        self._spare: Staged | None = None
        self._underway: Future[None] | None = None
        self._finished: Published | None = None

    def publish(self, *, version: int, step: int, weights: Iterable[tuple[str, Tensor]], canary: Canary) -> None:
        """Copy the weights after `step` and have them sent. Raises what the carrying of an earlier version raised."""
        self._raise_fault()
        with self._lock:
            overtaken, self._waiting = self._waiting, None
            reuse, self._spare = overtaken or self._spare, None
        staged = self._stager.stage(version=version, weights=weights, canary=canary, reuse=reuse)
        self._store.record_version(VersionEntry(version, step, staged.checksum))
        self._store.announce_version(version)
        with self._lock:
            self._waiting = staged
        self._carry()

    def finish(self) -> None:
        """Block until nothing is on its way. Raises what it raised.

        It ends by itself: a version is tried a few times, each phase of a try (group, buckets, answers) has its limit
        in `weights`, and what is written of it has the store's patience. At most one more version waits behind it.
        """
        if self._underway:
            wait([self._underway])
        self._raise_fault()

    def take(self) -> Published | None:
        """The newest publish that has ended since the last call; None when none has. Raises what one raised."""
        self._raise_fault()
        with self._lock:
            finished, self._finished = self._finished, None
        return finished

    def look_after_members(self, *, timeout_s: float) -> None:
        """Bring the current version to generators that joined or failed since; waits at most `timeout_s` for news."""
        if self._underway and not wait([self._underway], timeout=timeout_s).done:
            return
        self._raise_fault()
        self._publisher.read_news(timeout_s=timeout_s)
        if self._publisher.is_due:
            self._carry()

    def who_holds_what(self) -> str:
        """One phrase about the generators, for a wait that lasts."""
        alive, holding = self._publisher.num_alive, self._publisher.num_holding
        if alive == 0:
            return "no generator is alive (start one with `python -m generators`)"
        return f"{alive} generators alive, {holding} of them hold version {self._publisher.version}"

    def close(self) -> None:
        """Wait for what is on its way, then tear the weight group down."""
        try:
            self.finish()
        finally:
            self._publisher.close()

    # --- carrying ------------------------------------------------------------------------------------------------
    def _carry(self) -> None:
        if self._underway and not self._underway.done():
            return
        self._raise_fault()
        underway: Future[None] = Future()
        self._underway = underway
        if self._in_background:
            # A daemon: a learner that is told to stop does not wait for generators.
            Thread(target=self._run, args=(underway,), name="publish", daemon=True).start()
        else:
            self._run(underway)

    def _run(self, underway: "Future[None]") -> None:
        try:
            self._bring()
            while not self._ends(underway):
                self._bring()
        except BaseException as error:
            underway.set_exception(error)

    def _ends(self, underway: "Future[None]") -> bool:
        """Whether nothing waits; in the same instant, so that what is put down afterwards finds no carrier."""
        with self._lock:
            if self._waiting is None:
                underway.set_result(None)
            return self._waiting is None

    def _bring(self) -> None:
        """The version that waits, or once more the current one, to every living generator."""
        with self._lock:
            newest, self._waiting = self._waiting, None
            if newest:
                self._spare = self._publisher.hold(newest)
        published = self._publisher.synchronize()
        self._store.commit_version(published.version)
        with self._lock:
            self._finished = published

    def _raise_fault(self) -> None:
        if self._underway and self._underway.done():
            underway, self._underway = self._underway, None
            underway.result()
