"""FairShare: divides the leasable groups among generators by their measured throughput.

Let T be the least time in which the generators can finish all groups in flight and leasable. A generator that needs
longer than T for one group gets none, because a batch would wait for it or the group would arrive stale. The others
share in proportion to their throughput.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf, isnan, nan
from statistics import median

import numpy as np

from slipstream.broker.peers import Peer
from slipstream.buffer.records import Lease
from slipstream.buffer.trajectory import lease_of, make_trajectory_id
from slipstream.runtime.clock import Clock

_WINDOW_GROUPS = 32
"""Newest completed groups that determine a generator's throughput."""
_RETRY_AFTER_GROUPS = 100
"""Group times after which an excluded generator is measured with one group: 1 % of the time."""
_DROP_INTERVAL_S = 1.0
"""Interval between searches for lost leases; Pongs, which list the held ones, are no more frequent."""
_EPSILON = 1e-6
"""Bound on the rounding error of missing groups."""


# --- the shares of generators ----------------------------------------------------------------------------------------
def finish_s(group_s: np.ndarray, groups_per_s: np.ndarray, in_flight: np.ndarray, *, num_groups: int) -> float:
    """Least time in which N generators finish everything in flight and `num_groups` more; inf for N = 0.

    min over k of max(group_s[k], (num_groups + sum of in_flight[:k + 1]) / sum of groups_per_s[:k + 1]), fastest first
    """
    # Each additional generator helps unless its first group takes longer.
    order = np.argsort(group_s, kind="stable")
    work_s = (num_groups + np.cumsum(in_flight[order])) / np.cumsum(groups_per_s[order])
    return float(np.minimum.reduce(np.maximum(group_s[order], work_s), initial=inf))


def shares(group_s: np.ndarray, groups_per_s: np.ndarray, in_flight: np.ndarray, *, num_groups: int) -> np.ndarray:
    """Each generator's share of `num_groups`, [N]; 0 if it is too slow or busy enough.

    round(groups_per_s * (num_groups + sum of in_flight) / sum of groups_per_s - in_flight), over the fast generators.
    """
    is_fast = group_s <= finish_s(group_s, groups_per_s, in_flight, num_groups=num_groups)
    groups = num_groups + np.add.reduce(in_flight, where=is_fast)
    missing = groups_per_s * groups / np.add.reduce(groups_per_s, where=is_fast) - in_flight
    # At least one: if all shares rounded to zero, nothing would be leased.
    return np.where(is_fast & (missing > _EPSILON), np.maximum(1, np.rint(missing)), 0).astype(np.int64)


# --- measurement -----------------------------------------------------------------------------------------------------
@dataclass
class _LeasedGroup:
    missing: set[str]
    """Trajectory ids that are not stored yet."""
    leased_at: float
    num_concurrent: int
    """Groups in flight when it was leased, including itself."""


