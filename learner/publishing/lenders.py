"""Lenders: plan of who fetches a version from whom, so that the learner sends it to a few generators only.

    learner -> the first `fan_out` generators -> `fan_out` each -> ...
A tree by order of arrival, a new one for every version and for each of its forms, whole and delta. The first generator
of a machine fetches for the others there. A generator lends only what it verified, and whoever fetches from it has
another lender and the learner to turn to: the plan need not be right, it only spreads the load.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil

import structlog

from slipstream.broker.messages import LenderError, Member
from slipstream.broker.transport.endpoints import is_here, is_own_machine
from slipstream.learner.publishing.members import MemberTable
from slipstream.runtime.clock import Clock

_REST_S = 60.0
"""Time for which a lender that failed somebody is not asked again."""

log = structlog.get_logger(__name__)


@dataclass
class _Node:
    """A generator that lends a version."""

    member: Member
    machine: str
    address: str
    depth: int
    """Transfers between the learner and it, one after the other."""
    num_fetching: int = 0
    """Generators that fetch from it now."""


@dataclass
class _Tree:
    nodes: dict[Member, _Node] = field(default_factory=dict)
    machines: set[str] = field(default_factory=set)
    """Machines of which a generator fetches, or has fetched, the version."""
    num_members: int = 0
    num_from_learner: int = 0


@dataclass(frozen=True)
class Place:
    """Place of a generator in the tree. Example: Place(("tcp://10.0.0.7:20411",), is_lent=True)"""

    lenders: tuple[str, ...] = ()
    """Addresses to fetch from, in this order, before the learner."""
    is_lent: bool = False
    """Whether others fetch from it."""


class Lenders:
    """Trees of one version. Belongs to the publisher's thread."""

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
        """Give each of the members, which fetch this version now, its place; `by_delta`: they hold an older version."""
        if version != self._version:
            self._version = version
            self._trees.clear()
        places: dict[Place, list[Member]] = defaultdict(list)
        for member in self._one_of_each_machine_first(members):
            places[self._place(member, self._trees[by_delta])].append(member)
        return places

    def record_end(self, member: Member, *, is_lending: bool = False, errors: Sequence[LenderError] = ()) -> None:
        """A member has ended its fetch with these errors of its lenders; `is_lending`: it may serve others further."""
        nodes = self._fetches_from.pop(member, [])
        if nodes:
            nodes[0].num_fetching -= 1
        for error in errors:
            # Only lenders that it was told to ask: a generator may claim anything.
            for node in (node for node in nodes if node.address == error.address):
                self._blame(node.member, error, by=member)
        if not is_lending:
            for tree in self._trees.values():
                tree.nodes.pop(member, None)

    def _blame(self, lender: Member, error: LenderError, *, by: Member) -> None:
        log.warning(
            "lender_failed", lender=lender.peer_id, by=by.peer_id, altered=error.is_altered, reason=error.reason
        )
        self._rests_until[lender] = self._clock() + _REST_S
        if error.is_altered and lender not in self._liars:
            self._liars.add(lender)
            self._members.report(
                lender, f"lends no more: {by.peer_id} got other weights from it than were published: {error.reason}"
            )

    def _one_of_each_machine_first(self, members: Iterable[Member]) -> list[Member]:
        seen: Counter[str] = Counter()
        ranks = {}
        for member in members:
            ranks[member] = seen[machine := self._members.living[member].machine]
            seen[machine] += 1
        return sorted(ranks, key=ranks.__getitem__)

    def _place(self, member: Member, tree: _Tree) -> Place:
        state = self._members.living[member]
        if is_here(state.machine):
            return Place()  # it reads the learner's files
        # Fetching once more, it has lost what it lent.
        tree.nodes.pop(member, None)
        sources = self._sources(state.machine, tree)
        is_first = state.machine not in tree.machines
        tree.machines.add(state.machine)
        # As many as the others need, and no more: each keeps a version in memory.
        is_inner = tree.num_members < ceil(self._members.num_elsewhere / self._fan_out)
        has_neighbours = is_first and self._members.num_on[state.machine] > 1
        tree.num_members += 1
        is_lent = bool(state.lends_at) and self._may_lend(member) and (is_inner or has_neighbours)
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
        """Return the lender to fetch from and another for its failure; empty: the learner."""
        usable = sorted(
            (node for node in tree.nodes.values() if self._may_lend(node.member) and _reaches(machine, node)),
            key=lambda node: (
                node.num_fetching >= self._fan_out,
                node.machine != machine,
                node.depth,
                node.num_fetching,
            ),
        )
        if not usable or usable[0].num_fetching >= self._fan_out:
            return []
        is_learners_turn = usable[0].machine != machine and tree.num_from_learner < self._fan_out
        return [] if is_learners_turn else usable[:2]

    def _may_lend(self, member: Member) -> bool:
        is_rested = self._rests_until.get(member, 0.0) <= self._clock()
        return is_rested and member not in self._liars and member in self._members.living


def _reaches(machine: str, node: _Node) -> bool:
    return node.machine == machine or not is_own_machine(node.address)
