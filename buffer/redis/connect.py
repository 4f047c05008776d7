"""Connects to a Redis or Valkey server and refuses one that could lose trajectories."""

import os
import time
from typing import Any

import redis
from redis.typing import EncodableT

from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.redis.connection import address_of
from slipstream.buffer.redis.retry import RetryPolicy, refuses_writes
from slipstream.buffer.redis.store import RedisStore


# @@ CommandPacker: packs a command for Redis into one piece, so that it leaves with one write.
#
# redis-py's own packer makes a piece of its own, and so a write, of every argument above 6 kB: two for each trajectory.
class CommandPacker:
    """Fulfils redis-py's packer."""

    def pack(self, *args: EncodableT) -> list[bytes]:
        """The command in RESP. Raises TypeError for an argument that is not bytes, text or a number."""
        # A command's name may be two words, such as SCRIPT LOAD.
        words = [*_as_bytes(args[0]).split(), *map(_as_bytes, args[1:])]
        pieces = [b"*%d\r\n" % len(words)]
        for word in words:
            pieces += (b"$%d\r\n" % len(word), word, b"\r\n")
        return [b"".join(pieces)]


def _as_bytes(argument: EncodableT) -> bytes:
    if isinstance(argument, bytes):
        return argument
    if isinstance(argument, bool) or not isinstance(argument, str | int | float):
        raise TypeError(f"Redis takes bytes, text and numbers, got {type(argument).__name__}")
    return (repr(argument) if isinstance(argument, float) else str(argument)).encode()


PASSWORD_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD"
"""Environment variable, because a password in the config would end up in logs and run folders."""
OLDEST_REDIS = (6, 2)
"""The first one with every command the scripts use."""

ANSWER_TIMEOUT_S = 30.0
"""Longest wait for one answer; above the longest blocking call of RedisStore."""
_TICK_S = 0.1
"""Between two tries to connect."""


def open_store(
    url: str,
    run_id: str,
    *,
    timeout_s: float,
    max_attempts: int = 5,
    patience_s: float = 0.0,
    answer_timeout_s: float = ANSWER_TIMEOUT_S,
) -> RedisStore:
    """The store of run `run_id` at `url`, waiting at most `timeout_s` for the server to answer.

    `max_attempts`: leases or claims of one group before it is put into quarantine. `patience_s`: how long each
    operation is repeated when the server goes away or takes no writes; a role that must not block leaves it at 0 and
    gives an `answer_timeout_s` it can afford. Raises StoreUnavailableError when nobody answers, the password is wrong, the
    server is too old, or it may evict keys.
    """
    client = connect(url)
    try:
        _await_good_server(client, timeout_s=timeout_s)
    except redis.RedisError as error:
        raise StoreUnavailableError(f"the store at {address_of(client)} refused the connection: {error}.") from error
    finally:
        client.close()
    patience = RetryPolicy(patience_s, what=f"the store at {address_of(client)}") if patience_s else None
    client = connect(url, patience=patience, answer_timeout_s=answer_timeout_s)
    return RedisStore(client, run_id, max_attempts=max_attempts, patience=patience)


def connect(
    url: str, *, patience: RetryPolicy | None = None, answer_timeout_s: float = ANSWER_TIMEOUT_S
) -> redis.Redis:
    """A client that answers in bytes; it connects with the first command.

    Without `patience` it never repeats a command: whether one whose answer got lost may be repeated, only its caller
    knows.
    """
    retry = patience or RetryPolicy(0.0, what=url)
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": retry,
        "socket_timeout": answer_timeout_s,
        "command_packer": CommandPacker(),
    }
    if password := os.environ.get(PASSWORD_VARIABLE):
        options["password"] = password
    try:
        return redis.Redis.from_url(url, **options)
    except ValueError as error:
        raise StoreUnavailableError(
            f"buffer.store.url must be a redis://, rediss:// or unix:// address, got {url!r}: {error}."
        ) from None


def await_answer(client: redis.Redis, *, timeout_s: float) -> None:
    """Block until the server answers, also while it still loads its data. Raises StoreUnavailableError after `timeout_s`.

    One that takes no writes answers: reading it is possible, and writing has a patience of its own.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.ping()
            return
        except redis.AuthenticationError:
            raise
        except redis.ResponseError as error:
            if refuses_writes(error):
                return
            raise
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if time.monotonic() >= deadline:
                raise StoreUnavailableError(
                    f"no store answered at {address_of(client)} within {timeout_s:g} s ({error}): start the run's "
                    "broker (an embedded store starts with it), or correct buffer.store.url."
                ) from error
        time.sleep(_TICK_S)


def _await_good_server(client: redis.Redis, *, timeout_s: float) -> None:
    """One that dies between its first answer and the next is waited for again."""
    deadline, left_s = time.monotonic() + timeout_s, timeout_s
    while True:
        await_answer(client, timeout_s=left_s)
        try:
            return _check_server(client)
        except (redis.ConnectionError, redis.TimeoutError):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise


def _check_server(client: redis.Redis) -> None:
    facts = client.info("server") | client.info("memory")
    version = tuple(int(part) for part in str(facts["redis_version"]).split(".")[:2])
    if version < OLDEST_REDIS:
        raise StoreUnavailableError(
            f"the store at {address_of(client)} must be Redis 6.2 or newer (or Valkey), got {facts['redis_version']}."
        )
    policy = facts.get("maxmemory_policy", "noeviction")
    if int(facts.get("maxmemory", 0)) > 0 and policy != "noeviction":
        raise StoreUnavailableError(
            f"maxmemory-policy of the store at {address_of(client)} must be noeviction, got {policy}: Redis would "
            "drop trajectories silently; run `CONFIG SET maxmemory-policy noeviction` or use another server."
        )
