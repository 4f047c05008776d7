"""RankWatch: ends a learner rank when another one, or its machine, has been silent for too long.

A rank that dies closes its connections, which ends the collectives of the others at once. A machine that vanishes
closes nothing: without a watch the others would wait for it until the limit of a collective.

Consumes: the beats of the other ranks, in their rendezvous.
Produces: own beats; one sentence and exit code 75, which has the launcher start the ranks again.
Waits for: nothing.
Invariant: liveness is that of a thread, so that a step may take as long as it likes.
"""

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import structlog

from slipstream.runtime.command_line import TRY_AGAIN

_BEATS = 10
"""Beats within the time that a rank may be silent."""
_MAX_INTERVAL_S = 5.0

log = structlog.get_logger(__name__)


def leave(store: Any, rank: int) -> None:
    """Tell the others that this rank ends as it should. Raises RuntimeError."""
    store.set(_left(rank), "1")


def _left(rank: int) -> str:
    return f"left/{rank}"


def _end_process(sentence: str) -> None:
    # No exception could reach the main thread: it is in a collective, which nothing but its own limit ends.
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(TRY_AGAIN)


class RankWatch:
    """Two threads of each rank: one beats, and reads the beats of the others; one judges.

    Judged by a second thread, because the first one hangs with the rendezvous when that has vanished, which stands on
    the machine of rank 0.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        end: Callable[[str], None] = _end_process,
        host: str = "",
    ) -> None:
        """`store`: the rendezvous, by a connection of its own. `end` is called once, with one sentence."""
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._timeout_s = timeout_s
        self._interval_s = min(_MAX_INTERVAL_S, timeout_s / _BEATS)
        self._end = end
        self._host = host or socket.gethostname()
        self._beats = dict.fromkeys(self._others, "")
        """Newest beat of each rank: a number and its machine."""
        self._silent_s = dict.fromkeys(self._others, 0.0)
        self._unread_s = 0.0
        """Time since the beats of all could be read."""
        self._stopping = threading.Event()

    def meet(self, *, timeout_s: float) -> None:
        """Wait until all ranks have told their machines. Raises RuntimeError."""
        self._store.set(f"alive/{self._rank}", f"0 {self._host}")
        self._store.wait([f"alive/{other}" for other in self._others], timedelta(seconds=timeout_s))
        for other in self._others:
            self._listen_to(other)

    def start(self) -> None:
        for run in (self._beat, self._judge):
            threading.Thread(target=run, name=f"rank-watch-{run.__name__[1:]}", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _beat(self) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            try:
                self._store.set(f"alive/{self._rank}", f"{number} {self._host}")
                for other in self._others:
                    self._listen_to(other)
                self._unread_s = 0.0
            except RuntimeError as error:
                # Judged as silence, like a rendezvous that does not answer at all.
                log.debug("rendezvous_lost", reason=str(error))
            self._stopping.wait(self._interval_s)

    def _listen_to(self, other: int) -> None:
        key = f"alive/{other}"
        beat = self._store.get(key).decode() if self._store.check([key]) else ""
        if beat != self._beats[other]:
            self._beats[other], self._silent_s[other] = beat, 0.0
        if self._store.check([_left(other)]):
            self._silent_s[other] = -math.inf

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._stopping.wait(self._interval_s):
            # A process that stood still itself has heard nobody, which says nothing of the others.
            passed_s = min(time.monotonic() - before, 2 * self._interval_s)
            before = time.monotonic()
            self._unread_s += passed_s
            for other in self._others:
                self._silent_s[other] += passed_s
            if silent := [other for other in self._others if self._silent_s[other] > self._timeout_s]:
                self._end(self._sentence(silent))
                return

    def _sentence(self, silent: Sequence[int]) -> str:
        limit = f"within learner.rank_timeout_s ({self._timeout_s:g} s)"
        # Then nobody's beat could be read, and nothing is known of the ranks beside the first.
        if self._unread_s > self._timeout_s / 2 and self._rank:
            return (
                f"the machine of learner rank 0, {self._host_of(0)}, must answer the other ranks {limit}, got nothing "
                f"on rank {self._rank}: it has vanished, or the network to it; the ranks are started again."
            )
        names = " and ".join(f"rank {other} on {self._host_of(other)}" for other in silent)
        return (
            f"all learner ranks must show that they live {limit}, got nothing of {names}: its machine has vanished, or "
            "its process stands still; the ranks are started again."
        )

    def _host_of(self, rank: int) -> str:
        return self._beats[rank].partition(" ")[2] or "a machine that was never heard of"
