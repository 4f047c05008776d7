"""GoodPeer: a regular generator that works during the attack."""

import os
import sys
import time
from collections import deque
from pathlib import Path

import psutil

from slipstream.broker.messages import Hello, LeaseRequest, Message, Nack, Pong, Prompts
from slipstream.broker.transport.client import BrokerClient
from slipstream.broker.transport.zmq_channels import ZmqClientChannel
from slipstream.buffer.codec import Packed
from slipstream.buffer.redis.connection import connect
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests.builders import make_packed
from tests.fakes import KEYS, TOKEN, write_rows

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


NUM_GROUPS = 64
"""Groups admitted at the start; without a learner never more."""
GROUP_SIZE = 8
MAX_MESSAGE_BYTES = 65_536
"""Small, so that many frames are oversized."""
_NAME = "target"
_START_S = 60.0
_STOP_S = 20.0


class Target:
    """Life: start -> measure* -> stop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"ipc://{folder}/broker.sock"
        self.log_path = folder / "broker.log"
        self._server = EmbeddedRedis(folder / "runs" / _NAME / "store")
        self._broker: psutil.Popen | None = None

    def start(self) -> RedisStore:
        """Block until the broker serves; returns its store for inspection."""
        rows = write_rows(self._folder / "rows.parquet")
        settings = f"""
            experiment=digits_cpu name={_NAME} runs_dir={self._folder}/runs data.train={rows} data.eval={rows}
            broker.address={self.address} broker.max_message_bytes={MAX_MESSAGE_BYTES} broker.peer_timeout_s=1.6
            learner.prompts_per_step={NUM_GROUPS} generators.group_size={GROUP_SIZE} learner.max_steps=1
            staleness.max_lag=0
        """
        with self.log_path.open("wb") as log:
            command = [sys.executable, "-m", "slipstream.broker", *settings.split()]
            self._broker = psutil.Popen(command, stdout=log, stderr=log, env={**os.environ, TOKEN_VARIABLE: TOKEN})
        return self._await_store()

    @property
    def is_alive(self) -> bool:
        """Whether the started process still runs."""
        return self._broker is not None and self._broker.is_running() and self._broker.poll() is None

    @property
    def broker_mib(self) -> float:
        """Resident memory of the broker, MiB."""
        assert self._broker is not None
        return float(self._broker.memory_info().rss) / 2**20

    @property
    def store_mib(self) -> float:
        """Allocated memory of the store's server, MiB."""
        client = connect(self._server.url)
        try:
            return float(client.info("memory")["used_memory"]) / 2**20
        finally:
            client.close()

    def stop(self) -> None:
        if self._broker is not None:
            self._broker.terminate()
            try:
                self._broker.wait(_STOP_S)
            except psutil.TimeoutExpired:
                self._broker.kill()

    def _await_store(self) -> RedisStore:
        assert self._broker is not None
        deadline = time.monotonic() + _START_S
        while not (self._folder / "broker.sock").exists() or b"listening" not in self.log_path.read_bytes():
            assert self.is_alive, self.log_path.read_text()
            assert time.monotonic() < deadline, "the broker must listen in time"
            try:
                self._broker.wait(0.02)
            except psutil.TimeoutExpired:
                continue
        return open_run_store(self._server.url, _NAME, timeout_s=_START_S)
