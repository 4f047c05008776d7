"""python -m slipstream.broker [--shard N] [KEY=VALUE]...: start a broker and, without a launcher, the embedded store.

python -m slipstream.broker experiment=digits_cpu name=mine                         on this machine
python -m slipstream.broker name=mine broker.token_file=token                       with your own token

--shard N                       number of this broker, from 0, in a run with several; number 0 starts the store

Common settings, which must match the learner's:
  experiment=PRESET, name=NAME  the run; resume=true continues it
  broker.address=ADDRESS        a port (tcp://127.0.0.1:5757) instead of the unix socket in the run folder
  broker.token_file=FILE        the run's secret; by default created in the run folder
  buffer/store=embedded         or redis, with buffer.store.url=redis://HOST:PORT/0
  staleness.max_lag=4           maximum lag of a trajectory, versions
  data.train=FILE               prompts, in Parquet, CSV, or JSON lines

All settings: docs/settings.md; `slipstream config` prints them with their values.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial

import structlog

from slipstream.broker.archiver import ArchiverThread
from slipstream.broker.chief import Chief
from slipstream.broker.dataset import Dataset, open_datasets, with_epochs
from slipstream.broker.errors import BrokerError
from slipstream.broker.router import Router
from slipstream.broker.transport.zmq_channels import ZmqServerChannel, listen
from slipstream.buffer.errors import ReplayBufferError, RunConflictError, StoreUnavailableError
from slipstream.buffer.object_folder import UPLOAD_TIMEOUT_S, open_storage
from slipstream.buffer.records import RunState
from slipstream.buffer.redis.embedded import EmbeddedRedis, RedisSupervisor
from slipstream.buffer.redis.run_store import begin_run, open_run_store, store_url
from slipstream.buffer.role_reports import LAUNCHER
from slipstream.buffer.sampling import RowCount
from slipstream.cluster.observers import Observers, check_observers, observed
from slipstream.configs.base import require
from slipstream.configs.broker import FIRST_BROKER
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.runtime.command_line import exit_after_help, fail_cleanly
from slipstream.runtime.credentials import derive_keys, make_token, write_guest_tokens
from slipstream.runtime.logs import configure_logs
from slipstream.runtime.model_files import fingerprint
from slipstream.runtime.process import ended_beside, exempt_from_collection, has_launcher, launcher_pid, on_stop_signal
from slipstream.runtime.run_folder import RunFolder

_ARCHIVE_TIMEOUT_S = 4.0
_STORAGE_TIMEOUT_S = 20.0
"""Time limit for retries of the object store, seconds."""
_ANSWER_TIMEOUT_S = 3.0
"""Timeout of one store operation; the broker serves no peer while it waits."""

log = structlog.get_logger(__name__)


@fail_cleanly(BrokerError, ReplayBufferError)
def main(overrides: list[str]) -> None:
    """Run until SIGTERM or SIGINT."""
    exit_after_help(overrides, __doc__)
    shard, overrides = split_shard(overrides)
    run = with_epochs(load(overrides))
    is_one = shard.isdecimal() and shard.isascii() and int(shard) < run.broker.shards
    must = f"be a number from 0 to {run.broker.shards - 1}"
    require(is_one, "--shard", must, got=shard or "none", why="broker.shards says how many brokers the run has")
    name = run.broker.names[int(shard)]
    configure_logs(name)
    # Check the configuration before the store starts.
    train, heldout = open_datasets(run)
    folder = RunFolder(run)
    folder.make()
    folder.record_process(name)
    folder.record_stage(name, "prompts read")
    is_first = name == FIRST_BROKER
    if is_first and not has_launcher():
        check_observers(run)
        folder.lock()
    keys = derive_keys(make_token(run), guests=run.cluster.untrusted_generators.names)
    address = folder.broker_addresses[name]
    channel = listen(address, keys=keys, cluster=run.cluster, previous=folder.read_address(name))
    if is_first:
        folder.open()
        write_guest_tokens(folder, keys)
    folder.write_address(channel.address, broker=name)
    supervisor: RedisSupervisor | None = None
    store = run.buffer.store
    if is_first and not has_launcher() and isinstance(store, EmbeddedRedisConfig):
        server = EmbeddedRedis(folder.store, durability=store.durability, max_memory_mib=store.max_memory_mib)
        supervisor = RedisSupervisor(server, start_timeout_s=run.broker.store_timeout_s)
    try:
        if supervisor:
            supervisor.start()
        _serve(run, folder, channel, supervisor, name=name, train=train, heldout=heldout)
    finally:
        channel.close()
        if supervisor:
            supervisor.stop()
        folder.unlock()


def split_shard(arguments: list[str]) -> tuple[str, list[str]]:
    """Word after `--shard` (default "0") and the overrides."""
    if "--shard" not in arguments:
        return "0", arguments
    at = arguments.index("--shard")
    return "".join(arguments[at + 1 : at + 2]), arguments[:at] + arguments[at + 2 :]


def _serve(
    run: RunConfig,
    folder: RunFolder,
    channel: ZmqServerChannel,
    supervisor: RedisSupervisor | None,
    *,
    name: str,
    train: Dataset,
    heldout: Mapping[str, Dataset],
) -> None:
    url = store_url(run, folder.path)
    state = _open_run(run, url, num_rows=train.row_count)
    # No retries: peers must learn of an outage.
    store = open_run_store(url, run.name, timeout_s=run.broker.store_timeout_s, answer_timeout_s=_ANSWER_TIMEOUT_S)
    router = Router(
        channel,
        store,
        run=run,
        train=train,
        heldout=heldout,
        store_url=url,
        model=fingerprint(run.model.path),
        name=name,
        address=folder.read_address(name),
    )
    is_stopping = on_stop_signal(lambda: None)
    # A step longer than the ping interval could count as a pause of this process.
    step_s = min(0.2, run.broker.heartbeat_s)
    exempt_from_collection()
    folder.record_stage(name, "listening")
    log.info("listening", address=channel.address, store=url, step=state.step, version=state.version)
    # Without a launcher, the first broker runs loggers and exporter.
    observing: AbstractContextManager[Observers | None] = nullcontext()
    if name == FIRST_BROKER and not has_launcher():
        observing = observed(run, logs=folder.logs)
    with closing(store), observing as observers, _archiving(run, folder, url, router.chief):
        while not is_stopping():
            router.step(timeout_s=step_s)
            sentences = (supervisor.poll() if supervisor else []) + (observers.poll() if observers else [])
            for sentence in sentences:
                log.warning(sentence)
        # Otherwise a launcher or another broker takes care of the generators.
        if not (has_launcher() or router.chief.has_living_others):
            router.drain_all(reason="the broker stops")
    log.info("stopped")
    folder.record_stage(name, "stopped")


def _open_run(run: RunConfig, url: str, *, num_rows: RowCount) -> RunState:
    timeout_s = run.broker.store_timeout_s
    with open_run_store(url, run.name, timeout_s=timeout_s, retry_timeout_s=timeout_s) as store:
        state = begin_run(store, run, num_rows=num_rows)
        is_served = store.roles().get(LAUNCHER, {}).get("pid") == launcher_pid()
    # A broker that restarts late may find this launcher's run finished.
    if state.phase == "finished" and not (run.resume or is_served):
        raise RunConflictError(
            f"run {run.name!r} must not be finished, got {state.step} steps and a summary in {RunFolder(run).path}: "
            "choose another with name=..., or continue it with resume=true and a larger learner.max_steps."
        )
    return state


@contextmanager
def _archiving(run: RunConfig, folder: RunFolder, store_url: str, chief: Chief) -> Iterator[None]:
    """Archive finished groups during the block while this broker is the chief."""
    if not run.buffer.archive.is_enabled:
        yield
        return
    connect = partial(open_run_store, store_url, run.name, timeout_s=run.broker.store_timeout_s)
    storage = open_storage(run, timeout_s=_STORAGE_TIMEOUT_S)
    archive = storage and storage.child(folder.archive.name)
    archiver = ArchiverThread(
        connect, folder.archive, run.buffer.archive, storage=archive, lead=lambda: chief.fence or None
    )
    archiver.start()

    def stay_chief() -> None:
        with suppress(StoreUnavailableError):
            chief.report(num_generators=0)

    try:
        yield
    finally:
        if not archiver.stop(timeout_s=UPLOAD_TIMEOUT_S if storage else _ARCHIVE_TIMEOUT_S, meanwhile=stay_chief):
            log.warning("archive_unfinished", reason=archiver.status().reason, folder=str(folder.archive))


if __name__ == "__main__":
    with ended_beside("archiver"):
        main(sys.argv[1:])
