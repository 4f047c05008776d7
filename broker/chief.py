"""Chief: a broker among those of its run, and what one of them does for all.

Consumes: the store's answer to its reports.
Produces: the addresses of the living brokers; lapsed leases and claims taken back, deadlines that follow the store's
clock.
Invariant: work for all has an effect at one broker at a time: the store refuses it from any other.
"""

import math
from typing import Any

import structlog

from slipstream.broker.messages import LivingBrokers
from slipstream.broker.transport.endpoints import machine_id
from slipstream.buffer.errors import StaleFenceError
from slipstream.buffer.store import Store
from slipstream.buffer.store_rules import NO_FENCE
from slipstream.configs.run import RunConfig
from slipstream.runtime.clock import Clock
from slipstream.runtime.run_folder import RunFolder

LEASE_S = 5.0
"""Time after a report for which a broker counts as alive, and the chief stays the chief. Brokers report every second,
so that another does a dead chief's work within 6 s."""
_JUMP_S = 5.0
"""Difference between the store's clock and this process's from which on it is a jump, and no slow answer."""

log = structlog.get_logger(__name__)


class Chief:
    """One broker's knowledge of the others, and its work for all while it is the chief.

    Life: (report -> work)*, each about once a second; all else at any time.
    """

    def __init__(
        self, store: Store, run: RunConfig, *, name: str, incarnation: str, address: str, clock: Clock
    ) -> None:
        """`address`: where other machines reach the broker; empty: they do not."""
        self._store = store
        self._run = run
        self.name = name
        self._incarnation = incarnation
        here = RunFolder(run).broker_addresses[name]
        self._facts: dict[str, Any] = {"here": here, "address": address, "machine": machine_id()}
        self._clock = clock
        self._is_ahead_s: float | None = None
        self._reported_at = -math.inf
        self.fence = NO_FENCE
        """Fence of the chief, if this broker is the chief, else NO_FENCE. The store has the last word."""
        self._living: dict[str, dict[str, Any]] = {}
        self.share = 1.0
        """Share of the run's generators that this broker serves: of what may be leased it offers as much."""

    @property
    def has_others(self) -> bool:
        """Whether the run has several brokers, alive or not."""
        return self._run.broker.shards > 1

    @property
    def has_living_others(self) -> bool:
        return bool(self._living.keys() - {self.name})

    @property
    def is_outdated(self) -> bool:
        """Whether it must report before it tells a peer who is alive: this broker has just started, or hung."""
        return self.has_others and self._clock() - self._reported_at > LEASE_S

    def living_for(self, machine: str) -> LivingBrokers | None:
        """Return the living brokers with their addresses for a peer of that machine; None if the run has one broker."""
        if not self.has_others:
            return None
        brokers = {
            name: facts["here"] if machine in ("", facts["machine"]) else facts["address"]
            for name, facts in self._living.items()
        }
        return LivingBrokers(self.name, brokers)

    def marks(self, owner: str) -> dict[str, str]:
        """Return what the others must know of a peer that this broker serves: who serves it; empty for a single one."""
        return {"broker": self.name, "owner": owner} if self.has_others else {}

    def report(self, *, num_generators: int) -> bool:
        """Report this broker as alive; returns whether its peers must learn that others are alive than before.

        Raises StoreUnavailableError.
        """
        self._facts["generators"] = num_generators
        ahead_s = self._ahead_s()
        answer = self._store.report_broker(self.name, incarnation=self._incarnation, facts=self._facts, lease_s=LEASE_S)
        if not answer.fence:
            # Jumps up to here are the chief's. A later one may lapse its lease, and make this broker the chief.
            self._is_ahead_s = ahead_s
        if answer.fence != self.fence:
            self._set_fence(answer.fence, chief=answer.chief)
        before, self._living = self._addresses(), answer.living
        self._reported_at = self._clock()
        total = sum(facts["generators"] for facts in answer.living.values())
        self.share = num_generators / total if total else 1.0
        return self.has_others and before != self._addresses()

    def work(self) -> None:
        """Do what is due for all brokers, if this one is the chief. Raises StoreUnavailableError."""
        try:
            if self.fence:
                self._follow_clock()
                self._reap()
        except StaleFenceError as error:
            # Another may be the chief already: the next report tells.
            log.warning("no_chief_any_more", reason=str(error))
            self.fence = NO_FENCE

    def _set_fence(self, fence: int, *, chief: str) -> None:
        self.fence = fence
        if self.has_others:
            log.info("chief", name=chief, fence=fence)
        if self.has_others and fence:
            self._store.record_event(self.name, "is the chief of all brokers from now on")

    def _addresses(self) -> dict[str, tuple[str, str]]:
        return {name: (facts["here"], facts["address"]) for name, facts in self._living.items()}

    def _reap(self) -> None:
        reaped = self._store.reap(group_deadline=self._run.buffer.group_deadline, fence=self.fence)
        for event in reaped:
            log.warning("reaped", what=event)
        if reaped:
            # One event for all: the leases of one dead generator must not push everything else off the list.
            self._store.record_event(self.name, "; ".join(reaped))

    def _ahead_s(self) -> float:
        return self._store.now() - self._clock()

    def _follow_clock(self) -> None:
        """Move the deadlines in the store by the jump of its clock since the last call, if there was one.

        A machine was suspended, or its clock was set.
        """
        ahead_s = self._ahead_s()
        jump_s = 0.0 if self._is_ahead_s is None else ahead_s - self._is_ahead_s
        has_jumped = abs(jump_s) > _JUMP_S
        self._store.follow_clock(
            jump_s=jump_s if has_jumped and jump_s > 0 else 0.0,
            lease_s=self._run.broker.lease_s,
            claim_lease_s=self._run.buffer.claim_lease_s,
            fence=self.fence,
        )
        # Only now: after an error the jump is found again.
        self._is_ahead_s = ahead_s
        if has_jumped:
            what = f"the store's clock jumped by {jump_s:+.0f} s: leases and claims keep the time they had left"
            log.warning("clock_jumped", what=what)
            self._store.record_event(self.name, what)
