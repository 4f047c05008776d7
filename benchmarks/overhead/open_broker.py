"""OpenBroker: a broker that holds nobody back, and a learner that publishes once and never trains.

Both live in a process of their own, as they would in a run, so that the generator's loop pays for its own work alone.
"""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec
import torch

from slipstream.broker.dataset import Dataset
from slipstream.broker.router import Router
from slipstream.broker.transport.session import StatusBoard, join
from slipstream.broker.transport.zmq_channels import ZmqServerChannel
from slipstream.broker.weights.collective import CollectiveSender
from slipstream.buffer.memory.store import MemoryStore
from slipstream.configs.run import RunConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.publishing.publisher import Publisher
from slipstream.learner.publishing.staging import Stager
from slipstream.learner.ranks import join_ranks

_JOIN_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0


@contextmanager
def open_broker(run: RunConfig) -> Iterator[Event]:
    """Serve `run` in another process. While the event is set prompts are handed out without limit, else none."""
    context = multiprocessing.get_context("spawn")
    admits, stops = context.Event(), context.Event()
    process = context.Process(target=_serve, args=(msgspec.json.encode(run), admits, stops), daemon=True)
    process.start()
    try:
        yield admits
    finally:
        stops.set()
        process.join(_STOP_TIMEOUT_S)
        process.kill()


def _serve(config_json: bytes, admits: Event, stops: Event) -> None:
    run = msgspec.json.decode(config_json, type=RunConfig)
    torch.set_num_threads(1)
    routing = threading.Thread(target=_route, args=(run, admits, stops))
    routing.start()
    with suppress(KeyboardInterrupt):
        _publish(run, stops)
    routing.join()


def _route(run: RunConfig, admits: Event, stops: Event) -> None:
    train, heldout = Dataset(Path(run.data.train_path)), Dataset(Path(run.data.heldout_path))
    channel = ZmqServerChannel(run.broker.address, max_message_bytes=run.broker.max_message_bytes)
    config_json = msgspec.json.encode(run).decode()
    store = MemoryStore()
    store.open_run(run.name, config_json=config_json, num_rows=len(train), seed=run.seed)
    router = Router(channel, store, run=run, config_json=config_json, train=train, heldout=heldout)
    while not stops.is_set():
        store.set_phase("training" if admits.is_set() else "finishing")
        router.step(timeout_s=0.05)
    channel.close()


def _publish(run: RunConfig, stops: Event) -> None:
    """Bring version 0 into the generator when it comes."""
    device = torch.device("cpu")
    joined = join(
        "learner",
        address=run.broker.address,
        max_message_bytes=run.broker.max_message_bytes,
        peer_id="learner",
        status=StatusBoard(),
        timeout_s=_JOIN_TIMEOUT_S,
    )
    ranks = join_ranks(rank=0, size=1, device=device, timeout_s=_JOIN_TIMEOUT_S)
    trainer = build_trainer(run, ranks=ranks, device=device)
    publisher = Publisher(
        client=joined.client,
        inbox=joined.inbox,
        sender=CollectiveSender(run.weights.host, device=device),
        config=run.weights,
    )
    stager = Stager(run.weights, wire_dtype=getattr(torch, run.model.dtype))
    publisher.set_version(stager.stage(version=0, weights=trainer.engine.gather_parameters(), canary=trainer.canary()))
    while not stops.wait(0.2):
        if publisher.is_due:
            publisher.synchronize()
    publisher.close()
    joined.thread.stop()
