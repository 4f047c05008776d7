"""Vitals: the broker's gauges, the time it spends, and its part in a profile of steps."""

import os
import socket
import time
from collections.abc import Callable, Iterable

from slipstream.broker.ingest import Ingest
from slipstream.broker.messages import Ack, Message, Profile, Prompt
from slipstream.broker.peers import Peer
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import make_trajectory_id
from slipstream.configs.run import RunConfig
from slipstream.runtime.run_folder import RunFolder
from slipstream.runtime.time_account import TimeAccount
from slipstream.runtime.trace import Trace


class Vitals:
    """Belongs to the router's thread."""

    def __init__(
        self,
        run: RunConfig,
        store: Store,
        ingest: Ingest,
        *,
        send: Callable[[bytes, Message], object],
        name: str,
        address: str,
    ) -> None:
        """`name`, `address`: of this broker."""
        self._store = store
        self._ingest = ingest
        self._send = send
        self._address = address
        self._trace = Trace(name, RunFolder(run).profile)
        self.account = TimeAccount("routing", trace=self._trace)
        if (steps := run.profile.steps) and steps[0] - run.profile_lead_steps <= store.run_state().step + 1 <= steps[1]:
            # Generators are told as they join: the learner's order would come after their first leases.
            self._trace.obey("events")

    def gauges(self, *, num_peers: int, is_chief: bool) -> dict[str, object]:
        deferred = {f"deferred_{reason}": number for reason, number in self._ingest.deferred.items()}
        reason = f"trajectories are deferred: {self._ingest.reason}" if self._ingest.reason else ""
        where = {"host": socket.gethostname(), "pid": os.getpid(), "address": self._address}
        waits = {"reason": reason, "waits_for": "store" if reason else ""}
        # Without children: a store that this process started reports its own time.
        used = {"cpu_s": round(time.process_time(), 3), "store_cpu_s": self._store.cpu_s(), **self.account.gauges()}
        return {
            "role": "broker",
            "state": "ready",
            "peers": num_peers,
            "is_chief": is_chief,
            **waits,
            **where,
            **deferred,
            **used,
        }

    # --- profile -------------------------------------------------------------------------------------------------
    def pass_on(self, order: Profile, generators: Iterable[Peer]) -> None:
        """Carry out an order of the learner, here and in the generators."""
        for peer in generators:
            self._send(peer.identity, order)
        self._trace.obey(order.stage)

    def record_join(self, identity: bytes) -> None:
        """Have a generator that joins take part in a recording that runs."""
        if self._trace.is_on:
            self._send(identity, Profile("events"))

    def record_leases(self, prompts: Iterable[Prompt]) -> None:
        for lease in (prompt.lease for prompt in prompts if self._trace.is_on):
            self._trace.mark("leased", *(make_trajectory_id(lease.id, index) for index in lease.indices))

    def record_answer(self, answer: Message) -> None:
        self._trace.mark("stored", *(answer.ids if isinstance(answer, Ack) else ()))
