"""Access to Redis and Valkey: connects, checks the server, runs scripts, and maps errors to ours.

Every store operation may be repeated after a lost answer: docs/decisions/0008-what-survives-a-killed-store.md.
"""

import os
import re
import ssl
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, Self

import msgspec
import redis
import structlog
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry
from redis.typing import EncodableT

from slipstream.buffer.errors import RunConflictError, StaleFenceError, StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.sampling import RowCount
from slipstream.buffer.store_rules import no_run
from slipstream.configs.buffer import STORE_PASSWORD_VARIABLE
from slipstream.runtime.disk import describe_disk, is_disk_full

_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 0.5
"""Longest pause between attempts; delays noticing that the store is back."""
_COOLDOWN_S = 1.0
"""After a timed-out answer, for clients that do not retry."""
_LOG_EVERY_S = 5.0
_WRITES_REFUSED = ("MISCONF", "READONLY", "OOM command not allowed")

log = structlog.get_logger(__name__)

MAX_ATTEMPTS = 5
"""Leases or claims of a group before it is quarantined: its prompt may be poisonous."""


class RetryPolicy(Retry):
    """Retries a command until `timeout_s` after its first attempt, not counting time with a full disk. Thread-safe.

    With 0, it does not retry, and all commands fail immediately for a second after a timeout, so that a suspended
    server delays a loop only once per second.
    """

    def __init__(self, timeout_s: float, *, target: str) -> None:
        super().__init__(NoBackoff(), 0)
        self.timeout_s = timeout_s
        self._target = target
        self._waiting_since: dict[int, float] = {}
        self._is_disk_full = False
        self._thread = threading.local()
        self._next_log_at = 0.0
        self._cools_until = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: redis-py copies the policy into connections, which share its state."""
        return self

    @property
    def reason(self) -> str:
        """A sentence about the longest current wait; empty without any."""
        since = min(list(self._waiting_since.values()), default=None)
        if since is None:
            return ""
        if self._is_disk_full:
            return f"waiting {time.monotonic() - since:.0f} s for room on the disk of {self._target}"
        return f"waiting for {self._target} for {time.monotonic() - since:.0f} s of {self.timeout_s:g} s"

    def call_with_retry(self, *arguments: Any, **named: Any) -> Any:
        attempt = partial(super().call_with_retry, *arguments, **named)
        # A connection attempt is part of a command that is already being retried.
        if getattr(self._thread, "in_command", False):
            return attempt()
        self._thread.in_command = True
        try:
            return self._repeat(attempt) if self.timeout_s > 0 else self._try_once(attempt)
        finally:
            self._thread.in_command = False
            self._waiting_since.pop(threading.get_ident(), None)

    def _repeat(self, attempt: Callable[[], Any]) -> Any:
        began_at = counted_from = time.monotonic()
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return attempt()
            except Exception as error:
                now, has_full_disk = time.monotonic(), is_disk_full(error)
                counted_from = now if has_full_disk else counted_from
                if not is_transient(error) or now - counted_from >= self.timeout_s:
                    raise
                self._waiting_since.setdefault(threading.get_ident(), began_at)
                self._is_disk_full = has_full_disk
                if now >= self._next_log_at:
                    self._next_log_at = now + _LOG_EVERY_S
                    log.warning("waiting", for_=self._target, timeout_s=self.timeout_s, error=str(error))
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _try_once(self, attempt: Callable[[], Any]) -> Any:
        if time.monotonic() < self._cools_until:
            raise redis.TimeoutError("it did not answer a moment ago")
        try:
            return attempt()
        except redis.TimeoutError:
            self._cools_until = time.monotonic() + _COOLDOWN_S
            raise


def is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed: the store is unreachable, loading, or refusing writes."""
    if isinstance(error, redis.AuthenticationError):
        return False
    return isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError) or refuses_writes(error)


def refuses_writes(error: BaseException) -> bool:
    """Whether the server refuses writes: disk full, memory full, or a replica."""
    if isinstance(error, redis.ReadOnlyError | redis.OutOfMemoryError):
        return True
    return isinstance(error, redis.ResponseError) and any(word in str(error) for word in _WRITES_REFUSED)


# --- connecting -------------------------------------------------------------------------------------------------------
OLDEST_REDIS = (6, 2)
"""First version with every command in use."""
ANSWER_TIMEOUT_S = 30.0
"""Longer than any blocking call of RedisStore."""
_POLL_S = 0.1
_DENIED = ("NOPERM", "no permissions", "executing the script can't", "ACL failure")
"""Error texts for missing permissions; errors within scripts lose their type."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""TLS errors of a server that answers in plain text."""


