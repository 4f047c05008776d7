"""A broker without pacing, and a learner that publishes once and never trains.

Both run in another process, as in a run, so the generator's event loop is charged only for its own work.
"""

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event

import msgspec
import torch

from benchmarks.router import JOIN_TIMEOUT_S, join_run, open_router, open_store
from slipstream.broker.weights.collective import CollectiveSender
from slipstream.configs.run import RunConfig
from slipstream.learner.build import build_trainer
from slipstream.learner.publishing.publisher import Publisher
from slipstream.learner.publishing.staging import Stager
from slipstream.learner.ranks import join_ranks

_STOP_TIMEOUT_S = 10.0


@contextmanager
def open_broker(run: RunConfig) -> Iterator[Event]:
    """Serve `run` in another process. Prompts are leased, without limit, only while the yielded event is set."""
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
    with open_store(run) as store, open_router(run, store) as router:
        while not stops.is_set():
            store.set_phase("training" if admits.is_set() else "finishing")
            router.step(timeout_s=0.05)


def _publish(run: RunConfig, stops: Event) -> None:
    """Publish version 0 to the generator once it has joined."""
    device = torch.device("cpu")
    session = join_run(run, "learner", "learner")
    ranks = join_ranks(rank=0, size=1, device=device, timeout_s=JOIN_TIMEOUT_S)
    trainer = build_trainer(run, ranks=ranks)
    publisher = Publisher(
        client=session.client,
        inbox=session.inbox,
        sender=CollectiveSender(device=device),
        config=run.weights,
    )
    names = trainer.engine.model.checkpoint_names
    stager = Stager(run.weights, metadata=names.metadata(getattr(torch, run.model.dtype)))
    weights = names.convert(trainer.engine.gather_parameters())
    publisher.set_version(stager.stage(version=0, weights=weights, canary=trainer.canary()))
    while not stops.wait(0.2):
        if publisher.is_due:
            publisher.synchronize()
    publisher.close()
    session.thread.stop()
