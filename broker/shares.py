"""Shares: how many of the groups that may be leased now each generator gets, so that none holds up the others.

All that is out and all that may be leased now is back after `finish_s`, the least time in which the generators can do
it together. Whoever needs longer than that for a single group is left out: a batch would wait for it, or the group
would come back older than `max_lag` allows, because as many versions as the window of pacing is wide pass in that time.
The others share by the speed measured.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from statistics import mean

from broker.clock import Clock
from broker.peers import Peer
from broker.speed import Pace, Speed
from buffer.records import Lease

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
    speed: Speed = field(default_factory=Speed)
    left_out_at: float | None = None
    """Since when it has been left out for being slow."""


class Shares:
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