class Throughput:
    """Throughput of one generator over its newest completed groups. Callers pass the times, in seconds.

    A group that took `t` seconds among `k` concurrent ones counts as `t / k` seconds, which excludes idle time and
    measures bursts and steady flows alike. Medians, because response lengths vary widely.
    """

    def __init__(self) -> None:
        self._leased: dict[str, _LeasedGroup] = {}
        self._group_s: deque[float] = deque(maxlen=_WINDOW_GROUPS)
        self._busy_s: deque[float] = deque(maxlen=_WINDOW_GROUPS)
        self._is_outdated = False

    @property
    def in_flight(self) -> int:
        return len(self._leased)

    def record_lease(self, groups: Mapping[str, Collection[int]], *, now: float) -> None:
        """`groups`: lease id -> indices of the members to generate."""
        num_concurrent = len(self._leased.keys() | groups.keys())
        for lease_id, indices in groups.items():
            missing = {make_trajectory_id(lease_id, index) for index in indices}
            self._leased[lease_id] = _LeasedGroup(missing, leased_at=now, num_concurrent=num_concurrent)

    def record_stored(self, trajectory_id: str, *, now: float) -> bool:
        """Record a stored trajectory; returns whether it completes a known group."""
        lease_id = lease_of(trajectory_id)
        group = self._leased.get(lease_id)
        if group is None:
            return False
        group.missing.discard(trajectory_id)
        if group.missing:
            return False
        del self._leased[lease_id]
        if self._is_outdated:
            self._group_s.clear()
            self._busy_s.clear()
            self._is_outdated = False
        group_s = max(now - group.leased_at, 1e-6)
        self._group_s.append(group_s)
        self._busy_s.append(group_s / group.num_concurrent)
        return True

    def drop_lost(self, held_lease_ids: Collection[str], *, leased_before: float) -> bool:
        """Forget leases from before `leased_before` that the generator no longer holds; returns whether any were."""
        old = {lease_id for lease_id, group in self._leased.items() if group.leased_at < leased_before}
        lost = old.difference(held_lease_ids)
        for lease_id in lost:
            del self._leased[lease_id]
        return bool(lost)

    def restart(self) -> None:
        """Discard all measurements once the next group is complete."""
        self._is_outdated = True

    @property
    def measured(self) -> tuple[float, float]:
        """Seconds from lease to last trajectory, and groups per second at typical concurrency; NaN without groups."""
        return (median(self._group_s), 1 / median(self._busy_s)) if self._group_s else (nan, nan)

    @property
    def leased_at(self) -> float:
        """Median lease time of the groups in flight; inf without any."""
        # Reduces the share of a hanging generator, which completes none.
        return median(group.leased_at for group in self._leased.values()) if self._leased else inf


# --- all generators --------------------------------------------------------------------------------------------------
@dataclass
class _Generator:
    peer: Peer
    row: int
    """Index into the vectors over generators."""
    throughput: Throughput = field(default_factory=Throughput)
    excluded_since: float | None = None
    """Time at which its share became 0; None after a lease."""


