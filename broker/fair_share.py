"""FairShare: how many of the groups that may be leased now each generator gets, so that none holds up the others.

All that is out and all that may be leased now is back after `finish_s`, the least time in which the generators can do
it together. Whoever needs longer than that for a single group is left out: a batch would wait for it, or the group
would come back older than `max_lag` allows, because as many versions as the window of pacing is wide pass in that time.
The others share by the speed measured.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import mean, median

from slipstream.broker.peers import Peer
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import Record, lease_of, make_trajectory_id
from slipstream.runtime.clock import Clock

# @@ Throughput: how fast one generator is, measured from what it was leased and what of it has been accepted.
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


class Throughput:
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


_TRY_AGAIN_AFTER = 100
"""Of its own group times, after which a generator that was left out gets a group, to be measured anew: this bounds what
trying costs to a hundredth of the time."""

_NOTHING = 1e-6
"""A share this much short, in groups, is whole: what is missing are the last bits of a float."""


def finish_s(paces: Collection[Pace], *, num_groups: int) -> float:
    """Seconds until everything in flight and `num_groups` more are done, by those quick enough to take part.

    min over k of max(group_s[k], (num_groups + sum of in_flight[:k + 1]) / sum of groups_per_s[:k + 1]), the quickest
    generators first: with one more taking part the work is done sooner, unless its first group takes longer than that.
    """
    least, groups, groups_per_s = inf, num_groups, 0.0
    for pace in sorted(paces, key=lambda each: each.group_s):
        groups += pace.in_flight
        groups_per_s += pace.groups_per_s
        least = min(least, max(pace.group_s, groups / groups_per_s))
    return least


def share(pace: Pace, paces: Collection[Pace], *, num_groups: int) -> int:
    """Groups of `num_groups` that the generator of this pace, one of `paces`, gets now; none when it is too slow.

    groups_per_s * (num_groups + in_flight of all) / groups_per_s of all - in_flight, rounded, over those quick enough;
    whoever has less than its share gets at least one.
    """
    within_s = finish_s(paces, num_groups=num_groups)
    quick = [each for each in paces if each.group_s <= within_s]
    if pace.group_s > within_s:
        return 0
    groups = num_groups + sum(each.in_flight for each in quick)
    missing = pace.groups_per_s * groups / sum(each.groups_per_s for each in quick) - pace.in_flight
    return max(1, round(missing)) if missing > _NOTHING else 0


@dataclass
class _Generator:
    peer: Peer
    speed: Throughput = field(default_factory=Throughput)
    left_out_at: float | None = None
    """Since when it has been left out for being slow."""


class FairShare:
    """Who asks for prompts, how fast each is, and what each may have. Forgets everything with its process.

    Nothing is limited while there is one generator alone, or none was measured.
    """

    def __init__(self, *, lost_after_s: float, clock: Clock) -> None:
        """`lost_after_s`: a lease this old that its holder does not name in its Pongs is not held any more."""
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._generators: dict[str, _Generator] = {}
        self._left_over_since: float | None = None

    @property
    def are_limited(self) -> bool:
        """Whether there are several, and some of them are measured."""
        return len(self._generators) > 1 and any(entry.speed.is_measured for entry in self._generators.values())

    def enter(self, peer: Peer) -> None:
        """It asks for prompts, perhaps over a new connection."""
        entry = self._generators.setdefault(peer.owner, _Generator(peer))
        entry.peer = peer

    def leave(self, peer: Peer) -> None:
        """It is gone."""
        self._generators.pop(peer.owner, None)

    def lease(self, peer: Peer, leases: list[Lease]) -> None:
        """It was handed these."""
        groups = {lease.id: lease.indices for lease in leases if lease.purpose == "train"}
        entry = self._generators.get(peer.owner)
        if groups and entry:
            entry.speed.lease(groups, now=self._clock())
            entry.left_out_at = self._left_over_since = None

    def accept(self, peer: Peer, trajectory_ids: list[str]) -> None:
        """The store has these of its trajectories."""
        if entry := self._generators.get(peer.owner):
            for trajectory_id in trajectory_ids:
                entry.speed.accept(trajectory_id, now=self._clock())

    def group_s(self, peer: Peer) -> float:
        """What a group takes this generator; 0 while it is not known."""
        entry = self._generators.get(peer.owner)
        return entry.speed.pace(now=self._clock()).group_s if entry and entry.speed.is_measured else 0.0

    def rows(self, peer: Peer, *, wanted: int) -> int:
        """How many rows of an evaluation it may have of those it wants: the quickest has what it wants, the others as
        many as they answer in the same time, so that none holds the evaluation up."""
        speeds = {
            o: entry.speed.pace(now=self._clock()).groups_per_s
            for o, entry in self._generators.items()
            if entry.speed.is_measured
        }
        if peer.owner not in speeds:
            return wanted
        return max(1, round(wanted * speeds[peer.owner] / max(speeds.values())))

    def of(self, peer: Peer, *, num_groups: int, oldest_version: int) -> int:
        """How many of the `num_groups` that may be leased now this generator may have.

        Those that hold a version older than `oldest_version` do not take part.
        """
        self._forget_lost_leases()
        paces = self._paces(oldest_version)
        if len(paces) < 2 or peer.owner not in paces:
            return num_groups
        entry, pace = self._generators[peer.owner], paces[peer.owner]
        fair = min(num_groups, share(pace, paces.values(), num_groups=num_groups))
        if not fair and self._is_due(entry, pace):
            entry.speed.replace()
            return 1
        return fair or self._left_over(pace)

    def _is_due(self, entry: _Generator, pace: Pace) -> bool:
        """Whether one that is left out is to be measured again."""
        entry.left_out_at = self._clock() if entry.left_out_at is None else entry.left_out_at
        return self._clock() - entry.left_out_at >= _TRY_AGAIN_AFTER * pace.group_s

    def _left_over(self, pace: Pace) -> int:
        """One, when nobody has taken anything for as long as this generator needs for it: whoever should does not."""
        now = self._clock()
        self._left_over_since = now if self._left_over_since is None else self._left_over_since
        return int(now - self._left_over_since >= pace.group_s)

    def _paces(self, oldest_version: int) -> dict[str, Pace]:
        """Of those that may be leased to; none while none is measured."""
        now = self._clock()
        here = {o: entry for o, entry in self._generators.items() if _takes_part(entry.peer, oldest_version)}
        measured = [entry.speed.pace(now=now) for entry in here.values() if entry.speed.is_measured]
        if not measured:
            return {}
        typical = Pace(mean(p.group_s for p in measured), mean(p.groups_per_s for p in measured), 0)
        return {owner: entry.speed.pace(now=now, typical=typical) for owner, entry in here.items()}

    def _forget_lost_leases(self) -> None:
        before = self._clock() - self._lost_after_s
        for entry in self._generators.values():
            entry.speed.keep(entry.peer.lease_ids, leased_before=before)


def _takes_part(peer: Peer, oldest_version: int) -> bool:
    """A peer that has not told its version yet has just come."""
    is_behind = 0 <= peer.version < oldest_version
    return peer.state in ("starting", "ready", "updating") and not peer.is_cut_off and not is_behind
