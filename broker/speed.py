"""Speed: how fast one generator is, measured from what it was leased and what of it has been accepted."""

from collections import deque
from collections.abc import Collection, Mapping
from statistics import median

from buffer.trajectory import Record, lease_of, make_trajectory_id

_GROUPS_REMEMBERED = 32


class Pace(Record):
    """How fast a generator is. Example: Pace(group_s=2.5, groups_per_s=3.2, in_flight=8)."""

    group_s: float
    """From the lease of a group until its last member was accepted, seconds; grows while groups stay out for longer."""
    groups_per_s: float
    """Groups that come back, while it holds as many as it did."""
    in_flight: int
    """Groups it holds now."""


class _Held:
    """A group that is out: since when, how many it was out with, and which members are missing."""

    def __init__(self, trajectory_ids: Collection[str], *, leased_at: float, num_together: int) -> None:
        self.missing = set(trajectory_ids)
        self.leased_at = leased_at
        self.num_together = num_together


class Speed:
    """Of one generator, over the newest few dozen groups that came back whole. Times are the caller's, seconds.

    A group that was one of `k` and took `t` seconds counts as `t / k` seconds of the generator's time: so a burst and a
    steady flow measure alike, and idle time does not count. Medians, because one response of thousands of tokens says
    little about the next.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._group_s: deque[float] = deque(maxlen=_GROUPS_REMEMBERED)
        self._shares_s: deque[float] = deque(maxlen=_GROUPS_REMEMBERED)
        self._is_to_be_replaced = False

    @property
    def is_measured(self) -> bool:
        """Whether a group has ever come back whole."""
        return bool(self._group_s)

    @property
    def in_flight(self) -> int:
        """Groups it holds."""
        return len(self._held)

    def lease(self, groups: Mapping[str, Collection[int]], *, now: float) -> None:
        """It was handed these: lease id -> indices of the members to be made."""
        num_together = len(self._held.keys() | groups.keys())
        for lease_id, indices in groups.items():
            members = [make_trajectory_id(lease_id, index) for index in indices]
            self._held[lease_id] = _Held(members, leased_at=now, num_together=num_together)

    def accept(self, trajectory_id: str, *, now: float) -> None:
        """It arrived and is in the store; one that answers no lease held here is passed over."""
        lease_id = lease_of(trajectory_id)
        held = self._held.get(lease_id)
        if held is None:
            return
        held.missing.discard(trajectory_id)
        if not held.missing:
            del self._held[lease_id]
            self._note(now - held.leased_at, num_together=held.num_together)

    def keep(self, lease_ids: Collection[str], *, leased_before: float) -> None:
        """Of what was leased before that moment it holds these alone: the rest was returned, or has lapsed."""
        gone = [name for name, held in self._held.items() if held.leased_at < leased_before and name not in lease_ids]
        for lease_id in gone:
            del self._held[lease_id]

    def replace(self) -> None:
        """The next group that comes back replaces everything measured before."""
        self._is_to_be_replaced = True

    def pace(self, *, now: float, typical: Pace | None = None) -> Pace:
        """How fast it is. One that is not measured yet counts as `typical`, which must be given then."""
        ages = sorted(now - held.leased_at for held in self._held.values())
        # A generator that hangs gets slower with every second, though nothing comes back that could be measured.
        waited_s = median(ages) if ages else 0.0
        if self.is_measured:
            typical = Pace(median(self._group_s), 1 / median(self._shares_s), 0)
        assert typical is not None
        return Pace(max(typical.group_s, waited_s), typical.groups_per_s, self.in_flight)

    def _note(self, group_s: float, *, num_together: int) -> None:
        if self._is_to_be_replaced:
            self._group_s.clear()
            self._shares_s.clear()
            self._is_to_be_replaced = False
        self._group_s.append(max(group_s, 1e-6))
        self._shares_s.append(max(group_s, 1e-6) / num_together)
