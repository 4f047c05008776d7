"""MemberTable: the generators there are, what each of them holds, and who must wait before it is tried again."""

from collections.abc import Callable, Iterable

import structlog

from slipstream.broker.messages import Member, Members
from slipstream.broker.weights.records import WeightTransport
from slipstream.runtime.clock import Clock

_FIRST_BAN_S = 2.0
"""After its first eviction a member is tried again this much later, and twice as much after each further one."""
_LONGEST_BAN_S = 60.0
_ABSENT = ("starting", "draining", "silent")

log = structlog.get_logger(__name__)


class MemberTable:
    """Belongs to one thread."""

    def __init__(self, *, tell: Callable[[str, str], object], clock: Clock) -> None:
        """`tell`: given the id of each member that is evicted, and why."""
        self._tell = tell
        self._clock = clock
        self._transports: dict[Member, WeightTransport] = {}
        self._held: dict[Member, int] = {}
        self._banned_until: dict[Member, float] = {}
        self._num_evictions: dict[Member, int] = {}

    @property
    def alive(self) -> list[Member]:
        """Those that may be spoken to, by name."""
        return list(self._transports)

    def take(self, members: Members) -> None:
        """The broker's news."""
        present = {g.member: g.transport for g in members.generators if g.state not in _ABSENT}
        self._transports = present

    def wanted(self) -> list[Member]:
        """Living members that are not to be left alone for a while."""
        now = self._clock()
        return [member for member in self._transports if self._banned_until.get(member, 0.0) <= now]

    def transport(self, member: Member) -> WeightTransport:
        """How a living member wants its weights."""
        return self._transports[member]

    def holds(self, member: Member, version: int) -> bool:
        """Whether it said that it has adopted this version."""
        return self._held.get(member) == version

    def holds_any(self, member: Member) -> bool:
        """Whether it has adopted any version and kept its place since."""
        return member in self._held

    def num_holding(self, version: int) -> int:
        """Living members with this version."""
        return sum(self.holds(member, version) for member in self._transports)

    def note_adopted(self, member: Member, version: int) -> None:
        """It holds this version; what it did wrong before is forgotten."""
        self._held[member] = version
        self._num_evictions.pop(member, None)
        self._banned_until.pop(member, None)

    def evict(self, members: Iterable[Member], reason: str) -> None:
        """Leave them alone for a while, longer each time; what they hold no longer counts."""
        named = list(members)
        for member in named:
            self._num_evictions[member] = times = self._num_evictions.get(member, 0) + 1
            self._banned_until[member] = self._clock() + min(_LONGEST_BAN_S, _FIRST_BAN_S * 2 ** (times - 1))
            self._held.pop(member, None)
            self._tell(member.peer_id, f"evicted: {reason}")
        log.warning("members_evicted", members=[member.peer_id for member in named], reason=reason)
