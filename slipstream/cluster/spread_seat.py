"""SpreadSeat: a role with a part on each of several machines, all of which end when one does."""

import time
from collections.abc import Callable, Mapping, Sequence

from slipstream.cluster.seat import Seat
from slipstream.runtime.clock import Clock
from slipstream.runtime.command_line import BAD_INPUT

MACHINE_VARIABLES = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of each machine of a role: its number from 0 on, and where the parts meet, on number 0."""
_SETTLE_S = 20.0
"""Time for the other parts to end by themselves once one has: each tells its own reason."""


class SpreadSeat:
    """A seat of seats, the first of which is on this machine. Fulfils Seat.

    Invariant: when `poll` has returned a code, no part is left.
    """

    def __init__(
        self, parts: Sequence[Seat], *, meet: Callable[[], Mapping[str, str]], clock: Clock = time.monotonic
    ) -> None:
        """`meet` returns the last two MACHINE_VARIABLES; it is asked at each start."""
        self._parts = list(parts)
        self._meet = meet
        self._clock = clock
        self._code: int | None = None
        self._settled_at: float | None = None

    @property
    def pid(self) -> int | None:
        return self._parts[0].pid

    @property
    def place(self) -> str:
        return ", and ".join(part.place for part in self._parts)

    def start(self, arguments: Sequence[str], *, variables: Mapping[str, str]) -> None:
        self._code = self._settled_at = None
        meeting = self._meet()
        for number, part in enumerate(self._parts):
            part.start(arguments, variables={**variables, **meeting, MACHINE_VARIABLES[0]: str(number)})

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        codes = [part.poll() for part in self._parts]
        ended = [code for code in codes if code is not None]
        if ended and self._settled_at is None:
            self._settled_at = self._clock() + _SETTLE_S
        if len(ended) == len(codes) or (self._settled_at is not None and self._clock() >= self._settled_at):
            self.stop(ends_at=self._clock())
            failed = [code for code in ended if code]
            # A verdict of one part outweighs that the others have lost it.
            self._code = BAD_INPUT if BAD_INPUT in failed else failed[0] if failed else 0
        return self._code

    def terminate(self) -> None:
        for part in self._parts:
            part.terminate()

    def stop(self, *, ends_at: float) -> None:
        for part in self._parts:
            part.stop(ends_at=ends_at)
