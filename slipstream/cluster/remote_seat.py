"""RemoteSeat: a seat on a machine that a cluster chooses."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from slipstream.configs.cluster import SeatConfig
from slipstream.runtime.clock import Clock
from slipstream.runtime.command_line import BAD_INPUT

UNWATCHED_S = 60.0
"""Silence after which a seat ends its role, or the launcher gives up the seat; longer than outages that roles
survive."""
_EXPLAIN_AFTER_S = 20.0
"""Wait for a place after which the message lists free resources."""
_KILL_TIMEOUT_S = 8.0
_CLOSE_TIMEOUT_S = 2.0
_POLL_EVERY_S = 0.1
_LOST = -9


class SeatLostError(Exception):
    """The host of a seat or its machine is gone."""


class SeatAwayError(Exception):
    """The machine of a seat is temporarily unreachable."""


class Cluster(Protocol):
    """Nonblocking calls that seats need; groups, hosts, and calls are opaque handles."""

    def request(self, name: str, bundles: list[dict[str, float]], *, labels: list[dict[str, str]]) -> Any:
        """Request bundles, each on a separate machine with its labels."""
        ...

    def is_placed(self, group: Any) -> bool: ...

    def release(self, group: Any) -> None:
        """Also cancels a request."""
        ...

    def host(self, name: str, group: Any, *, gpus: int) -> Any:
        """Start a host in a group's first bundle."""
        ...

    def call(self, host: Any, method: str, *arguments: Any) -> Any:
        """Handle to the answer."""
        ...

    def answer(self, call: Any) -> Any:
        """Answer to a call, or None if pending. Raises SeatLostError, SeatAwayError."""
        ...

    def end(self, host: Any) -> None:
        """Kill a host; its keeper then ends the role."""
        ...

    def offers(self) -> str: ...


class RemoteSeat:
    """A one-bundle group runs a host, which keeps the role.

    Life: (start -> wait -> run -> end | loss)* -> stop. Keeps the place, with the role's model, until `stop` or a loss.
    """

    def __init__(
        self,
        name: str,
        log: Path,
        *,
        cluster: Cluster,
        needs: SeatConfig,
        gpus: int,
        timeout_s: float,
        remedy: str = "change cluster.generator, ask for fewer generators, or add machines",
        clock: Clock = time.monotonic,
    ) -> None:
        """`timeout_s`: limit of the wait for a place; `remedy`: advice if it passes."""
        self._name = name
        self._log = log
        self._cluster = cluster
        self._needs = needs
        self._gpus = gpus
        self._timeout_s = timeout_s
        self._remedy = remedy
        self._clock = clock
        self._group: Any = None
        self._host: Any = None
        self._pending: Any = None
        self._order: tuple[list[str], dict[str, str]] | None = None
        self._requested_at = self._heard_at = 0.0
        self._address = self._waits = ""
        self._num_bytes = 0
        self.pid: int | None = None
        self._code: int | None = None

    @property
    def place(self) -> str:
        return f"pid {self.pid} on {self._address}" if self.pid is not None else self._waits

    def start(self, arguments: Sequence[str], *, variables: Mapping[str, str]) -> None:
        self._order = (list(arguments), dict(variables))
        self.pid = self._code = None
        self._heard_at = self._clock()
        self._waits = f"waits for a place with {describe(self._bundle, self._needs.labels)}"
        if self._host is not None:
            self._ask("start", *self._order)
        else:
            self._group = self._cluster.request(self._name, [self._bundle], labels=[self._needs.labels])
            self._requested_at = self._heard_at

    def poll(self) -> int | None:
        if self._code is None and self._order is not None:
            try:
                self._advance()
            except SeatAwayError as away:
                # The role may survive. The cluster raises SeatLostError once it gives up on the machine.
                if self.pid is not None:
                    self._ask("look", self._num_bytes)
                else:
                    self._lose(away)
            except SeatLostError as lost:
                self._lose(lost)
        return self._code

    def terminate(self) -> None:
        if self.pid is not None and self._code is None:
            self._cluster.call(self._host, "terminate")

    def stop(self, *, ends_at: float) -> None:
        self._await_end(ends_at)
        if self._host is not None and self.pid is not None and self.poll() is None:
            self._cluster.call(self._host, "kill")
            self._await_end(time.monotonic() + _KILL_TIMEOUT_S)
        if self._host is not None:
            closed, close_by = self._cluster.call(self._host, "close"), time.monotonic() + _CLOSE_TIMEOUT_S
            with suppress(SeatLostError, SeatAwayError):
                while self._cluster.answer(closed) is None and time.monotonic() < close_by:
                    time.sleep(_POLL_EVERY_S)
        self._leave()
        self._order = None

    @property
    def _bundle(self) -> dict[str, float]:
        wanted = {"CPU": self._needs.cpus, "GPU": float(self._gpus)}
        return {resource: amount for resource, amount in wanted.items() if amount}

    def _advance(self) -> None:
        assert self._order is not None
        if self._host is None:
            self._await_place()
        elif self._clock() - self._heard_at > UNWATCHED_S:
            raise SeatLostError(f"it has not answered for {UNWATCHED_S:g} s")
        elif (answer := self._cluster.answer(self._pending)) is not None:
            self._heard_at = self._clock()
            if self.pid is None:
                self.pid, self._address = answer
            else:
                self._code, part = answer
                self._num_bytes += len(part)
                self._write(part)
            if self._code is None:
                self._ask("look", self._num_bytes)

    def _await_place(self) -> None:
        assert self._order is not None
        waited_s = self._clock() - self._requested_at
        if self._cluster.is_placed(self._group):
            self._waits = "has a place, and starts there"
            self._num_bytes = 0
            self._heard_at = self._clock()
            self._host = self._cluster.host(self._name, self._group, gpus=self._gpus)
            self._ask("start", *self._order)
        elif waited_s > self._timeout_s:
            needs = f"{self._name} needs a machine with {describe(self._bundle, self._needs.labels)} free"
            got = f"got none within broker.join_timeout_s ({self._timeout_s:g} s)"
            offers = f"the cluster has {self._cluster.offers()}"
            self._end(BAD_INPUT, f"error: {needs}, and {got}; {offers}: {self._remedy}.")
        elif waited_s > _EXPLAIN_AFTER_S and ";" not in self._waits:
            self._waits += f"; the cluster has {self._cluster.offers()}"

    def _ask(self, method: str, *arguments: Any) -> None:
        self._pending = self._cluster.call(self._host, method, *arguments)

    def _write(self, part: bytes) -> None:
        # A full disk loses these lines, not the run.
        with suppress(OSError), self._log.open("ab") as log:
            log.write(part)

    def _lose(self, error: Exception) -> None:
        self._end(_LOST, f"the place of {self._name} is lost: {error}")

    def _end(self, code: int, sentence: str) -> None:
        self._write(f"{sentence}\n".encode())
        self._code = code
        self._leave()

    def _await_end(self, ends_at: float) -> None:
        while self.pid is not None and self.poll() is None and time.monotonic() < ends_at:
            time.sleep(_POLL_EVERY_S)

    def _leave(self) -> None:
        host, group = self._host, self._group
        self._host = self._group = self._pending = None
        if host is not None:
            self._cluster.end(host)
        if group is not None:
            self._cluster.release(group)


def describe(bundle: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Describe resources and labels."""
    resources = ", ".join(f"{amount:g} {resource}" for resource, amount in sorted(bundle.items()))
    return resources + "".join(f", label {key}={value}" for key, value in labels.items())
