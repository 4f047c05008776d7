"""python -m broker [overrides]: start the broker, and keep the embedded store when no launcher does."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
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
from broker.token import read_token
from broker.zmq_channels import ZmqServerChannel
from buffer.embedded_redis import EmbeddedRedis
from buffer.errors import BufferFault, RunConflict
from buffer.open_store import open_store
from buffer.records import RunState
from buffer.store_keeper import StoreKeeper
from buffer.stored_run import store_url
from configs.buffer import EmbeddedRedisConfig
from configs.exits import fail_cleanly
from configs.load import load
from configs.model_fingerprint import fingerprint
from configs.run import RunConfig

_ARCHIVE_TIMEOUT_S = 3.0
_ANSWER_TIMEOUT_S = 3.0
"""For one answer of the store: while the broker waits for it, no peer is heard."""

log = structlog.get_logger(__name__)


@fail_cleanly(BrokerFault, BufferFault)
def main(overrides: list[str]) -> None:
    """Run until SIGTERM or SIGINT."""
    run = load(overrides)
    configure_logs("broker")
    die_with_launcher()
    token = read_token(run.broker)
    train, heldout = Dataset(Path(run.data.train_path)), Dataset(Path(run.data.heldout_path))
    channel = ZmqServerChannel(run.broker.address, max_message_bytes=run.broker.max_message_bytes)
    folder = RunFolder(run)
    folder.open()
    keeper = _keeper(run, folder)
    try:
        if keeper:
            keeper.start()
        _serve(run, folder, channel, keeper, token=token, train=train, heldout=heldout)
    finally:
        channel.close()
        if keeper:
            keeper.stop()


def _keeper(run: RunConfig, folder: RunFolder) -> StoreKeeper | None:
    """Of the embedded store, when nobody else keeps it."""
    store = run.buffer.store
    if has_launcher() or not isinstance(store, EmbeddedRedisConfig):
        return None
    server = EmbeddedRedis(folder.store, durability=store.durability, max_memory_mib=store.max_memory_mib)
    return StoreKeeper(server, start_timeout_s=run.buffer.patience_s)


def _serve(
    run: RunConfig,
    folder: RunFolder,
    channel: ZmqServerChannel,
    keeper: StoreKeeper | None,
    *,
    token: str,
    train: Dataset,
    heldout: Dataset,
) -> None:
    config_json = msgspec.json.encode(run).decode()
    url = store_url(run, folder.path)
    state = _open_run(run, url, config_json=config_json, num_rows=len(train))
    # Without patience: the peers must be answered, that the store is away if need be.
    store = open_store(
        url,
        run.name,
        timeout_s=run.buffer.patience_s,
        max_attempts=run.buffer.max_attempts,
        answer_timeout_s=_ANSWER_TIMEOUT_S,
    )
    router = Router(
        channel,
        store,
        run=run,
        config_json=config_json,
        train=train,
        heldout=heldout,
        store_url=url,
        token=token,
        model=fingerprint(run.model.path),
    )
    stopping = on_stop_signal(lambda: None)
    log.info("listening", address=run.broker.address, store=url, step=state.step, version=state.version)
    with closing(store), _archiving(run, folder, url):
        while not stopping.is_set():
            router.step(timeout_s=0.2)
            for sentence in keeper.attend() if keeper else ():
                log.warning(sentence)
        # A launcher starts it again, or ends the generators itself.
        if not has_launcher():
            router.drain_all(reason="the broker stops")
    log.info("stopped")


def _open_run(run: RunConfig, url: str, *, config_json: str, num_rows: int) -> RunState:
    """Begin the run, or take it up. Raises RunConflict when it is over."""
    patience_s = run.buffer.patience_s
    with closing(open_store(url, run.name, timeout_s=patience_s, patience_s=patience_s)) as store:
        state = store.open_run(
            run.name,
            config_json=config_json,
            num_rows=num_rows,
            seed=run.seed,
            keeps_finished=run.buffer.archive.enabled,
            max_uses=run.buffer.reuse.max_uses,
            group_filter=run.buffer.filter,
        )
    if state.phase == "finished" and not run.resume:
        raise RunConflict(
            f"run {run.name!r} must not be finished, got {state.step} steps and a summary in {RunFolder(run).path}: "
            "choose another with name=..., or train on with resume=true and a larger learner.max_steps."
        )
    return state


@contextmanager
def _archiving(run: RunConfig, folder: RunFolder, store_url: str) -> Iterator[None]:
    """Have groups that are over archived meanwhile; what is left at the end waits in the store for the next broker."""
    if not run.buffer.archive.enabled:
        yield
        return
    connect = partial(open_store, store_url, run.name, timeout_s=run.buffer.patience_s)
    archiver = ArchiverThread(connect, folder.archive, run.buffer.archive)
    archiver.start()
    try:
        yield
    finally:
        archiver.stop(timeout_s=_ARCHIVE_TIMEOUT_S)


if __name__ == "__main__":
    main(sys.argv[1:])
