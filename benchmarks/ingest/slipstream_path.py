"""SlipstreamPath: generator's outbox and connection -> broker -> store -> learner's claim, fetch, decode, commit."""

import time
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np

from benchmarks.ingest.paths import Passage, make_trajectory
from benchmarks.ingest.plain_sockets import plain_sockets
from benchmarks.ingest.served_run import GROUP_SIZE, MAX_MESSAGE_BYTES, TOKEN, ServedRun
from slipstream.broker.messages import LeaseRequest, Message, Nack, Pong, Prompts
from slipstream.broker.transport.session import StatusBoard, join
from slipstream.buffer.codec import Packed, pack, unpack
from slipstream.buffer.records import CheckpointPointer, Claim, Lease, make_entry
from slipstream.buffer.sampling import SamplingRules
from slipstream.runtime.credentials import derive_keys

_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.002
_BATCH_BYTES = 8 * 2**20
"""Approximate size of a learner's step; a step has at least one group."""


class SlipstreamPath:
    """One generator and one learner in this process; broker and store run in other processes."""

    def __init__(self, served: ServedRun, *, num_tokens: int) -> None:
        self._served = served
        self._num_tokens = num_tokens
        self._rng = np.random.default_rng(0)
        self._store = served.open_store()
        self._step = self._store.run_state().step
        self._leases: list[Lease] = []
        status = StatusBoard()
        status.set_source(lambda: Pong(-1.0, "ready", 0))
        with plain_sockets() if served.is_plain else nullcontext():
            self._session = join(
                "generator",
                address=served.address,
                keys=derive_keys(TOKEN),
                max_message_bytes=MAX_MESSAGE_BYTES,
                peer_id=f"generator-{num_tokens}",
                status=status,
                timeout_s=_TIMEOUT_S,
            )
        self.encode_us: list[float] = []
        """Mean time to pack one trajectory, microseconds, one value per round."""
        self.commit_us: list[float] = []
        """Commit and checkpoint, microseconds per trajectory, one value per round."""

    def pass_through(self, count: int) -> Passage:
        packed = self._make(count)
        before, own_before = self._served.cpu_s(), time.process_time()
        started_at = time.perf_counter()
        for header, payload in packed:
            self._session.client.put(header, payload)
        self._wait_until(lambda: not len(self._session.client.outbox))
        put_s = time.perf_counter() - started_at
        used = {name: seconds - before[name] for name, seconds in self._served.cpu_s().items()}
        used["generator"] = time.process_time() - own_before
        take_s = self._take(count)
        return Passage(put_s, take_s, {name: 1e6 * seconds / count for name, seconds in used.items()})

    def close(self) -> None:
        self._session.thread.stop()
        self._store.close()

    def _make(self, count: int) -> list[Packed]:
        """Lease prompts and pack trajectories for them."""
        self._leases.clear()
        self._session.client.send(LeaseRequest(count))
        self._wait_until(lambda: len(self._leases) * GROUP_SIZE >= count)
        made = [
            (lease, make_trajectory(lease, index, num_tokens=self._num_tokens, rng=self._rng))
            for lease in self._leases
            for index in lease.indices
        ]
        started_at = time.process_time()
        packed = [pack(each, lease_id=lease.id, purpose="train", group_size=GROUP_SIZE) for lease, each in made]
        self.encode_us.append(1e6 * (time.process_time() - started_at) / count)
        return packed

    def _take(self, count: int) -> float:
        """Return the time of claim, fetch, and decode. Appends that of commit and checkpoint to `commit_us`."""
        groups_at_once = max(1, _BATCH_BYTES // (9 * self._num_tokens * GROUP_SIZE))
        num_left, taking_s, committing_s = count // GROUP_SIZE, 0.0, 0.0
        while num_left:
            started_at = time.perf_counter()
            claim, payloads = self._claim(min(groups_at_once, num_left))
            for payload in (each for group in payloads for each in group):
                unpack(payload)
            taken_at = time.perf_counter()
            self._store.commit(claim, make_entry(claim, payloads, version=0, seed=0, config_hash=""))
            self._store.checkpoint(CheckpointPointer(self._step, 0, f"step-{self._step}"), fence=claim.fence)
            num_left -= len(claim.group_ids)
            taking_s += taken_at - started_at
            committing_s += time.perf_counter() - taken_at
        self.commit_us.append(1e6 * committing_s / count)
        return taking_s

    def _claim(self, num_groups: int) -> tuple[Claim, list[list[bytes]]]:
        self._step += 1
        claim = self._store.claim(step=self._step, version=0, num_groups=num_groups, rules=SamplingRules(), lease_s=60)
        if not isinstance(claim, Claim):
            raise RuntimeError(f"acknowledged groups must be ready, got: {claim.reason}")
        return claim, self._store.fetch(claim.group_ids)

    def _handle(self, message: Message | None) -> None:
        if isinstance(message, Prompts):
            self._leases += [prompt.lease for prompt in message.prompts]
        if isinstance(message, Nack):
            raise RuntimeError(f"every trajectory must be accepted, got {message}")

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the broker must answer within {_TIMEOUT_S:g} s")
            self._handle(self._session.inbox.get(timeout_s=_POLL_INTERVAL_S))