class FairShare:
    """Throughputs and shares of the generators that request prompts.

    Measurements are vectors, so that N simultaneous requests take O(N).

    Life: (start_round -> (group_s | num_rows | num_groups | record_leases)*)*; other methods at any time.
    """

    def __init__(self, *, lost_after_s: float, clock: Clock) -> None:
        """`lost_after_s`: age after which a lease missing from its holder's Pongs counts as lost."""
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._generators: dict[str, _Generator] = {}
        self._idle_since: float | None = None
        self._measured: set[str] = set()
        self._changed: set[str] = set()
        self._next_drop_at = -inf
        self._measurements = np.empty((0, 4))
        """Columns: measured group_s and groups_per_s (NaN before the first group), in_flight, leased_at."""
        self._group_s = np.empty(0)
        """group_s in this round; NaN without a measurement."""
        self._now = 0.0
        self._is_eligible, self._version = np.empty(0, dtype=np.bool_), np.empty(0)
        self._divided: tuple[int, int, np.ndarray, np.ndarray] | None = None
        """Available groups, oldest version, each generator's share (-1: excluded) and group_s."""

    @property
    def is_limiting(self) -> bool:
        """Whether several generators are known and one is measured, so that shares are limited."""
        return len(self._generators) > 1 and bool(self._measured)

    def add(self, peer: Peer) -> None:
        if peer.owner not in self._generators:
            self._generators[peer.owner] = _Generator(peer, row=len(self._generators))
            self._measurements = np.append(self._measurements, [[nan, nan, 0.0, inf]], axis=0)
        self._generators[peer.owner].peer = peer

    def remove(self, peer: Peer) -> None:
        if generator := self._generators.pop(peer.owner, None):
            self._measured.discard(peer.owner)
            self._measurements = np.delete(self._measurements, generator.row, axis=0)
            for row, each in enumerate(self._generators.values()):
                each.row = row

    def record_leases(self, peer: Peer, leases: list[Lease]) -> None:
        groups = {lease.id: lease.indices for lease in leases if lease.purpose == "train"}
        generator = self._generators.get(peer.owner)
        if groups and generator:
            generator.throughput.record_lease(groups, now=self._clock())
            generator.excluded_since = self._idle_since = None
            self._changed.add(peer.owner)

    def record_stored(self, peer: Peer, trajectory_ids: list[str]) -> None:
        if generator := self._generators.get(peer.owner):
            completed = [generator.throughput.record_stored(each, now=self._clock()) for each in trajectory_ids]
            if any(completed):
                self._measured.add(peer.owner)
                self._changed.add(peer.owner)

    def start_round(self) -> None:
        """Freeze the state of all generators for the following calls."""
        self._now = self._clock()
        if self._now >= self._next_drop_at:
            self._next_drop_at = self._now + _DROP_INTERVAL_S
            # Keep young leases, which older Pongs cannot list.
            before = self._now - self._lost_after_s
            for owner, generator in self._generators.items():
                if generator.throughput.drop_lost(generator.peer.status.lease_ids, leased_before=before):
                    self._changed.add(owner)
        peers = [each.peer for each in self._generators.values()]
        may_lease = [p.status.state in ("starting", "ready", "updating") and not p.is_disconnected for p in peers]
        self._is_eligible = np.array(may_lease, dtype=np.bool_)
        self._version = np.array([peer.status.version for peer in peers])
        self._measure()

    def group_s(self, peer: Peer) -> float:
        """Seconds this generator takes for a group; 0 before the first."""
        generator = self._generators.get(peer.owner)
        group_s = float(self._group_s[generator.row]) if generator and generator.row < len(self._group_s) else nan
        return 0.0 if isnan(group_s) else group_s

    def num_rows(self, peer: Peer, *, requested: int) -> int:
        """Number of evaluation rows that a generator answers while the fastest one answers all that it requested."""
        rates = self._measurements[:, 1]
        rate = rates[self._generators[peer.owner].row]
        return requested if isnan(rate) else max(1, round(requested * float(rate / np.fmax.reduce(rates))))

    def num_groups(self, peer: Peer, *, available: int, oldest_version: int) -> int:
        """This generator's share of the available groups; no limit if it is excluded, as below `oldest_version`."""
        if self._changed:
            self._measure()
        if self._divided is None or self._divided[:2] != (available, oldest_version):
            self._divided = (available, oldest_version, *self._divide(available, oldest_version))
        generator = self._generators[peer.owner]
        share, group_s = (float(vector[generator.row]) for vector in self._divided[2:])
        if share < 0:
            return available
        if groups := min(available, int(share)):
            return groups
        generator.excluded_since = self._now if generator.excluded_since is None else generator.excluded_since
        if self._now - generator.excluded_since >= _RETRY_AFTER_GROUPS * group_s:
            generator.throughput.restart()
            return 1
        # The faster ones have leased nothing for as long as a group takes here: waiting for them saves nothing.
        self._idle_since = self._now if self._idle_since is None else self._idle_since
        return int(self._now - self._idle_since >= group_s)

    def _measure(self) -> None:
        for generator in filter(None, map(self._generators.get, self._changed)):
            throughput = generator.throughput
            self._measurements[generator.row] = (*throughput.measured, throughput.in_flight, throughput.leased_at)
        self._changed.clear()
        self._divided = None
        # Grows while the groups in flight take longer than earlier ones.
        measured_s, _, _, leased_at = self._measurements.T
        self._group_s = np.maximum(measured_s, self._now - leased_at)

    def _divide(self, available: int, oldest_version: int) -> tuple[np.ndarray, np.ndarray]:
        _, groups_per_s, in_flight, leased_at = self._measurements.T
        # A version below 0: the peer has just joined and not reported one.
        takes_part = self._is_eligible & ((self._version < 0) | (self._version >= oldest_version))
        is_measured = takes_part & ~np.isnan(groups_per_s)
        result = np.full(len(self._measurements), -1)
        if np.count_nonzero(takes_part) < 2 or not is_measured.any():
            return result, self._group_s
        # A new generator counts as average.
        typical_s, typical_rate = self._group_s[is_measured].mean(), groups_per_s[is_measured].mean()
        group_s = np.where(np.isnan(self._group_s), np.maximum(typical_s, self._now - leased_at), self._group_s)
        rates = np.where(np.isnan(groups_per_s), typical_rate, groups_per_s)
        part = (group_s[takes_part], rates[takes_part], in_flight[takes_part])
        result[takes_part] = shares(*part, num_groups=available)
        return result, group_s
