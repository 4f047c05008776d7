"""GoodPeer: a regular generator that works during the attack."""

import time
from collections import deque

from slipstream.broker.messages import Hello, LeaseRequest, Message, Nack, Pong, Prompts
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.transport.zmq_channels import ZmqClientChannel
from slipstream.buffer.codec import Packed
from tests.builders import make_packed
from tests.fakes import KEYS
from tests.hostile.target import GROUP_SIZE, MAX_MESSAGE_BYTES, NUM_GROUPS

_TIMEOUT_S = 20.0


class GoodPeer:
    """Leases every prompt, answers a few at a time, and keeps the acknowledged trajectories."""

    def __init__(self, address: str) -> None:
        hello = Hello("generator", "good", "good-1", "here", 1)
        channel = ZmqClientChannel(address, keys=KEYS, max_message_bytes=MAX_MESSAGE_BYTES)
        self._client = BrokerClient(channel, hello=hello, status=self._status, on_message=self._handle)
        self._owed: deque[Packed] = deque()
        self._leases: list[str] = []
        self._nacks: list[Nack] = []
        self.stored: dict[str, Packed] = {}
        """Acknowledged trajectories by id."""
        self.slowest_ack_s = 0.0
        """Longest wait for an Ack, seconds."""

    @property
    def num_owed(self) -> int:
        """Leased trajectories not sent yet."""
        return len(self._owed)

    def join(self) -> None:
        """Join, and lease every prompt."""
        self._step_until(lambda: self._client.is_joined, "the broker must welcome a good peer")
        self._client.send(LeaseRequest(NUM_GROUPS * GROUP_SIZE))
        self._step_until(lambda: len(self._leases) == NUM_GROUPS, "every prompt must be leased")

    def answer(self, count: int) -> None:
        """Send the next `count` trajectories; block until they are acknowledged."""
        sent = [self._owed.popleft() for _ in range(min(count, len(self._owed)))]
        started_at = time.monotonic()
        for header, payload in sent:
            self._client.put(header, payload)
        self._step_until(lambda: not len(self._client.outbox), "a good peer's trajectories must be acknowledged")
        assert not self._nacks, self._nacks
        self.slowest_ack_s = max(self.slowest_ack_s, time.monotonic() - started_at)
        self.stored |= {header.id: (header, payload) for header, payload in sent}

    def step(self) -> None:
        """Answer pings."""
        self._client.step(timeout_s=0)

    def close(self) -> None:
        self._client.close()

    def _status(self) -> Pong:
        return Pong(-1.0, "ready", 0, lease_ids=self._leases)

    def _handle(self, message: Message) -> None:
        match message:
            case Prompts(prompts=prompts):
                for prompt in prompts:
                    self._leases.append(prompt.lease.id)
                    group_id = prompt.lease.group_id
                    self._owed.extend(make_packed(group_id, n, group_size=GROUP_SIZE) for n in prompt.lease.indices)
            case Nack():
                self._nacks.append(message)

    def _step_until(self, holds, what: str) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + _TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline, what
            self._client.step(timeout_s=0.05)
