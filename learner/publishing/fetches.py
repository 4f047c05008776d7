"""MemberTable: live generators, their versions, and backoffs after failures.

FetchTracker: tracks versions that generators fetch, and owns the server they fetch from.

A generator on the learner's machine reads the learner's memory. Others fetch their first version and then join
broadcasts, or always fetch, from the learner or a generator. A request stays open until its member answers, leaves, or
misses its deadline.

Lenders: plans who fetches a version from whom, so the learner sends it to few generators.

    learner -> the first `fan_out` generators -> `fan_out` each -> ...

The tree follows the order of arrival, separately for full weights and deltas. A machine's first generator fetches for
others there. Generators lend only verified weights, and fetchers can fall back to a second lender, then the learner.
"""

import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil

import msgspec
import structlog
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import (
    NO_EPOCH,
    DeviceName,
    LenderError,
    Member,
    Members,
    MemberState,
    SnapshotSource,
    Update,
    UpdateApplied,
)
from slipstream.broker.transport.endpoints import is_here, is_own_machine
from slipstream.broker.transport.session import Sender
from slipstream.broker.weights.buckets import SLOWEST_BYTES_PER_S
from slipstream.broker.weights.host_weights import digest
from slipstream.broker.weights.snapshots import SnapshotStore
from slipstream.broker.weights.stream import StreamServer
from slipstream.configs.broker import WeightsConfig
from slipstream.learner.publishing.staging import Staged
from slipstream.runtime.clock import Clock

_FAN_OUT = 8
"""Generators on other machines that fetch from the learner itself; each then serves as many others."""
_FIRST_BACKOFF_S = 2.0
"""Doubled by each further eviction."""
_MAX_BACKOFF_S = 60.0
_UNREACHABLE = ("starting", "draining", "silent")
_REST_S = 60.0
"""Rest of a failed lender."""
_CATCH_UP_S = 5.0
"""Longest wait of a member that has just fetched for a broadcast, to catch up."""
_RESEND_AFTER_S = 5.0
"""A request can be lost with a broker. Generators ignore repeats."""

log = structlog.get_logger(__name__)


class MemberTable:
    """Used by one thread."""

    def __init__(self, *, on_evict: Callable[[str, str], object], clock: Clock, trusts_network: bool = False) -> None:
        """`on_evict` gets an evicted or reported member's id and the reason.

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
        # Keep versions and backoffs: a member that reappears is the same process, with the same incarnation.
        live: dict[Member, MemberState] = {}
        for state in members.generators:
            if state.state in _UNREACHABLE:
                continue
            if state.transport == "collective" and not (self._trusts_network or is_here(state.machine)):
                # Broadcasts would cross an untrusted network: deltas go over CURVE.
                if (member := state.member) not in self._diverted:
                    self._diverted.add(member)
                    log.info("weights_not_broadcast", member=member.peer_id, machine=state.machine, instead="delta")
                    reason = "broadcasts are not encrypted, and cluster.trusted_network is not true"
                    self.report(member, f"fetches weights as deltas: {reason}")
                state = msgspec.structs.replace(state, transport="delta")
            live[state.member] = state
        self.live = live
        self.num_on = Counter(state.machine for state in self.live.values())
        self.num_elsewhere = sum(number for machine, number in self.num_on.items() if not is_here(machine))

    def eligible(self) -> list[Member]:
        now = self._clock()
        return [member for member in self.live if self._retry_at.get(member, 0.0) <= now]

    def holds(self, member: Member, version: int) -> bool:
        return self._held.get(member) == version

    def holds_any(self, member: Member) -> bool:
        """Whether the member applied a version since its eviction."""
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

    def report(self, member: Member, text: str) -> None:
        self._on_evict(member.peer_id, text)

    def evict(self, members: Iterable[Member], reason: str) -> None:
        """Exclude members until their backoff ends."""
        evicted = list(members)
        for member in evicted:
            self._num_evictions[member] = times = self._num_evictions.get(member, 0) + 1
            self._retry_at[member] = self._clock() + min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (times - 1))
            # Before it joins a broadcast again, it must fetch a verified version.
            self._held.pop(member, None)
            self._on_evict(member.peer_id, f"evicted: {reason}")
        log.warning("members_evicted", members=[member.peer_id for member in evicted], reason=reason)


@dataclass
class _Node:
    member: Member
    machine: str
    address: str
    depth: int
    """Transfers from the learner to this generator."""
    num_fetching: int = 0
    """Generators that are fetching from this one."""


@dataclass
class _Tree:
    nodes: dict[Member, _Node] = field(default_factory=dict)
    machines: set[str] = field(default_factory=set)
    """Machines where a generator fetches or has fetched the version."""
    num_members: int = 0
    num_from_learner: int = 0


@dataclass(frozen=True)
class Place:
    """A generator's place in the tree. Example: Place(("tcp://10.0.0.7:20411",), is_lent=True)"""

    lenders: tuple[str, ...] = ()
    """Addresses to try, in order, before the learner."""
    is_lent: bool = False
    """Whether other generators may fetch from this one."""


