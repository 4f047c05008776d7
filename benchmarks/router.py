"""The broker's router and its peers over real sockets, for benchmarks of the traffic through it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec

from slipstream.broker.dataset import read_heldout, read_train
from slipstream.broker.router import Router
from slipstream.broker.transport.session import Session, StatusBoard, join
from slipstream.broker.transport.zmq_channels import ZmqServerChannel
from slipstream.buffer.redis.run_store import open_own_store
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.store import Store
from slipstream.configs.run import RunConfig
from slipstream.runtime.credentials import derive_keys, make_token
from slipstream.runtime.run_folder import RunFolder

JOIN_TIMEOUT_S = 120.0


@contextmanager
def open_store(run: RunConfig) -> Iterator[RedisStore]:
    """Open a temporary store."""
    with TemporaryDirectory(prefix="store-") as folder, open_own_store(Path(folder), run.name) as store:
        yield store


@contextmanager
def open_router(run: RunConfig, store: Store) -> Iterator[Router]:
    """Create the run in `store` and a router that serves it. The caller steps the router."""
    train, heldout = read_train(run), read_heldout(run)
    channel = ZmqServerChannel(RunFolder(run).broker_address, keys=derive_keys(make_token(run)))
    config_json = msgspec.json.encode(run).decode()
    store.open_run(run.name, config_json=config_json, num_rows=len(train), seed=run.seed)
    yield Router(channel, store, run=run, train=train, heldout=heldout)
    channel.close()


@contextmanager
def router_thread(run: RunConfig, store: Store) -> Iterator[None]:
    """Step a router in a thread until the block ends."""
    stops = threading.Event()

    def route() -> None:
        while not stops.is_set():
            router.step(timeout_s=0.02)

    with open_router(run, store) as router:
        thread = threading.Thread(target=route)
        thread.start()
        try:
            yield
        finally:
            stops.set()
            thread.join()


def join_run(
    run: RunConfig, role: Literal["generator", "learner"], peer_id: str, *, board: StatusBoard | None = None
) -> Session:
    """Join a run like a role on the same machine does."""
    return join(
        role,
        address=RunFolder(run).broker_address,
        keys=derive_keys(make_token(run)),
        max_message_bytes=run.broker.max_message_bytes,
        peer_id=peer_id,
        status=board or StatusBoard(),
        timeout_s=JOIN_TIMEOUT_S,
    )
