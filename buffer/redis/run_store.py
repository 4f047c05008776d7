"""The store of a run folder, to look into: the one that is live, or the run's own server started for the look."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.redis.connect import await_answer, connect, open_store
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.store import RedisStore
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import EmbeddedRedisConfig, RedisConfig
from slipstream.configs.run import RunConfig

_ANSWER_TIMEOUT_S = 30.0


def read_config(folder: Path) -> RunConfig:
    """The resolved configuration of a run folder. Raises ConfigError when there is none."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} must be a run folder, but has no config.yaml: name one, such as runs/digits_cpu.")
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=RunConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} must be a run's configuration of this version of Slipstream, got {error}.") from None


def store_url(run: RunConfig, folder: Path) -> str:
    """Where the store of a run with this folder listens. Raises ConfigError when it is in no process of its own."""
    config = run.buffer.store
    if isinstance(config, RedisConfig):
        return config.url
    if not isinstance(config, EmbeddedRedisConfig):
        raise ConfigError(f"run {run.name!r} must have a store to look into, but keeps it in memory (mode={run.mode}).")
    return EmbeddedRedis(folder / "store").url


@contextmanager
def stored_run(folder: Path) -> Iterator[RedisStore]:
    """The store of a run. A server started here is stopped again; one that runs already is left alone.

    Raises ConfigError when the folder is no run's or the run kept nothing, StoreUnavailableError when nobody answers.
    """
    run = read_config(folder)
    config = run.buffer.store
    if isinstance(config, RedisConfig):
        with _opened(config.url, run) as store:
            yield store
        return
    if not isinstance(config, EmbeddedRedisConfig) or not (folder / "store").is_dir():
        raise ConfigError(f"run {run.name!r} must have a store that outlives its processes, but kept it in memory.")
    server = EmbeddedRedis(folder / "store", durability=config.durability, max_memory_mib=config.max_memory_mib)
    was_running = _answers(server.url)
    server.start(timeout_s=_ANSWER_TIMEOUT_S)
    try:
        with _opened(server.url, run) as store:
            yield store
    finally:
        if not was_running:
            server.stop()


def _answers(url: str) -> bool:
    client = connect(url)
    try:
        await_answer(client, timeout_s=0)
    except StoreUnavailableError:
        return False
    finally:
        client.close()
    return True


@contextmanager
def _opened(url: str, run: RunConfig) -> Iterator[RedisStore]:
    store = open_store(url, run.name, timeout_s=_ANSWER_TIMEOUT_S, max_attempts=run.buffer.max_attempts)
    try:
        # Refuses a run that is stored in a way this version would misread.
        store.run_state()
        yield store
    finally:
        store.close()


# @@ run_store: the store of a run that goes on, found by its folder; for commands that look at it or ask something.
ANSWER_TIMEOUT_S = 3.0
"""Longest answer of the store."""


@contextmanager
def open_store_of(folder: Path) -> Iterator[tuple[RedisStore, RunConfig]]:
    """The run's store and settings. Never starts a server: that is for those who keep the store.

    Raises ConfigError, StoreUnavailableError.
    """
    run = read_config(folder)
    store = open_store(store_url(run, folder), run.name, timeout_s=ANSWER_TIMEOUT_S, answer_timeout_s=ANSWER_TIMEOUT_S)
    with closing(store):
        yield store, run
