"""A broker in a thread of its own, for benchmarks that measure what goes through it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from slipstream.broker.dataset import Dataset
from slipstream.broker.router import Router
from slipstream.broker.transport.zmq_channels import ZmqServerChannel
from slipstream.buffer.memory.store import MemoryStore
from slipstream.configs.run import RunConfig


@contextmanager
def routing(run: RunConfig, store: MemoryStore) -> Iterator[None]:
    """Opens the run in `store`, and serves it until the block ends."""
    train, heldout = Dataset(Path(run.data.train_path)), Dataset(Path(run.data.heldout_path))
    channel = ZmqServerChannel(run.broker.address, max_message_bytes=run.broker.max_message_bytes)
    config_json = msgspec.json.encode(run).decode()
    store.open_run(run.name, config_json=config_json, num_rows=len(train), seed=run.seed)
    router = Router(channel, store, run=run, config_json=config_json, train=train, heldout=heldout)
    stops = threading.Event()

    def route() -> None:
        while not stops.is_set():
            router.step(timeout_s=0.02)

    thread = threading.Thread(target=route)
    thread.start()
    try:
        yield
    finally:
        stops.set()
        thread.join()
        channel.close()
