"""Brokers: the living brokers of a run as its store knows them, and the chief among them; rules that both stores share.

The chief does what must be done once, however many brokers there are. Its lease makes it so: a chief is replaced when
the lease has lapsed, or by another process of its own name. Its fence proves it: every operation of a chief names the
fence it was given, and the store refuses the fence of any other, and of one whose lease has lapsed.
"""

from typing import Any

from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.trajectory import Record

NO_FENCE = 0
"""Fence of a broker that is not the chief. It is enough as long as a run has never had one: in a single process."""


class Brokers(Record):
    """Answer to a broker that reports.

    Example: Brokers(chief="broker", fence=NO_FENCE, living={"broker": {"peers": 500}, "broker-1": {"peers": 501}})
    """

    chief: str
    fence: int
    """Fence of the broker that reported, if it is the chief, else NO_FENCE."""
    living: dict[str, dict[str, Any]]
    """Name of each living broker -> facts that it reported last."""


def stale_chief(fence: int) -> StaleFenceError:
    """Error of an operation that the chief alone may do."""
    return StaleFenceError(
        f"a broker must be the chief of its run to do this, but its lease with fence {fence} has lapsed or another "
        "holds it: leave it to that one."
    )
