"""MemberTable: the live generators, the version each holds, and the backoff of generators that failed."""

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
import structlog

from slipstream.broker.messages import DeviceName, Member, Members, MemberState
from slipstream.broker.transport.endpoints import is_here
from slipstream.runtime.clock import Clock

_FIRST_BACKOFF_S = 2.0
"""Doubled by each further eviction."""
_MAX_BACKOFF_S = 60.0
_UNREACHABLE = ("starting", "draining", "silent")

log = structlog.get_logger(__name__)


class MemberTable:
    """Used by one thread."""

    def __init__(self, *, on_evict: Callable[[str, str], object], clock: Clock, trusts_network: bool = False) -> None:
        """`on_evict` receives each evicted or reported member's id and the reason.

        `trusts_network`: whether members on other machines may join broadcasts.
        """
        self._on_evict = on_evict
        self._clock = clock
        self._trusts_network = trusts_network
        self._diverted: set[Member] = set()
        self.live: dict[Member, MemberState] = {}
        """Members that can receive messages."""
        self.num_on: Counter[str] = Counter()
        """Live members per machine."""
        self.num_elsewhere = 0
        """Live members on other machines."""
        self._held: dict[Member, int] = {}
        self._devices: dict[Member, DeviceName] = {}
        self._retry_at: dict[Member, float] = {}
        self._num_evictions: dict[Member, int] = {}

    def update(self, members: Members) -> None:
        # Keep held versions and backoffs: a member that reappears is the same process, because a restarted generator
        # has a new incarnation.
        self.live = {g.member: self._reached_safely(g) for g in members.generators if g.state not in _UNREACHABLE}
        self.num_on = Counter(state.machine for state in self.live.values())
        self.num_elsewhere = sum(number for machine, number in self.num_on.items() if not is_here(machine))

    def eligible(self) -> list[Member]:
        now = self._clock()
        return [member for member in self.live if self._retry_at.get(member, 0.0) <= now]

    def holds(self, member: Member, version: int) -> bool:
        return self._held.get(member) == version

    def holds_any(self, member: Member) -> bool:
        """Whether the member has applied a version since its last eviction."""
        return member in self._held

    def num_holding(self, version: int) -> int:
        return sum(self.holds(member, version) for member in self.live)

    def device(self, member: Member) -> DeviceName:
        """Device for broadcasts that the member last reported; `cpu` before."""
        return self._devices.get(member, "cpu")

    def record_applied(self, member: Member, version: int, *, device: DeviceName) -> None:
        """Also resets the member's backoff."""
        self._held[member] = version
        self._devices[member] = device
        self._num_evictions.pop(member, None)
        self._retry_at.pop(member, None)

    def _reached_safely(self, state: MemberState) -> MemberState:
        """Switch a member to deltas over CURVE if broadcasts to it would cross an untrusted network."""
        if state.transport != "collective" or self._trusts_network or is_here(state.machine):
            return state
        if state.member not in self._diverted:
            self._diverted.add(state.member)
            log.info("weights_not_broadcast", member=state.member.peer_id, machine=state.machine, instead="delta")
            self.report(
                state.member,
                "fetches weights as deltas: broadcasts are not encrypted, and cluster.trusted_network is not true",
            )
        return msgspec.structs.replace(state, transport="delta")

    def report(self, member: Member, text: str) -> None:
        self._on_evict(member.peer_id, text)

    def evict(self, members: Iterable[Member], reason: str) -> None:
        """Exclude members until their backoff ends."""
        evicted = list(members)
        for member in evicted:
            self._num_evictions[member] = times = self._num_evictions.get(member, 0) + 1
            self._retry_at[member] = self._clock() + min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (times - 1))
            # Forces it to fetch a verified version before it joins a broadcast again.
            self._held.pop(member, None)
            self._on_evict(member.peer_id, f"evicted: {reason}")
        log.warning("members_evicted", members=[member.peer_id for member in evicted], reason=reason)