def connect(url: str, *, retry: RetryPolicy | None = None, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> redis.Redis:
    """Client that returns bytes and connects with its first command.

    Without `retry` it never repeats a command, which only the caller knows to be safe. Raises StoreUnavailableError for
    an invalid address.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": retry or RetryPolicy(0.0, target=url),
        "socket_timeout": answer_timeout_s,
        "command_packer": CommandPacker(),
        # Its command needs a right that Redis 7.0 cannot grant alone.
        "driver_info": None,
    }
    if password := os.environ.get(STORE_PASSWORD_VARIABLE):
        options["password"] = password
    try:
        return redis.Redis.from_url(url, **options)
    except ValueError as error:
        must = "be a redis://, rediss:// or unix:// address"
        raise StoreUnavailableError(f"buffer.store.url must {must}, got {url!r}: {error}.") from None


def await_answer(client: redis.Redis, *, timeout_s: float) -> None:
    """Block until the server has loaded its data. Raises StoreUnavailableError after `timeout_s`.

    A server that refuses writes counts as loaded.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.ping()
            return
        except redis.AuthenticationError:
            # A ConnectionError in redis-py, but waiting does not help.
            raise
        except redis.ResponseError as error:
            if refuses_writes(error):
                return
            raise
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if failure := _tls_failure(error):
                raise StoreUnavailableError(f"the store at {address_of(client)} must {failure}") from error
            if time.monotonic() >= deadline:
                raise StoreUnavailableError(
                    f"no store answered at {address_of(client)} within {timeout_s:g} s ({error}): start the run's "
                    "broker (an embedded store starts with it), or correct buffer.store.url."
                ) from error
        time.sleep(_POLL_S)


def await_usable_server(url: str, *, timeout_s: float) -> str:
    """Block until the server answers; return its `address_of`.

    Raises StoreUnavailableError if it does not answer in time, denies access, is too old, or may evict keys.
    """
    client = connect(url)
    deadline, left_s = time.monotonic() + timeout_s, timeout_s
    try:
        while True:
            await_answer(client, timeout_s=left_s)
            try:
                _check_server(client)
                return address_of(client)
            except (redis.ConnectionError, redis.TimeoutError):
                # It died since it answered; its owner may be restarting it.
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
    except redis.AuthenticationError as error:
        raise StoreUnavailableError(
            f"the store at {address_of(client)} must take the password in {STORE_PASSWORD_VARIABLE}, got: {error}; set "
            "the variable to the store's password, or unset it for a store without one."
        ) from error
    except redis.RedisError as error:
        if is_denied(error):
            raise StoreUnavailableError(_lacks_right(client, error)) from error
        raise StoreUnavailableError(f"the store at {address_of(client)} refused the connection: {error}.") from error
    finally:
        client.close()


def _check_server(client: redis.Redis) -> None:
    info = client.info("server") | client.info("memory")
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < OLDEST_REDIS:
        must = f"the store at {address_of(client)} must be Redis 6.2 or newer (or Valkey)"
        raise StoreUnavailableError(f"{must}, got {info['redis_version']}.")
    # Without a memory limit, a server never evicts.
    policy = info.get("maxmemory_policy", "noeviction")
    if int(info.get("maxmemory", 0)) > 0 and policy != "noeviction":
        raise StoreUnavailableError(
            f"maxmemory-policy of the store at {address_of(client)} must be noeviction, got {policy}: Redis would "
            "drop trajectories silently; run `CONFIG SET maxmemory-policy noeviction`, set it among the parameters of "
            "a managed server, or use another server."
        )


def _tls_failure(error: BaseException) -> str:
    """Complete "the store must ..." for a TLS misconfiguration; empty for others, as a handshake cut by a restart."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"present a certificate of its name by a known authority, got: {cause.verify_message.rstrip('.')}; name "
            "the authority's file with buffer.store.tls_ca_file, or correct the host in buffer.store.url."
        )
    if cause is not None and cause.reason in _NO_TLS:
        return "speak TLS, got plain text: correct the port in buffer.store.url, or write redis:// in it."
    return ""


def is_denied(error: Exception) -> bool:
    """Whether the server's access control denies a command or key."""
    return any(words in str(error) for words in _DENIED)


def _lacks_right(client: redis.Redis, error: Exception) -> str:
    return (
        f"the store at {address_of(client)} must let its user do what a run needs, got: {error}; give it the rights in "
        "docs/cluster.md."
    )


def address_of(client: redis.Redis) -> str:
    """Address without user and password."""
    target = client.connection_pool.connection_kwargs
    if "path" in target:
        return f"unix://{target['path']}"
    scheme = "rediss" if issubclass(client.connection_pool.connection_class, redis.SSLConnection) else "redis"
    return f"{scheme}://{target.get('host', 'localhost')}:{target.get('port', 6379)}/{target.get('db', 0)}"


def describe_store_disk(client: redis.Redis) -> str:
    """Describe the disk that holds the server's data."""
    path = client.connection_pool.connection_kwargs.get("path")
    if path is None:
        return f"that of the store at {address_of(client)}"
    # The server's own folder: its socket may be elsewhere, in a shorter path.
    return describe_disk(Path(client.config_get("dir").get("dir") or path))


class CommandPacker:
    """Packs a command into one piece; redis-py's packer would start a write for every argument above 6 kB."""

    def pack(self, *args: EncodableT) -> list[bytes]:
        """Encode in RESP. Raises TypeError unless arguments are bytes, text, or numbers."""
        # A command can be two words, such as SCRIPT LOAD.
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


# --- one run's keys --------------------------------------------------------------------------------------------------
class RedisConnection:
    """A client bound to one run's keys, and the scripts on them."""

    def __init__(
        self,
        client: redis.Redis,
        run_id: str,
        *,
        max_attempts: int = MAX_ATTEMPTS,
        clock: Callable[[], float] | None = None,
        retry: RetryPolicy | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """`client` returns bytes. `retry`: its policy. `clock`: replaces the server's in tests, seconds. `on_close`
        runs after the connections are closed."""
        self._client = client
        self._run_id = run_id
        # The hash tag puts all keys of a run into one slot of a cluster.
        self._prefix = f"{{{run_id}}}:"
        self._max_attempts = max_attempts
        self._clock = clock
        self._retry = retry
        self._on_close = on_close
        self._scripts: dict[str, Script] = {}
        self._constants: tuple[RowCount, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting_for(self) -> str:
        return self._retry.reason if self._retry else ""

    def close(self) -> None:
        """Close the connections, and stop the server if it was started for this store."""
        self._client.close()
        if self._on_close:
            on_close, self._on_close = self._on_close, None
            on_close()

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _run(self, script: str, *arguments: Any) -> Any:
        """Run `<script>.lua` by its SHA, sending the text only if the server does not have it."""
        # Empty in production: scripts use the server's clock, which all roles share.
        now = "" if self._clock is None else str(int(self._clock() * 1000))
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(load_script(script))
        return self._call(self._scripts[script], keys=[self._prefix], args=[now, *arguments])

    def _run_as_chief(self, script: str, fence: int, *arguments: Any) -> Any:
        """Run a script of the chief. Raises StaleFenceError unless `fence` is the chief's."""
        try:
            return self._run(script, fence, *arguments)
        except StoreUnavailableError as error:
            # Errors within scripts lose their type.
            if "STALE" in str(error.__cause__):
                raise StaleFenceError(
                    f"a broker must be the chief of its run to do this, but its lease with fence {fence} has lapsed or "
                    "another broker holds it: leave it to the current chief."
                ) from None
            raise

    def _read_texts(self, name: str) -> dict[str, str]:
        stored = self._call(self._client.hgetall, self._key(name))
        return {text(field): text(value) for field, value in stored.items()}

    def _rows_and_seed(self) -> tuple[RowCount, int]:
        """Cached: `open_run` refuses to change them."""
        if self._constants is None:
            num_rows, seed = self._call(self._client.hmget, self._key("run"), ["num_rows", "seed"])
            if num_rows is None:
                raise no_run(self._run_id)
            self._constants = decode_row_count(num_rows), int(seed)
        return self._constants

    def _call(self, command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method of redis-py, and map its errors to ours."""
        try:
            return command(*arguments, **options)
        except redis.RedisError as error:
            raise self._as_ours(error) from error

    def _as_ours(self, error: Exception) -> RunConflictError | StoreUnavailableError:
        # Errors within scripts lose their type, so match the text.
        if "NORUN" in str(error):
            return no_run(self._run_id)
        where = address_of(self._client)
        retried = f", also not within {self._retry.timeout_s:g} s" if self._retry else ""
        if refuses_writes(error):
            return StoreCannotWriteError(
                f"the store at {where} takes no writes{retried} ({error}): make room on its disk, give it more memory "
                "(maxmemory), or name a primary; the run continues as soon as it can."
            )
        if is_denied(error):
            return StoreUnavailableError(_lacks_right(self._client, error))
        if isinstance(error, redis.ResponseError):
            return StoreUnavailableError(f"the store at {where} refused an operation of run {self._run_id!r}: {error}")
        return StoreUnavailableError(
            f"the store at {where} does not answer{retried} ({error}): check that its server runs, then try again."
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether Redis refused a write because `maxmemory` is reached."""
    return "OOM command not allowed" in str(error)


def decode_row_count(stored: bytes) -> RowCount:
    """Decode the run's `num_rows`."""
    return msgspec.json.decode(stored, type=RowCount)


def text(value: bytes | None) -> str:
    """Decode a text field; empty if absent."""
    return (value or b"").decode()


# --- scripts ---------------------------------------------------------------------------------------------------------
@cache
def load_script(name: str) -> str:
    """Text of `scripts/<name>.lua` after the shared prelude, as the server runs it.

    Comments become empty lines, because the server logs and replicates the text; line numbers in errors match.
    """
    folder = resources.files("slipstream.buffer.redis") / "scripts"
    text = "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name))
    return re.sub(r"^ *--.*", "", text, flags=re.MULTILINE)
