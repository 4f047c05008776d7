"""FetchTracker: versions that generators fetch for themselves: who has been told to, and who has done so.

A joiner fetches first and takes part in broadcasts only then; a generator behind a slow link always fetches. Nobody is
waited for: an order stands until its member answers, leaves, or has had its time; one order at a time for each member.
"""

import math
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import structlog
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import NO_EPOCH, Member, Update, UpdateApplied
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.weights.records import SnapshotSource
from slipstream.broker.weights.snapshot_store import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.configs.broker import WeightsConfig
from slipstream.learner.publishing.members import MemberTable
from slipstream.learner.publishing.staging import Staged
from slipstream.runtime.clock import Clock

log = structlog.get_logger(__name__)


# @@ SnapshotServer: the learner's end of the weights that generators fetch for themselves.
class SnapshotServer:
    """A shelf, and a server that lends it out. Waits for nobody but the disk."""

    def __init__(self, shelf: SnapshotStore, server: StreamServer) -> None:
        """Closes the server at the end."""
        self._shelf = shelf
        self._server = server

    def lend(
        self, update: Update, buckets: Sequence[Tensor], *, with_delta: bool = False, keeping: Collection[int] = ()
    ) -> SnapshotSource:
        """Put a version on the shelf, unless it is there; `buckets` may then be written over.

        Versions of `keeping` are still being fetched by somebody and stay. Raises WeightTransferError: no room.
        """
        self._shelf.put(update, buckets, with_delta=with_delta, pinned=keeping)
        host, port = self._server.address
        return SnapshotSource(host, port, str(self._shelf.folder.resolve()), has_deltas=with_delta)

    def close(self) -> None:
        """Stop lending and clear the shelf: whoever comes now finds no learner either. May be called again."""
        self._server.close()
        shutil.rmtree(self._shelf.folder, ignore_errors=True)


_CATCH_UP_AFTER_S = 5.0
"""A member that has just fetched gets this long to come along with a broadcast: another version may have been made
while it fetched, and one that is told at once to fetch that as well may be late for ever."""
_REPEAT_AFTER_S = 5.0
"""An order may be lost with a broker; said again it does no harm."""


@dataclass
class _Order:
    update: Update
    ends_at: float
    repeat_at: float


class FetchTracker:
    """Belongs to the publisher's thread."""

    def __init__(
        self, lender: SnapshotServer, *, link: BrokerClient, roster: MemberTable, config: WeightsConfig, clock: Clock
    ) -> None:
        """Closes the lender at the end."""
        self._lender = lender
        self._link = link
        self._roster = roster
        self._config = config
        self._clock = clock
        self._orders: dict[Member, _Order] = {}
        self._fetched_at: dict[Member, float] = {}

    def is_bringing(self, version: int) -> bool:
        """Whether anybody is fetching this version."""
        return any(order.update.version == version for order in self._orders.values())

    def not_fetching(self) -> list[Member]:
        """Members that take part in broadcasts: they want to, and hold a version already."""
        return [
            member
            for member in self._roster.wanted()
            if self._roster.transport(member) == "collective"
            and self._roster.holds_any(member)
            and member not in self._orders
        ]

    def due(self, version: int) -> list[Member]:
        """Members that should be told to fetch this version, once it was broadcast to those that do not fetch."""
        return [
            member
            for member in self._roster.wanted()
            if not self._roster.holds(member, version)
            and member not in self._orders
            and not self._waits_for_broadcast(member)
        ]

    def order(self, staged: Staged) -> None:
        """Tell all that are due to fetch this version; blocks while it is written.

        When there is no room for it, they are evicted with that reason.
        """
        due = self.due(staged.version)
        has_deltas = any(self._roster.transport(member) == "delta" for member in self._roster.alive)
        try:
            for with_deltas in (False, True):
                members = [m for m in due if (self._roster.transport(m) == "delta") is with_deltas]
                if members:
                    self._send(staged, members, put_delta=has_deltas, with_deltas=with_deltas)
        except WeightTransferError as fault:
            self._roster.evict(due, str(fault))

    def poll(self) -> None:
        """Forget the orders of those that left, say the others again, evict who has had its time."""
        now, alive = self._clock(), set(self._roster.alive)
        self._orders = {member: order for member, order in self._orders.items() if member in alive}
        self._fetched_at = {member: at for member, at in self._fetched_at.items() if member in alive}
        for member, order in list(self._orders.items()):
            if now >= order.ends_at:
                del self._orders[member]
                version = order.update.version
                self._roster.evict([member], f"version {version} was not fetched within {self._patience_s:g} s")
            elif now >= order.repeat_at:
                order.repeat_at = now + _REPEAT_AFTER_S
                self._link.send(order.update)

    def take(self, adopted: UpdateApplied) -> bool:
        """A member's answer; returns whether it holds a version now that it was told to fetch."""
        order = self._orders.get(adopted.member)
        if order is None or order.update.version != adopted.version:
            return False
        del self._orders[adopted.member]
        if adopted.error:
            self._roster.evict([adopted.member], f"version {adopted.version} was not adopted: {adopted.error}")
            return False
        self._roster.note_adopted(adopted.member, adopted.version)
        self._fetched_at[adopted.member] = self._clock()
        log.info("version_fetched", version=adopted.version, member=adopted.member.peer_id)
        return True

    def close(self) -> None:
        """Stop lending."""
        self._lender.close()

    @property
    def _patience_s(self) -> float:
        return self._config.fetch_timeout_s + self._config.transfer_timeout_s

    def _waits_for_broadcast(self, member: Member) -> bool:
        if self._roster.transport(member) != "collective" or not self._roster.holds_any(member):
            return False
        return self._clock() < self._fetched_at.get(member, -math.inf) + _CATCH_UP_AFTER_S

    def _send(self, staged: Staged, members: list[Member], *, put_delta: bool, with_deltas: bool) -> None:
        source = self._lender.lend(staged.update, staged.buckets, with_delta=put_delta, keeping=self._being_fetched())
        order = msgspec.structs.replace(
            staged.update,
            epoch=NO_EPOCH,
            timeout_s=self._config.fetch_timeout_s,
            source=msgspec.structs.replace(source, has_deltas=with_deltas),
        )
        now = self._clock()
        for member in members:
            # An order each: said again to one that is late, it must not reach those that have gone on since.
            update = msgspec.structs.replace(order, members=[member])
            self._link.send(update)
            self._orders[member] = _Order(update, now + self._patience_s, now + _REPEAT_AFTER_S)

    def _being_fetched(self) -> Collection[int]:
        return {order.update.version for order in self._orders.values()}
