"""Route: the brokers that a peer may join, in an order of its own, and the one that it is at."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

import xxhash

_MAX_PROBES = 4
"""Brokers whose reachability is tried at a time: one that does not answer takes a second."""


def preferred(peer_id: str, brokers: Iterable[str]) -> list[str]:
    """Return the brokers in the order in which this peer joins them: by the hash of both names, the greatest first.

    Every peer has an order of its own, so that brokers have about equally many. Without one of them, its peers are
    divided among the others, and nobody else moves.

    Source: rendezvous hashing (highest random weight), Thaler and Ravishankar, IEEE/ACM Trans. Networking 6(1), 1998.
    """
    return sorted(brokers, key=lambda name: xxhash.xxh3_64_intdigest(f"{name}\0{peer_id}".encode()), reverse=True)


class Route:
    """Belongs to the thread of the peer's client. Life: (next | follow)*."""

    def __init__(self, peer_id: str, brokers: Mapping[str, str], *, is_reachable: Callable[[str], bool]) -> None:
        """`brokers`: name -> address, as far as this peer knows; `is_reachable` tells whether anybody listens there."""
        self._peer_id = peer_id
        self._brokers = dict(brokers)
        self._is_reachable = is_reachable
        self._at = preferred(peer_id, brokers)[0]

    @property
    def address(self) -> str:
        """Address of the broker that the peer is at, or tries."""
        return self._brokers[self._at]

    @property
    def has_others(self) -> bool:
        return len(self._brokers) > 1

    def next(self) -> str:
        """Go on to the next broker, after the last to the first; returns its address."""
        order = preferred(self._peer_id, self._brokers)
        self._at = order[(order.index(self._at) + 1) % len(order)]
        return self.address

    def follow(self, living: Mapping[str, str], *, at: str) -> bool:
        """Take the living brokers from the one that the peer is `at`; returns whether to go on to another.

        A broker that cannot be reached from here, as one at the other end of a tunnel, is left to others.
        """
        own = self.address
        self._brokers = {name: address for name, address in living.items() if address or name == at}
        # Where it is reached from here, which may be a relay or a tunnel.
        self._brokers[at], self._at = own, at
        # Bounded: the peer answers no ping meanwhile.
        for name in islice(preferred(self._peer_id, self._brokers), _MAX_PROBES):
            if name == at:
                return False
            if self._is_reachable(self._brokers[name]):
                self._at = name
                return True
        return False
