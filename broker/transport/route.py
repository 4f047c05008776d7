"""Route: the brokers that a peer may join, in an order of its own, and the one that it is at."""

from collections.abc import Callable, Iterable, Mapping

import xxhash

_MAX_PROBES = 4
"""Brokers whose reachability is tried at a time, for the peer answers no ping meanwhile: each address at which nobody
answers takes a second."""


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
        self._given = dict(brokers)
        """Addresses such as those of tunnels. Their names are assumed: only a Welcome tells whose one is."""
        self._own: dict[str, str] = {}
        """Broker -> address at which it has welcomed this peer."""
        self._failed: dict[str, str] = {}
        """Address that did not answer, though somebody listens there -> broker that it was taken for, until that dies.
        """
        self._brokers = {name: [address] for name, address in brokers.items()}
        self._is_reachable = is_reachable
        self._at = preferred(peer_id, brokers)[0]
        self.address = brokers[self._at]
        """Address of the broker that the peer is at, or tries."""

    @property
    def has_others(self) -> bool:
        return len(self._brokers) > 1

    def next(self) -> str:
        """Go on to the next broker that can be reached, after the last to the first; returns its address."""
        self._failed[self.address] = self._at
        order = preferred(self._peer_id, self._brokers)
        following = order.index(self._at) + 1
        others = [*order[following:], *order[:following]]
        if not self._go_to_first(others[:_MAX_PROBES]):
            # From the beginning: one may be back.
            self._failed = {self.address: self._at}
            if not self._go_to_first(others[:_MAX_PROBES]):
                self._at, self.address = others[0], self._brokers[others[0]][0]
        return self.address

    def follow(self, living: Mapping[str, str], *, at: str) -> bool:
        """Take the living brokers from the one that the peer is `at`; returns whether to go on to another.

        A broker that cannot be reached from here, as one at the other end of a tunnel, is left to others.
        """
        # It has this name and no other, whatever was assumed.
        self._own = {name: address for name, address in self._own.items() if address != self.address}
        self._own[at], self._at = self.address, at
        self._brokers = {name: found for name in (at, *living) if (found := self._addresses_of(name, living))}
        failed = self._failed.items()
        self._failed = {address: name for address, name in failed if name in living and address != self.address}
        order = preferred(self._peer_id, self._brokers)
        return self._go_to_first(order[: min(order.index(at), _MAX_PROBES)])

    def _addresses_of(self, broker: str, living: Mapping[str, str]) -> list[str]:
        """Return where a broker may be reached: where it says, where it was, then wherever no other one is."""
        others = {address for each in (living, self._own) for name, address in each.items() if name != broker}
        known = (self._own.get(broker), self._given.get(broker), *self._given.values())
        found = (living.get(broker), *(address for address in known if address not in others))
        return [address for address in dict.fromkeys(found) if address]

    def _go_to_first(self, names: Iterable[str]) -> bool:
        """Take the first of these brokers that can be reached, at any of its addresses; False without one."""
        for name in names:
            for address in self._brokers[name]:
                if address not in self._failed and self._is_reachable(address):
                    self._at, self.address = name, address
                    return True
        return False
