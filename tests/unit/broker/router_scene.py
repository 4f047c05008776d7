"""A router on a clock that the test moves, and peers that exchange messages with it."""

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.broker.dataset import Dataset
from slipstream.broker.messages import AnyMessage, Hello, LeaseRequest, Ping, Prompts
from slipstream.broker.router import Router
from slipstream.broker.transport.memory_channels import MemoryBroker
from slipstream.buffer.codec import decode, encode
from slipstream.buffer.memory.store import MemoryStore
from slipstream.runtime.model_files import ModelFingerprint
from tests.builders import make_run


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A router that admits two groups, over a store in memory."""

    def __init__(
        self, folder: Path, *, token: str = "", model: ModelFingerprint | None = None, **buffer: object
    ) -> None:
        """`buffer`: settings in addition to `max_lag=0`."""
        self.clock = FakeClock()
        self.store = MemoryStore(clock=self.clock)
        self.run = make_run(buffer={"staleness": {"max_lag": 0}} | buffer)
        self.hub = MemoryBroker()
        data = Dataset(write_rows(folder / "rows.parquet"))
        self.config_json = msgspec.json.encode(self.run).decode()
        self.store.open_run("test", config_json=self.config_json, num_rows=len(data), seed=0)
        self.router = Router(
            self.hub.server(),
            self.store,
            run=self.run,
            config_json=self.config_json,
            train=data,
            heldout=data,
            token=token,
            model=model,
            clock=self.clock,
        )

    def step(self) -> None:
        self.router.step(timeout_s=0)


class Peer:
    """A peer driven by the test. Frames leave a channel with its `receive`, so every send is followed by one."""

    def __init__(self, scene: Scene, role: str, peer_id: str, incarnation: str = "1", *, token: str = "") -> None:
        self.scene = scene
        self.channel = scene.hub.client()
        self.received: list = []
        self.send([encode(Hello(role, peer_id, incarnation, "here", 1, token=token))])

    def send(self, frames: list[bytes]) -> None:
        self.channel.send(frames)
        self.read()
        self.scene.step()

    def read(self) -> None:
        while (frames := self.channel.receive(timeout_s=0)) is not None:
            message = decode(frames[0], AnyMessage)
            self.received += [] if isinstance(message, Ping) else [message]

    def receive(self) -> list:
        """Return the messages since the last call, without pings."""
        self.read()
        messages, self.received = self.received, []
        return messages

    def exchange(self, message, *payloads: bytes) -> list:
        """Send a message, step the router, return its answers."""
        self.send([encode(message), *payloads])
        return self.receive()


def write_rows(path: Path) -> Path:
    rows = [
        {
            "data_source": "test",
            "prompt": f"{n}=",
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"index": n},
        }
        for n in range(10)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def lease(peer: Peer, *, room: int = 4) -> Prompts:
    answers = peer.exchange(LeaseRequest(max_trajectories=room))
    return next(m for m in answers if isinstance(m, Prompts))
