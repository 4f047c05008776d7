"""Chief: one broker among several, elected through the store to do the work shared by all brokers.

Consumes: the store's answers to its reports.
Produces: the addresses of the live brokers; reaped leases and claims; deadlines adjusted to the store's clock.
Invariant: only one broker at a time does the shared work: the store's fence refuses others.
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
"""Time after a report during which a broker is alive and a chief stays chief. Brokers report every second, so a dead
chief is replaced within 6 s."""
_JUMP_S = 5.0
"""Change in the clocks' offset that counts as a jump, not as a slow answer."""

log = structlog.get_logger(__name__)


class Chief:
    """One broker's view of the others, and the shared work while it is the chief.

    Life: (report -> work)*, about once a second; other methods at any time.
    """

    def __init__(
        self, store: Store, run: RunConfig, *, name: str, incarnation: str, address: str, clock: Clock
    ) -> None:
        self._store = store
        self._run = run
        self.name = name
        self._incarnation = incarnation
        here = RunFolder(run).broker_addresses[name]
        self._facts: dict[str, Any] = {"here": here, "address": address, "machine": machine_id()}
        self._clock = clock
        self._clock_offset_s: float | None = None
        self._reported_at = -math.inf
        self.fence = NO_FENCE
        """The chief's fence if this broker is the chief, else NO_FENCE; the store checks its validity."""
        self._living: dict[str, dict[str, Any]] = {}
        self.share = 1.0
        """Fraction of the generators that this broker serves, and of the groups it offers."""

    @property
    def has_others(self) -> bool:
        return self._run.broker.shards > 1

    @property
    def has_living_others(self) -> bool:
        return bool(self._living.keys() - {self.name})

    @property
    def is_outdated(self) -> bool:
        """Whether the list of live brokers is too old to send, after a start or a hang."""
        return self.has_others and self._clock() - self._reported_at > LEASE_S

    def living_for(self, machine: str) -> LivingBrokers | None:
        """Live brokers with addresses for `machine`; None if the run has one broker."""
        if not self.has_others:
            return None
        brokers = {
            name: facts["here"] if machine in ("", facts["machine"]) else facts["address"]
            for name, facts in self._living.items()
        }
        return LivingBrokers(self.name, brokers)

    def serving_gauges(self, owner: str) -> dict[str, str]:
        """Gauges that show other brokers who serves a peer."""
        return {"broker": self.name, "owner": owner} if self.has_others else {}

    def report(self, *, num_generators: int) -> bool:
        """Report this broker as alive; returns whether the live brokers changed. Raises StoreUnavailableError."""
        self._facts["generators"] = num_generators
        offset_s = self._store.now() - self._clock()
        answer = self._store.report_broker(self.name, incarnation=self._incarnation, facts=self._facts, lease_s=LEASE_S)
        if not answer.fence:
            # The chief has handled all jumps so far; a later one may make this broker the chief.
            self._clock_offset_s = offset_s
        if answer.fence != self.fence:
            self.fence = answer.fence
            if self.has_others:
                log.info("chief", name=answer.chief, fence=answer.fence)
            if self.has_others and answer.fence:
                self._store.record_event(self.name, "became the chief of all brokers")
        before, self._living = self._addresses(), answer.living
        self._reported_at = self._clock()
        total = sum(facts["generators"] for facts in answer.living.values())
        self.share = num_generators / total if total else 1.0
        return self.has_others and before != self._addresses()

    def work(self) -> None:
        """Do the shared work if this broker is the chief. Raises StoreUnavailableError."""
        try:
            if self.fence:
                self._follow_clock()
                reaped = self._store.reap(group_deadline=self._run.buffer.group_deadline, fence=self.fence)
                for event in reaped:
                    log.warning("reaped", what=event)
                if reaped:
                    # One event, so that a dead generator's leases do not crowd out all other events.
                    self._store.record_event(self.name, "; ".join(reaped))
        except StaleFenceError as error:
            log.warning("chief_lost", reason=str(error))
            self.fence = NO_FENCE

    def _addresses(self) -> dict[str, tuple[str, str]]:
        return {name: (facts["here"], facts["address"]) for name, facts in self._living.items()}

    def _follow_clock(self) -> None:
        """Correct the store's deadlines after its clock was set or the machine suspended.

        A forward jump shifts them; capping at their full duration handles a jump back.
        """
        offset_s = self._store.now() - self._clock()
        jump_s = 0.0 if self._clock_offset_s is None else offset_s - self._clock_offset_s
        has_jumped = abs(jump_s) > _JUMP_S
        self._store.follow_clock(
            jump_s=jump_s if has_jumped and jump_s > 0 else 0.0,
            lease_s=self._run.broker.lease_s,
            claim_lease_s=self._run.broker.claim_lease_s,
            fence=self.fence,
        )
        # Only after success: a failed call is repeated.
        self._clock_offset_s = offset_s
        if has_jumped:
            effect = "keep the time they had left" if jump_s > 0 else "last at most their full time from now"
            what = f"the store's clock jumped by {jump_s:+.0f} s: leases and claims {effect}"
            log.warning("clock_jumped", what=what)
            self._store.record_event(self.name, what)
