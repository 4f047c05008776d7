"""Drains: which generators the broker was asked to tell to hand back what they hold and to leave."""

from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.broker.peers import Peer

DRAIN = "drain/"
"""How the subject of a request begins; the generator's id follows. Its value: until when it counts (store clock)."""


class Drains:
    """Whom the broker was asked to drain, until they have gone: one may come only later, and a word may get lost."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}

    def take(self, requests: dict[str, str], *, now: float) -> None:
        """Requests as they were left in the store; what nobody waits for any more is forgotten."""
        for subject, ends_at in requests.items():
            if subject.startswith(DRAIN):
                self._asked[subject.removeprefix(DRAIN)] = _Asked(float(ends_at))
        self._asked = {name: asked for name, asked in self._asked.items() if now < asked.ends_at}

    @property
    def are_none(self) -> bool:
        """Whether nobody is to be told."""
        return not self._asked

    def due(self, generators: Iterable[Peer]) -> list[Peer]:
        """Those that are to be told now, once more if need be; never another one that came under the same name."""
        return [peer for peer in generators if peer.state != "draining" and self._means(peer)]

    def note_told(self, peer: Peer) -> bool:
        """It was told. Returns whether for the first time."""
        asked = self._asked[peer.hello.peer_id]
        is_first, asked.owner = not asked.owner, peer.owner
        return is_first

    def _means(self, peer: Peer) -> bool:
        asked = self._asked.get(peer.hello.peer_id)
        return asked is not None and asked.owner in ("", peer.owner)


@dataclass
class _Asked:
    ends_at: float
    """Store's clock."""
    owner: str = ""
    """Incarnation that was told; empty before that."""
