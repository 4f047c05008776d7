"""Open a run's store, by address or by run folder."""

import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec

from slipstream.buffer.records import RunState
from slipstream.buffer.redis.connection import ANSWER_TIMEOUT_S, RetryPolicy, await_usable_server, connect
from slipstream.buffer.redis.embedded import IDLE_TIMEOUT_S, EmbeddedRedis
from slipstream.buffer.redis.store import RedisStore
from slipstream.buffer.sampling import RowCount
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import RedisConfig
from slipstream.configs.run import RunConfig, read_config
from slipstream.runtime.run_folder import is_held

COMMAND_TIMEOUT_S = 3.0
"""Timeout of commands that inspect a live run."""


def open_run_store(
    where: str | Path,
    run_id: str = "",
    *,
    timeout_s: float,
    retry_timeout_s: float = 0.0,
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
    starts_server: bool = False,
    idle_timeout_s: float | None = None,
) -> RedisStore:
    """Open the store of `run_id` at the address `where`, or of the run folder `where`.

    Blocks for at most `timeout_s` until the server answers. `retry_timeout_s`: retries of each operation; a role that
    must not block leaves it at 0 and sets `answer_timeout_s`. `starts_server`: start the embedded server of a finished
    run; on close, stop it unless a process holds the run. With `idle_timeout_s`, it exits after idling instead.

    Raises StoreUnavailableError; for a run folder also ConfigError if it holds no data, and RunConflictError for
    another key layout.
    """
    if isinstance(where, Path):
        run = read_config(where)
        url, run_id = store_url(run, where), run.name
        idle_s = idle_timeout_s or IDLE_TIMEOUT_S
        server = _start_server(run, where, timeout_s=timeout_s, idle_timeout_s=idle_s) if starts_server else None
    else:
        url, server = where, None
    try:
        address = await_usable_server(url, timeout_s=timeout_s)
        retry = RetryPolicy(retry_timeout_s, target=f"the store at {address}") if retry_timeout_s else None
        client = connect(url, retry=retry, answer_timeout_s=answer_timeout_s)
        on_close = partial(_stop_unless_held, server) if server and idle_timeout_s is None else None
        store = RedisStore(client, run_id, retry=retry, on_close=on_close)
        if isinstance(where, Path):
            # Fails if this version would misread the key layout.
            store.run_state()
        return store
    except Exception:
        if server:
            _stop_unless_held(server)
        raise


def begin_run(store: RedisStore, run: RunConfig, *, num_rows: RowCount) -> RunState:
    """Call `RedisStore.open_run` with the run's settings."""
    return store.open_run(
        run.name,
        config_json=msgspec.json.encode(run).decode(),
        num_rows=num_rows,
        seed=run.seed,
        keeps_finished=run.buffer.archive.is_enabled,
        max_uses=run.buffer.reuse.max_uses,
        group_filter=run.buffer.filter,
        curriculum=run.data.curriculum,
    )


def open_own_store(
    directory: Path, run_id: str, *, max_memory_mib: int = 1024, clock: Callable[[], float] | None = None
) -> RedisStore:
    """Start a server for this process only, without data on disk, and open a store on it.

    Closing the store stops the server. Raises StoreUnavailableError.
    """
    server = EmbeddedRedis(directory, durability="fast", max_memory_mib=max_memory_mib)
    server.start()
    return RedisStore(connect(server.url), run_id, clock=clock, on_close=server.stop)


def store_url(run: RunConfig, folder: Path) -> str:
    """Address of the run's store. Raises ConfigError if it has none, or one private to its process."""
    config = run.buffer.store
    if run.mode == "sft":
        found = f"mode=sft has none: see {folder / 'metrics.jsonl'}"
        raise ConfigError(f"run {run.name!r} must have a store to inspect, but {found}.")
    if isinstance(config, RedisConfig):
        if config.tls_ca_file is None:
            return config.url
        path = Path(config.tls_ca_file)
        try:
            ssl.create_default_context(cafile=path)
        except OSError as error:
            got = f"{path}: {error.strerror or error}"
            raise ConfigError(f"buffer.store.tls_ca_file must be a file of certificates in PEM, got {got}.") from None
        # redis-py reads the file from the address.
        return f"{config.url}{'&' if '?' in config.url else '?'}ssl_ca_certs={quote(str(path.resolve()), safe='')}"
    if run.is_one_process:
        raise ConfigError(
            f"run {run.name!r} must have a store to inspect, but with mode={run.mode} it is private and exists only "
            f"while the run does: the archived data is in {folder / 'archive'}."
        )
    return EmbeddedRedis(folder / "store").url


def _start_server(run: RunConfig, folder: Path, *, timeout_s: float, idle_timeout_s: float) -> EmbeddedRedis | None:
    config = run.buffer.store
    if isinstance(config, RedisConfig):
        return None
    data, limit = folder / "store", config.max_memory_mib
    if not data.is_dir():
        raise ConfigError(f"run {run.name!r} must have a store, but {data} is not there: it was deleted.")
    server = EmbeddedRedis(data, durability=config.durability, max_memory_mib=limit, idle_timeout_s=idle_timeout_s)
    if server.is_listening:
        return None
    server.start(timeout_s=timeout_s)
    return server


def _stop_unless_held(server: EmbeddedRedis) -> None:
    # The run may have been resumed.
    if not is_held(server.directory.parent):
        server.stop()
