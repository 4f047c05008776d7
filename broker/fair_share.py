"""FairShare: divides the groups that may be leased among generators by their measured throughput.

Let T be the least time in which the generators together can finish all groups in flight and all that may be leased now.
A generator that needs longer than T for a single group gets none: a batch would wait for it, or the group would arrive
staler than `max_lag`, since the learner makes as many versions in T as the pacing window is wide. The others share in
proportion to their throughput.
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

_WINDOW_GROUPS = 32
"""Newest completed groups that a generator's throughput is measured over."""
_RETRY_AFTER_GROUPS = 100
"""Own group times after which an excluded generator is leased one group to be measured again. This bounds the cost of
retrying to a hundredth of the time."""
_EPSILON = 1e-6
"""Missing groups below this are rounding errors of floats."""


class Pace(Record):
    """Measured throughput of a generator. Example: Pace(group_s=2.5, groups_per_s=3.2, in_flight=8)."""

    group_s: float
    """Seconds from the lease of a group until its last trajectory is stored; grows while groups stay out longer."""
    groups_per_s: float
    """Completed groups per second at the usual concurrency."""
    in_flight: int
    """Leased groups that are not complete yet."""


# --- the share of one generator --------------------------------------------------------------------------------------
def finish_s(paces: Collection[Pace], *, num_groups: int) -> float:
    """Least seconds in which the generators finish everything in flight and `num_groups` more; inf without generators.

    min over k of max(group_s[k], (num_groups + sum of in_flight[:k + 1]) / sum of groups_per_s[:k + 1]), fastest first:
    each further generator shortens the work, unless its own first group takes longer than that.
    """
    least, groups, groups_per_s = inf, num_groups, 0.0
    for pace in sorted(paces, key=lambda each: each.group_s):
        groups += pace.in_flight
        groups_per_s += pace.groups_per_s
        least = min(least, max(pace.group_s, groups / groups_per_s))
    return least


def share(pace: Pace, paces: Collection[Pace], *, num_groups: int) -> int:
    """Number of groups out of `num_groups` for the generator of this pace, one of `paces`; 0 if it is too slow.

    round(groups_per_s * (num_groups + in_flight of all) / groups_per_s of all) - in_flight, over those fast enough.
    """
    limit_s = finish_s(paces, num_groups=num_groups)
    if pace.group_s > limit_s:
        return 0
    fast_enough = [each for each in paces if each.group_s <= limit_s]
    groups = num_groups + sum(each.in_flight for each in fast_enough)
    missing = pace.groups_per_s * groups / sum(each.groups_per_s for each in fast_enough) - pace.in_flight
    # At least one, however small the fraction: if all shares rounded down to zero, nothing would be leased.
    return max(1, round(missing)) if missing > _EPSILON else 0


# --- measurement -----------------------------------------------------------------------------------------------------
@dataclass
class _LeasedGroup:
    missing: set[str]
    """Trajectory ids that are not stored yet."""
    leased_at: float
    num_concurrent: int
    """Groups in flight when it was leased, itself included."""


class Throughput:
    """Throughput of one generator over its newest completed groups. Times are the caller's, seconds.

    A group that ran among `k` and took `t` seconds counts as `t / k` seconds of the generator's time: bursts and steady
    flows measure alike, and idle time does not count. Medians, because one response of thousands of tokens says little
    about the next.
    """

    def __init__(self) -> None:
        self._leased: dict[str, _LeasedGroup] = {}
        self._group_s: deque[float] = deque(maxlen=_WINDOW_GROUPS)
        self._busy_s: deque[float] = deque(maxlen=_WINDOW_GROUPS)
        self._is_outdated = False

    @property
    def is_measured(self) -> bool:
        """Whether any group was ever completed."""
        return bool(self._group_s)

    @property
    def in_flight(self) -> int:
        return len(self._leased)

    def record_lease(self, groups: Mapping[str, Collection[int]], *, now: float) -> None:
        """Record leased groups: lease id -> indices of the members to generate."""
        num_concurrent = len(self._leased.keys() | groups.keys())
        for lease_id, indices in groups.items():
            missing = {make_trajectory_id(lease_id, index) for index in indices}
            self._leased[lease_id] = _LeasedGroup(missing, leased_at=now, num_concurrent=num_concurrent)

    def record_stored(self, trajectory_id: str, *, now: float) -> None:
        """Record a trajectory that the store took; ignored if it belongs to no lease recorded here."""
        lease_id = lease_of(trajectory_id)
        group = self._leased.get(lease_id)
        if group is None:
            return
        group.missing.discard(trajectory_id)
        if not group.missing:
            del self._leased[lease_id]
            self._record_group(now - group.leased_at, num_concurrent=group.num_concurrent)

    def drop_lost(self, held_lease_ids: Collection[str], *, leased_before: float) -> None:
        """Forget leases from before that time that the generator does not hold: they were returned or have lapsed."""
        lost = [
            lease_id
            for lease_id, group in self._leased.items()
            if group.leased_at < leased_before and lease_id not in held_lease_ids
        ]
        for lease_id in lost:
            del self._leased[lease_id]

    def restart(self) -> None:
        """Discard all measurements as soon as the next group is completed."""
        self._is_outdated = True

    def pace(self, *, now: float, typical: Pace | None = None) -> Pace:
        """Return the pace; before the first completed group it is `typical`, which is required then."""
        ages = sorted(now - group.leased_at for group in self._leased.values())
        # A generator that hangs completes nothing that could be measured: the age of its groups slows it down instead.
        waited_s = median(ages) if ages else 0.0
        if self.is_measured:
            typical = Pace(median(self._group_s), 1 / median(self._busy_s), 0)
        assert typical is not None
        return Pace(max(typical.group_s, waited_s), typical.groups_per_s, self.in_flight)

    def _record_group(self, group_s: float, *, num_concurrent: int) -> None:
        if self._is_outdated:
            self._group_s.clear()
            self._busy_s.clear()
            self._is_outdated = False
        group_s = max(group_s, 1e-6)
        self._group_s.append(group_s)
        self._busy_s.append(group_s / num_concurrent)


