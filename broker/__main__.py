"""python -m broker [KEY=VALUE]...: start the broker and, without a launcher, the embedded store.

python -m broker experiment=digits_cpu name=mine                         on this machine
python -m broker name=mine broker.token_file=token                       with a token of your own

Most used settings; those of the learner must be the same:
  experiment=PRESET, name=NAME  the run; resume=true continues it
  broker.address=ADDRESS        a port (tcp://127.0.0.1:5757) in place of the unix socket in the run folder
  broker.token_file=FILE        secret of the run; by default one is made in the run folder
  buffer/store=embedded         or redis, with buffer.store.url=redis://HOST:PORT/0
  buffer.staleness.max_lag=4    versions that a trajectory may be old
  data.train=FILE               prompts, in Parquet or JSON lines

All settings: docs/settings.md; `slipstream config` prints them with their values.
Outside a checkout the module is called slipstream.broker.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial

import msgspec
import structlog

from slipstream.broker.archiver import ArchiverThread
from slipstream.broker.credentials import derive_keys, make_token, write_guest_tokens
from slipstream.broker.errors import BrokerError
from slipstream.broker.prompts.dataset import Dataset, open_datasets
from slipstream.broker.router import Router
from slipstream.broker.transport.interface import listen
from slipstream.broker.transport.zmq_channels import ZmqServerChannel
from slipstream.buffer.errors import ReplayBufferError, RunConflictError
from slipstream.buffer.object_folder import UPLOAD_TIMEOUT_S, open_storage
from slipstream.buffer.records import RunState
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store, store_url
from slipstream.buffer.redis.supervisor import RedisSupervisor
from slipstream.buffer.sampling import RowCount
from slipstream.cluster.observers import Observers, check_observers, observed
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.runtime.command_line import exit_after_help, fail_cleanly
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.model_files import fingerprint
from slipstream.runtime.process import ended_beside, exempt_from_collection, has_launcher, on_stop_signal
from slipstream.runtime.run_folder import RunFolder

_ARCHIVE_TIMEOUT_S = 3.0
_STORAGE_TIMEOUT_S = 20.0
"""Failures of the object store, seconds, after which the archiver reports them; it tries again then."""
_ANSWER_TIMEOUT_S = 3.0
"""Timeout of one store operation, seconds: while the broker waits for it, no peer is served."""

log = structlog.get_logger(__name__)


@fail_cleanly(BrokerError, ReplayBufferError)
def main(overrides: list[str]) -> None:
    """Run until SIGTERM or SIGINT."""
    exit_after_help(overrides, __doc__)
    run = load(overrides)
    configure_logs("broker")
    # Whatever the user can get wrong is checked before the store starts.
    train, heldout = open_datasets(run)
    folder = RunFolder(run)
    folder.make()
    if not has_launcher():
        check_observers(run)
        folder.lock()
    keys = derive_keys(make_token(run), guests=run.cluster.guests.names)
    channel = listen(folder.broker_address, keys=keys, cluster=run.cluster, before=folder.read_address())
    folder.open()
    folder.write_address(channel.address)
    write_guest_tokens(folder, keys)
    supervisor = _make_supervisor(run, folder)
    try:
        if supervisor:
            supervisor.start()
        _serve(run, folder, channel, supervisor, train=train, heldout=heldout)
    finally:
        channel.close()
        if supervisor:
            supervisor.stop()
        folder.unlock()


def _make_supervisor(run: RunConfig, folder: RunFolder) -> RedisSupervisor | None:
    """Supervisor of the embedded store; None if the launcher runs it or the store is external."""
    store = run.buffer.store
    if has_launcher() or not isinstance(store, EmbeddedRedisConfig):
        return None
    server = EmbeddedRedis(folder.store, durability=store.durability, max_memory_mib=store.max_memory_mib)
    return RedisSupervisor(server, start_timeout_s=run.buffer.retry_timeout_s)


def _serve(
    run: RunConfig,
    folder: RunFolder,
    channel: ZmqServerChannel,
    supervisor: RedisSupervisor | None,
    *,
    train: Dataset,
    heldout: Mapping[str, Dataset],
) -> None:
    config_json = msgspec.json.encode(run).decode()
    url = store_url(run, folder.path)
    state = _open_run(run, url, config_json=config_json, num_rows=train.row_count)
    # Without retries: during an outage peers must be answered that the store is unavailable.
    store = open_run_store(
        url,
        run.name,
        timeout_s=run.buffer.retry_timeout_s,
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
        model=fingerprint(run.model.path),
    )
    is_stopping = on_stop_signal(lambda: None)
    exempt_from_collection()
    log.info("listening", address=channel.address, store=url, step=state.step, version=state.version)
    with closing(store), _observing(run, folder) as observers, _archiving(run, folder, url):
        while not is_stopping():
            router.step(timeout_s=0.2)
            beside = (supervisor.poll() if supervisor else []) + (observers.poll() if observers else [])
            for sentence in beside:
                log.warning(sentence)
        # A launcher restarts the broker, or ends the generators itself.
        if not has_launcher():
            router.drain_all(reason="the broker stops")
    log.info("stopped")


def _open_run(run: RunConfig, url: str, *, config_json: str, num_rows: RowCount) -> RunState:
    """Begin or continue the run. Raises RunConflictError if it is finished."""
    timeout_s = run.buffer.retry_timeout_s
    with open_run_store(url, run.name, timeout_s=timeout_s, retry_timeout_s=timeout_s) as store:
        state = store.open_run(
            run.name,
            config_json=config_json,
            num_rows=num_rows,
            seed=run.seed,
            keeps_finished=run.buffer.archive.enabled,
            max_uses=run.buffer.reuse.max_uses,
            group_filter=run.buffer.filter,
            curriculum=run.data.curriculum,
        )
    if state.phase == "finished" and not run.resume:
        raise RunConflictError(
            f"run {run.name!r} must not be finished, got {state.step} steps and a summary in {RunFolder(run).path}: "
            "choose another with name=..., or continue it with resume=true and a larger learner.max_steps."
        )
    return state


@contextmanager
def _observing(run: RunConfig, folder: RunFolder) -> Iterator[Observers | None]:
    """Run loggers and exporter during the block, unless a launcher does."""
    if has_launcher():
        yield None
        return
    with observed(run, logs=folder.logs) as observers:
        yield observers


@contextmanager
def _archiving(run: RunConfig, folder: RunFolder, store_url: str) -> Iterator[None]:
    """Archive finished groups during the block; the rest stays in the store for the next broker."""
    if not run.buffer.archive.enabled:
        yield
        return
    connect = partial(open_run_store, store_url, run.name, timeout_s=run.buffer.retry_timeout_s)
    storage = open_storage(run, timeout_s=_STORAGE_TIMEOUT_S)
    archive = storage and storage.child(folder.archive.name)
    archiver = ArchiverThread(connect, folder.archive, run.buffer.archive, storage=archive)
    archiver.start()
    try:
        yield
    finally:
        if not archiver.stop(timeout_s=UPLOAD_TIMEOUT_S if storage else _ARCHIVE_TIMEOUT_S):
            log.warning("archive_unfinished", reason=archiver.status().reason, folder=str(folder.archive))


if __name__ == "__main__":
    with ended_beside("archiver"):
        main(sys.argv[1:])
