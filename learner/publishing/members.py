"""MemberTable: the living generators, the version each holds, and the backoff of those that failed."""

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
import structlog

from slipstream.broker.messages import DeviceName, Member, Members, MemberState
from slipstream.broker.transport.endpoints import is_here
from slipstream.runtime.clock import Clock

_FIRST_BACKOFF_S = 2.0
"""Backoff after the first eviction of a member; doubles with each further one."""
_MAX_BACKOFF_S = 60.0
_UNREACHABLE = ("starting", "draining", "silent")

log = structlog.get_logger(__name__)


class MemberTable:
    """State of the members of a run. Belongs to one thread."""

    def __init__(self, *, on_evict: Callable[[str, str], object], clock: Clock, trusts_network: bool = False) -> None:
        """`on_evict` gets the id of each evicted or reported member and the reason.

        `trusts_network`: members on other machines may take part in broadcasts.
        """
        self._on_evict = on_evict
        self._clock = clock
        self._trusts_network = trusts_network
        self._diverted: set[Member] = set()
        self.living: dict[Member, MemberState] = {}
        """Members that can receive messages, as the broker last reported them."""
        self.num_on: Counter[str] = Counter()
        """Living members by machine."""
        self.num_elsewhere = 0
        """Living members on other machines than this one."""
        self._held: dict[Member, int] = {}
        self._devices: dict[Member, DeviceName] = {}
        self._retry_at: dict[Member, float] = {}
        self._num_evictions: dict[Member, int] = {}

    def update(self, members: Members) -> None:
        """Replace the living members by those that the broker reports."""
        # Held versions and backoffs stay: a member that was silent for a while is the same one when it returns, for a
        # restarted generator has another incarnation.
        self.living = {g.member: self._reached_safely(g) for g in members.generators if g.state not in _UNREACHABLE}
        self.num_on = Counter(state.machine for state in self.living.values())
        self.num_elsewhere = sum(number for machine, number in self.num_on.items() if not is_here(machine))

    def eligible(self) -> list[Member]:
        """Living members whose backoff is over."""
        now = self._clock()
        return [member for member in self.living if self._retry_at.get(member, 0.0) <= now]

    def holds(self, member: Member, version: int) -> bool:
        return self._held.get(member) == version

    def holds_any(self, member: Member) -> bool:
        """Whether the member has applied a version and was not evicted since."""
        return member in self._held

    def num_holding(self, version: int) -> int:
        """Living members that hold the version."""
        return sum(self.holds(member, version) for member in self.living)

    def device(self, member: Member) -> DeviceName:
        """Device on which a member receives broadcasts, as it last told; `cpu` before."""
        return self._devices.get(member, "cpu")

    def record_applied(self, member: Member, version: int, *, device: DeviceName) -> None:
        """The member holds this version on its device; earlier evictions no longer lengthen its backoff."""
        self._held[member] = version
        self._devices[member] = device
        self._num_evictions.pop(member, None)
        self._retry_at.pop(member, None)

    def _reached_safely(self, state: MemberState) -> MemberState:
        """Have a member fetch deltas, over CURVE, whose broadcasts would cross an untrusted network."""
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
        """Record something about a member among the events of the run."""
        self._on_evict(member.peer_id, text)

    def evict(self, members: Iterable[Member], reason: str) -> None:
        """Exclude members until their backoff is over; the version they hold no longer counts as verified."""
        evicted = list(members)
        for member in evicted:
            self._num_evictions[member] = times = self._num_evictions.get(member, 0) + 1
            self._retry_at[member] = self._clock() + min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (times - 1))
            # So it fetches a verified version before it takes part in a broadcast again.
            self._held.pop(member, None)
            self._on_evict(member.peer_id, f"evicted: {reason}")
        log.warning("members_evicted", members=[member.peer_id for member in evicted], reason=reason)