# --- all generators --------------------------------------------------------------------------------------------------
@dataclass
class _Generator:
    peer: Peer
    throughput: Throughput = field(default_factory=Throughput)
    excluded_since: float | None = None
    """Time of the first lease it was denied for being slow; None while it gets a share."""


class FairShare:
    """Throughputs of the generators that request prompts, and their shares.

    Kept in memory only: a new broker starts without measurements.

    Limits nothing while there is only one generator, or none has completed a group.
    """

    def __init__(self, *, lost_after_s: float, clock: Clock) -> None:
        """`lost_after_s`: age after which a lease that its holder does not list in its Pongs counts as lost."""
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._generators: dict[str, _Generator] = {}
        self._idle_since: float | None = None

    @property
    def is_limiting(self) -> bool:
        """Whether there are several generators, at least one of them measured."""
        return len(self._generators) > 1 and any(each.throughput.is_measured for each in self._generators.values())

    def add(self, peer: Peer) -> None:
        """Add a generator, or update the connection of a known one."""
        self._generators.setdefault(peer.owner, _Generator(peer)).peer = peer

    def remove(self, peer: Peer) -> None:
        self._generators.pop(peer.owner, None)

    def record_leases(self, peer: Peer, leases: list[Lease]) -> None:
        """Record what a generator was leased; evaluations are not measured."""
        groups = {lease.id: lease.indices for lease in leases if lease.purpose == "train"}
        generator = self._generators.get(peer.owner)
        if groups and generator:
            generator.throughput.record_lease(groups, now=self._clock())
            generator.excluded_since = self._idle_since = None

    def record_stored(self, peer: Peer, trajectory_ids: list[str]) -> None:
        """Record trajectories of a generator that the store took."""
        if generator := self._generators.get(peer.owner):
            for trajectory_id in trajectory_ids:
                generator.throughput.record_stored(trajectory_id, now=self._clock())

    def group_s(self, peer: Peer) -> float:
        """Seconds a group takes this generator; 0 before the first."""
        generator = self._generators.get(peer.owner)
        is_measured = generator is not None and generator.throughput.is_measured
        return generator.throughput.pace(now=self._clock()).group_s if generator and is_measured else 0.0

    def num_rows(self, peer: Peer, *, requested: int) -> int:
        """Number of evaluation rows for a generator that requested so many.

        The fastest gets all it requested, each other one as many as it answers in the same time, so that none of them
        holds up the evaluation.
        """
        rates = {
            owner: generator.throughput.pace(now=self._clock()).groups_per_s
            for owner, generator in self._generators.items()
            if generator.throughput.is_measured
        }
        if peer.owner not in rates:
            return requested
        return max(1, round(requested * rates[peer.owner] / max(rates.values())))

    def num_groups(self, peer: Peer, *, available: int, oldest_version: int) -> int:
        """Number of groups for this generator out of the `available` ones.

        Generators whose version is older than `oldest_version` do not take part.
        """
        self._drop_lost_leases()
        paces = self._paces(oldest_version)
        if len(paces) < 2 or peer.owner not in paces:
            return available
        generator, pace = self._generators[peer.owner], paces[peer.owner]
        groups = min(available, share(pace, paces.values(), num_groups=available))
        if not groups and self._is_retry_due(generator, pace):
            generator.throughput.restart()
            return 1
        return groups or self._num_unclaimed(pace)

    def _is_retry_due(self, generator: _Generator, pace: Pace) -> bool:
        now = self._clock()
        generator.excluded_since = now if generator.excluded_since is None else generator.excluded_since
        return now - generator.excluded_since >= _RETRY_AFTER_GROUPS * pace.group_s

    def _num_unclaimed(self, pace: Pace) -> int:
        # The faster generators have leased nothing for as long as a group takes here: whatever keeps them, waiting for
        # them has stopped being faster.
        now = self._clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        return int(now - self._idle_since >= pace.group_s)

    def _paces(self, oldest_version: int) -> dict[str, Pace]:
        """Paces of the generators that may be leased prompts; empty while none of them is measured."""
        now = self._clock()
        eligible = {owner: each for owner, each in self._generators.items() if _is_eligible(each.peer, oldest_version)}
        measured = [each.throughput.pace(now=now) for each in eligible.values() if each.throughput.is_measured]
        if not measured:
            return {}
        # A new generator counts as an average one until its first group is complete.
        typical = Pace(mean(p.group_s for p in measured), mean(p.groups_per_s for p in measured), 0)
        return {owner: each.throughput.pace(now=now, typical=typical) for owner, each in eligible.items()}

    def _drop_lost_leases(self) -> None:
        # Young leases are kept unconditionally: a Pong that left before the lease arrived cannot list it.
        before = self._clock() - self._lost_after_s
        for generator in self._generators.values():
            generator.throughput.drop_lost(generator.peer.lease_ids, leased_before=before)


def _is_eligible(peer: Peer, oldest_version: int) -> bool:
    # A version below 0: the peer has just joined and has not reported one.
    is_behind = 0 <= peer.version < oldest_version
    return peer.state in ("starting", "ready", "updating") and not peer.is_disconnected and not is_behind