class Lenders:
    """The trees of one version. Used by the publisher's thread."""

    def __init__(self, members: MemberTable, *, fan_out: int, clock: Clock) -> None:
        self._members = members
        self._fan_out = fan_out
        self._clock = clock
        self._version = -1
        self._trees: dict[bool, _Tree] = defaultdict(_Tree)
        self._fetches_from: dict[Member, list[_Node]] = {}
        self._liars: set[Member] = set()
        self._rests_until: dict[Member, float] = {}

    def assign(self, version: int, members: Iterable[Member], *, by_delta: bool) -> dict[Place, list[Member]]:
        """Place fetching members. `by_delta`: they hold an older version."""
        if version != self._version:
            self._version = version
            self._trees.clear()
        places: dict[Place, list[Member]] = defaultdict(list)
        # One member of each machine comes first.
        counts: dict[str, Iterator[int]] = defaultdict(count)
        turns = {member: next(counts[self._members.live[member].machine]) for member in members}
        for member in sorted(turns, key=turns.__getitem__):
            places[self._place(member, self._trees[by_delta])].append(member)
        return places

    def record_end(self, member: Member, *, is_lending: bool = False, errors: Sequence[LenderError] = ()) -> None:
        """End a fetch and record lenders' errors. `is_lending`: whether the member may lend now."""
        if nodes := self._fetches_from.pop(member, []):
            nodes[0].num_fetching -= 1
        for error in errors:
            # A generator may claim anything: ignore reports about other lenders.
            for node in (node for node in nodes if node.address == error.address):
                lender, by, reason, is_altered = node.member, member.peer_id, error.reason, error.is_altered
                log.warning("lender_failed", lender=lender.peer_id, by=by, altered=is_altered, reason=reason)
                self._rests_until[lender] = self._clock() + _REST_S
                if is_altered and lender not in self._liars:
                    self._liars.add(lender)
                    got = f"{by} got other weights from it than were published: {reason}"
                    self._members.report(lender, f"lends no more: {got}")
        if not is_lending:
            for tree in self._trees.values():
                tree.nodes.pop(member, None)

    def _place(self, member: Member, tree: _Tree) -> Place:
        state = self._members.live[member]
        if is_here(state.machine):
            return Place()  # reads the learner's files
        # A member that fetches again no longer has the version to lend.
        tree.nodes.pop(member, None)
        sources = self._sources(state.machine, tree)
        is_first = state.machine not in tree.machines
        tree.machines.add(state.machine)
        # Use few lenders, because each keeps a version in memory.
        is_inner = tree.num_members < ceil(self._members.num_elsewhere / self._fan_out)
        has_neighbors = is_first and self._members.num_on[state.machine] > 1
        tree.num_members += 1
        is_lent = bool(state.lends_at) and self._may_lend(member) and (is_inner or has_neighbors)
        if is_lent:
            depth = sources[0].depth + 1 if sources else 1
            tree.nodes[member] = _Node(member, state.machine, state.lends_at, depth)
        if not sources:
            tree.num_from_learner += 1
            return Place((), is_lent)
        sources[0].num_fetching += 1
        self._fetches_from[member] = sources
        return Place(tuple(node.address for node in sources), is_lent)

    def _sources(self, machine: str, tree: _Tree) -> list[_Node]:
        """The lender to fetch from and a fallback; empty for the learner."""
        nodes = tree.nodes.values()
        reachable = (node for node in nodes if node.machine == machine or not is_own_machine(node.address))

        def rank(node: _Node) -> tuple[bool, bool, int, int]:
            return node.num_fetching >= self._fan_out, node.machine != machine, node.depth, node.num_fetching

        usable = sorted((node for node in reachable if self._may_lend(node.member)), key=rank)
        if not usable or usable[0].num_fetching >= self._fan_out:
            return []
        is_learners_turn = usable[0].machine != machine and tree.num_from_learner < self._fan_out
        return [] if is_learners_turn else usable[:2]

    def _may_lend(self, member: Member) -> bool:
        is_rested = self._rests_until.get(member, 0.0) <= self._clock()
        return is_rested and member not in self._liars and member in self._members.live


