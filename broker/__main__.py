"""python -m broker [overrides]: start the broker, and the embedded store when nobody has."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import structlog

from broker.archiver import ArchiverThread
from broker.dataset import Dataset
from broker.errors import BrokerFault
from broker.logs import configure_logs
from broker.process import die_with_launcher, has_launcher, on_stop_signal
from broker.router import Router
from broker.run_folder import RunFolder
from broker.zmq_channels import ZmqServerChannel
from buffer.embedded_redis import EmbeddedRedis
from buffer.errors import BufferFault, RunConflict
from buffer.open_store import open_store
from buffer.redis_store import RedisStore
from configs.buffer import EmbeddedRedisConfig, RedisConfig
from configs.exits import fail_cleanly
from configs.load import load
from configs.run import RunConfig

_STORE_TIMEOUT_S = 30.0
_ARCHIVE_TIMEOUT_S = 3.0

log = structlog.get_logger(__name__)


@fail_cleanly(BrokerFault, BufferFault)
def main(overrides: list[str]) -> None:
    """Run until SIGTERM or SIGINT."""
    run = load(overrides)
    configure_logs("broker")
    die_with_launcher()
    train, heldout = Dataset(Path(run.data.train_path)), Dataset(Path(run.data.heldout_path))
    channel = ZmqServerChannel(run.broker.address, max_message_bytes=run.broker.max_message_bytes)
    folder = RunFolder(run)
    folder.open()
    server = _start_server(run, folder)
    url = _store_url(run, server)
    store = open_store(url, run.name, timeout_s=_STORE_TIMEOUT_S, max_attempts=run.buffer.max_attempts)
    try:
        _serve(run, folder, channel, store, train=train, heldout=heldout, store_url=url)
    finally:
        channel.close()
        store.close()
        if server and not has_launcher():
            server.stop()


def _start_server(run: RunConfig, folder: RunFolder) -> EmbeddedRedis | None:
    if not isinstance(run.buffer.store, EmbeddedRedisConfig):
        return None
    server = EmbeddedRedis(
        folder.store, durability=run.buffer.store.durability, max_memory_mib=run.buffer.store.max_memory_mib
    )
    server.start()
    return server


def _store_url(run: RunConfig, server: EmbeddedRedis | None) -> str:
    if server:
        return server.url
    assert isinstance(run.buffer.store, RedisConfig)
    return run.buffer.store.url


def _serve(
    run: RunConfig,
    folder: RunFolder,
    channel: ZmqServerChannel,
    store: RedisStore,
    *,
    train: Dataset,
    heldout: Dataset,
    store_url: str,
) -> None:
    config_json = msgspec.json.encode(run).decode()
    state = store.open_run(
        run.name,
        config_json=config_json,
        num_rows=len(train),
        seed=run.seed,
        keeps_finished=run.buffer.archive.enabled,
    )
    if state.phase == "finished" and not run.resume:
        raise RunConflict(
            f"run {run.name!r} must not be finished, got {state.step} steps and a summary in {folder.path}: "
            "choose another with name=..., or train on with resume=true and a larger learner.max_steps."
        )
    router = Router(channel, store, run=run, config_json=config_json, train=train, heldout=heldout, store_url=store_url)
    stopping = on_stop_signal(lambda: None)
    log.info("listening", address=run.broker.address, store=store_url, step=state.step, version=state.version)
    with _archiving(run, folder, store_url):
        while not stopping.is_set():
            router.step(timeout_s=0.2)
        router.drain_all(reason="the broker stops")
    log.info("stopped")


@contextmanager
def _archiving(run: RunConfig, folder: RunFolder, store_url: str) -> Iterator[None]:
    """Have groups that are over archived meanwhile; what is left at the end waits in the store for the next broker."""
    if not run.buffer.archive.enabled:
        yield
        return
    connect = partial(open_store, store_url, run.name, timeout_s=_STORE_TIMEOUT_S)
    archiver = ArchiverThread(connect, folder.archive, run.buffer.archive)
    archiver.start()
    try:
        yield
    finally:
        archiver.stop(timeout_s=_ARCHIVE_TIMEOUT_S)


if __name__ == "__main__":
    main(sys.argv[1:])
