"""BackgroundPublisher: publishes versions while the learner trains on.

Consumes: weights and canary of a version, copied before `publish` returns.
Produces: announced and committed versions in the store.
Waits for: nothing within `publish`: a version that still waits to be sent is replaced by the next one.
Invariant: one version is in flight and at most one waits, in two sets of buckets; the publisher belongs to the thread
that synchronises.
"""

from collections.abc import Iterable
from concurrent.futures import Future, wait
from threading import Lock, Thread

from torch import Tensor

from slipstream.buffer.records import VersionEntry
from slipstream.buffer.store import Store
from slipstream.learner.publishing.publisher import Published, Publisher
from slipstream.learner.publishing.staging import Canary, Staged, Stager
from slipstream.runtime.trace import PUBLISH, Trace


class BackgroundPublisher:
    """Life: (publish -> take_published)* -> close. In a serial run everything happens within `publish`.

    Every method raises what the thread in the background raised.
    """

    def __init__(
        self, publisher: Publisher, stager: Stager, store: Store, *, in_background: bool, trace: Trace | None = None
    ) -> None:
        self._trace = trace or Trace("learner")
        self._publisher = publisher
        self._stager = stager
        self._store = store
        self._in_background = in_background
        self._lock = Lock()
        self._waiting: Staged | None = None
        self._step = 0
        self._spare: Staged | None = None
        self._in_flight: Future[None] | None = None
        self._published: Published | None = None

    def publish(self, *, version: int, step: int, weights: Iterable[tuple[str, Tensor]], canary: Canary) -> None:
        """Copy the weights after `step` and start sending them."""
        self._raise_error()
        with self._lock:
            replaced, self._waiting = self._waiting, None
            reuse, self._spare = replaced or self._spare, None
        staged = self._stager.stage(version=version, weights=weights, canary=canary, reuse=reuse)
        # Before it is sent: the broker refuses trajectories of a version that was not announced.
        self._store.announce_version(version)
        with self._lock:
            self._waiting, self._step = staged, step
        self._start()

    def flush(self) -> None:
        """Block until nothing is in flight.

        Bounded by the deadlines of publishing: a version has a few attempts, each phase of an attempt (group, buckets,
        answers) has its limit in `weights`, and a call of the store `buffer.retry_timeout_s`. At most one more version
        waits behind it.
        """
        if self._in_flight:
            wait([self._in_flight])
        self._raise_error()

    @property
    def probe_limit(self) -> float:
        """Largest mean difference that a probe may show, nats."""
        return self._stager.probe_limit.nats

    def take_published(self) -> Published | None:
        """Result of the newest publish that ended since the last call; None if none did."""
        self._raise_error()
        with self._lock:
            published, self._published = self._published, None
        return published

    def sync_members(self, *, timeout_s: float) -> None:
        """Publish the current version to members that joined or failed since; waits at most `timeout_s` for news."""
        if self._in_flight and not wait([self._in_flight], timeout=timeout_s).done:
            return
        self._raise_error()
        self._publisher.poll(timeout_s=timeout_s)
        if self._publisher.is_due:
            self._start()

    def describe_members(self) -> str:
        """A phrase about the generators, for the log of a long wait."""
        alive, holding = self._publisher.num_alive, self._publisher.num_holding
        if alive == 0:
            return "no generator is alive (start one with `python -m generators`)"
        return f"{alive} generators alive, {holding} of them hold version {self._publisher.version}"

    def close(self) -> None:
        """Wait for the publish in flight, then tear the weight group down."""
        try:
            self.flush()
        finally:
            self._publisher.close()

    # --- synchronising -------------------------------------------------------------------------------------------
    def _start(self) -> None:
        if self._in_flight and not self._in_flight.done():
            return
        self._raise_error()
        in_flight: Future[None] = Future()
        self._in_flight = in_flight
        if self._in_background:
            # A daemon thread: a learner that is told to stop does not wait for generators.
            Thread(target=self._run, args=(in_flight,), name="publish", daemon=True).start()
        else:
            self._run(in_flight)

    def _run(self, in_flight: "Future[None]") -> None:
        try:
            self._synchronize()
            while not self._ends(in_flight):
                self._synchronize()
        except BaseException as error:
            in_flight.set_exception(error)

    def _ends(self, in_flight: "Future[None]") -> bool:
        # Under one lock with the check: a version put down right after it must find no thread and start one.
        with self._lock:
            if self._waiting is None:
                in_flight.set_result(None)
            return self._waiting is None

    def _synchronize(self) -> None:
        """Bring the waiting version, or the current one again, into every living generator."""
        with self._lock:
            newest, self._waiting, step = self._waiting, None, self._step
        if newest:
            # Here, where the learner does not wait for the copy to the host and the checksums.
            self._store.record_version(VersionEntry(newest.version, step, newest.checksum))
            with self._lock:
                self._spare = self._publisher.set_version(newest)
        with self._trace.timed(PUBLISH, version=self._publisher.version):
            published = self._publisher.synchronize()
            if published.probe_diff_max:
                self._stager.probe_limit.calibrate(published.probe_diff_mean)
            self._store.commit_version(published.version)
        with self._lock:
            self._published = published

    def _raise_error(self) -> None:
        if self._in_flight and self._in_flight.done():
            in_flight, self._in_flight = self._in_flight, None
            in_flight.result()