class SnapshotServer:
    """Serves versions from the file system and as a stream. Blocks only on disk I/O."""

    def __init__(self, store: SnapshotStore, server: StreamServer) -> None:
        self._store = store
        self._server = server

    @property
    def address(self) -> str:
        return self._server.address

    def add(
        self, update: Update, buckets: Sequence[Tensor], *, with_delta: bool = False, pinned: Collection[int] = ()
    ) -> SnapshotSource:
        """Write a missing version and return where to fetch it. `buckets` may be overwritten afterward.

        Keeps versions in `pinned`. Raises WeightTransferError if the disk is full.
        """
        self._store.put(update, buckets, with_delta=with_delta, pinned=pinned)
        return SnapshotSource(self.address, str(self._store.folder.resolve()), has_deltas=with_delta)

    def close(self) -> None:
        """Stop serving and delete all versions. Idempotent."""
        self._server.close()
        shutil.rmtree(self._store.folder, ignore_errors=True)


@dataclass
class _Request:
    update: Update
    limit_s: float
    ends_at: float
    resend_at: float

    @property
    def reads_memory(self) -> bool:
        return bool(self.update.source and self.update.source.memory)


class FetchTracker:
    """Holds at most one request per member. Used by the publisher's thread."""

    def __init__(
        self, server: SnapshotServer, *, client: Sender, members: MemberTable, config: WeightsConfig, clock: Clock
    ) -> None:
        self._server = server
        self._client = client
        self._members = members
        self._config = config
        self._clock = clock
        self._requests: dict[Member, _Request] = {}
        self._reads_files: set[Member] = set()
        """Members on this machine that failed to read memory."""
        self._unanswered: set[int] = set()
        """Versions that a member without an answer may still read from memory."""
        self._fetched_at: dict[Member, float] = {}
        self._lenders = Lenders(members, fan_out=_FAN_OUT, clock=clock)
        self._digests: tuple[int, list[bytes]] = (-1, [])
        """Version, and the digests of its buckets."""

    def is_awaited(self, version: int) -> bool:
        """Whether a commit should wait: a member reads the version from memory, or none holds it yet."""
        requests = [request for request in self._requests.values() if request.update.version == version]
        return any(each.reads_memory for each in requests) or bool(requests and not self._members.num_holding(version))

    def may_overwrite(self, version: int) -> bool:
        """Whether no member can be reading this version's memory."""
        is_read = any(each.reads_memory and each.update.version == version for each in self._requests.values())
        return not is_read and version not in self._unanswered

    def broadcast_members(self) -> list[Member]:
        """Members that join broadcasts and are not fetching."""
        idle = [member for member in self._members.eligible() if member not in self._requests]
        return [member for member in idle if self._joins_broadcasts(member)]

    def due(self, version: int) -> list[Member]:
        now = self._clock()
        return [
            member
            for member in self._members.eligible()
            if not (self._members.holds(member, version) or member in self._requests)
            and not (self._joins_broadcasts(member) and now < self._fetched_at.get(member, -math.inf) + _CATCH_UP_S)
        ]

    def request(self, staged: Staged) -> None:
        """Ask due members to fetch this version. Blocks while it is written; evicts them if the disk is full."""
        due, live = self.due(staged.version), self._members.live
        broadcasts = [m for m in due if live[m].transport == "collective" and m not in self._reads_files]
        if near := [member for member in broadcasts if is_here(live[member].machine)]:
            limit_s = self._config.transfer_timeout_s + sum(staged.update.bucket_bytes) / SLOWEST_BYTES_PER_S
            self._announce(staged, near, SnapshotSource("", "", memory=staged.memory.path), limit_s=limit_s)
        due = [member for member in due if member not in near]
        has_deltas = any(state.transport == "delta" for state in live.values())
        try:
            # Write a delta if any member uses deltas, but announce it only to these.
            for with_deltas in (False, True):
                members = [m for m in due if (live[m].transport == "delta") is with_deltas]
                if members:
                    self._send(staged, members, put_delta=has_deltas, with_deltas=with_deltas)
        except WeightTransferError as error:
            self._members.evict(due, str(error))

    def poll(self) -> None:
        """Drop requests of members that left, evict late ones, and resend other requests."""
        now, alive = self._clock(), self._members.live.keys()
        for member in self._requests.keys() - alive:
            self._end_unanswered(member)
        self._fetched_at = {member: at for member, at in self._fetched_at.items() if member in alive}
        for member, request in list(self._requests.items()):
            if now >= request.ends_at:
                self._end_unanswered(member)
                version = request.update.version
                self._members.evict([member], f"version {version} was not applied within {request.limit_s:.3g} s")
            elif now >= request.resend_at:
                request.resend_at = now + _RESEND_AFTER_S
                # Only to this member: the others may have finished.
                self._client.send(msgspec.structs.replace(request.update, members=[member]))

    def record_answer(self, answer: UpdateApplied) -> bool:
        """Returns whether the member now holds the requested version."""
        request = self._requests.get(answer.member)
        if request is None or request.update.version != answer.version:
            return False
        del self._requests[answer.member]
        self._lenders.record_end(answer.member, is_lending=not answer.error, errors=answer.lender_errors)
        if answer.error:
            if request.reads_memory:
                # Processes of other users or containers cannot map this one's memory.
                self._reads_files.add(answer.member)
            self._members.evict([answer.member], f"version {answer.version} was not applied: {answer.error}")
            return False
        self._members.record_applied(answer.member, answer.version, device=answer.device)
        self._fetched_at[answer.member] = self._clock()
        log.info("version_fetched", version=answer.version, member=answer.member.peer_id)
        return True

    def close(self) -> None:
        self._server.close()

    def _end_unanswered(self, member: Member) -> None:
        request = self._requests.pop(member)
        if request.reads_memory:
            self._unanswered.add(request.update.version)
        self._lenders.record_end(member)

    def _joins_broadcasts(self, member: Member) -> bool:
        state = self._members.live[member]
        return state.transport == "collective" and not is_here(state.machine) and self._members.holds_any(member)

    def _send(self, staged: Staged, members: list[Member], *, put_delta: bool, with_deltas: bool) -> None:
        pinned = {request.update.version for request in self._requests.values()}
        source = self._server.add(staged.update, staged.buckets, with_delta=put_delta, pinned=pinned)
        limit_s = self._config.fetch_timeout_s + self._config.transfer_timeout_s
        holding = [member for member in members if with_deltas and self._members.holds_any(member)]
        joining = [member for member in members if member not in holding]
        for by_delta, fetching in ((True, holding), (False, joining)):
            for place, together in self._lenders.assign(staged.version, fetching, by_delta=by_delta).items():
                lenders = list(place.lenders)
                if lenders and self._digests[0] != staged.version:
                    self._digests = staged.version, [digest(bucket) for bucket in staged.buckets]
                own = msgspec.structs.replace(source, has_deltas=with_deltas, lenders=lenders, is_lent=place.is_lent)
                self._announce(staged, together, own, limit_s=limit_s)

    def _announce(self, staged: Staged, members: list[Member], source: SnapshotSource, *, limit_s: float) -> None:
        digests, timeout_s = self._digests[1] if source.lenders else [], self._config.fetch_timeout_s
        addressed = {"epoch": NO_EPOCH, "members": members, "timeout_s": timeout_s}
        update = msgspec.structs.replace(staged.update, **addressed, source=source, digests=digests)
        self._client.send(update)
        now = self._clock()
        for member in members:
            self._requests[member] = _Request(update, limit_s, now + limit_s, now + _RESEND_AFTER_S)
