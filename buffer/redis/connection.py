"""The connection all parts of RedisStore share: runs scripts, and maps Redis's errors to ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.commands.core import Script

from slipstream.buffer.errors import RunConflictError, StoreCannotWriteError, StoreUnavailableError
from slipstream.buffer.redis.retry import RetryPolicy, refuses_writes
from slipstream.buffer.resume_check import no_run


def address_of(client: redis.Redis) -> str:
    """Where the client looks for its server, for error messages; without the password."""
    target = client.connection_pool.connection_kwargs
    if "path" in target:
        return f"unix://{target['path']}"
    return f"redis://{target.get('host', 'localhost')}:{target.get('port', 6379)}/{target.get('db', 0)}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether Redis refused a write because `maxmemory` is reached (inside a script the error's type is lost)."""
    return "OOM command not allowed" in str(error)


class RedisConnection:
    """One client, one run's keys, its scripts."""

    def __init__(
        self,
        client: redis.Redis,
        run_id: str,
        *,
        max_attempts: int = 5,
        clock: Callable[[], float] | None = None,
        patience: RetryPolicy | None = None,
    ) -> None:
        """`clock` (seconds) stands in for the server's in tests; `client` must return bytes, not text.

        `patience` is the client's, to be told of.
        """
        self._client = client
        self._run_id = run_id
        self._prefix = f"{{{run_id}}}:"
        self._max_attempts = max_attempts
        self._clock = clock
        self._patience = patience
        self._scripts: dict[str, Script] = {}

    @property
    def waiting_for(self) -> str:
        """What an operation waits for right now while the server is away, for a role's status; empty when nothing."""
        return self._patience.reason if self._patience else ""

    def close(self) -> None:
        """Let go of connections."""
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _run(self, script: str, *arguments: Any, client: Any = None) -> Any:
        """Run a script by its SHA (sent in full only when the server does not know it); on a pipeline, queue it."""
        now = "" if self._clock is None else str(int(self._clock() * 1000))
        with self._reaching():
            return self._script(script)(keys=[self._prefix], args=[now, *arguments], client=client)

    def _script(self, script: str) -> Script:
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(script)
        return self._scripts[script]

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as error:
            raise self._fault(error) from error

    def _fault(self, error: Exception) -> RunConflictError | StoreUnavailableError:
        if "NORUN" in str(error):
            return no_run(self._run_id)
        where = address_of(self._client)
        waited = f", also not within {self._patience.patience_s:g} s" if self._patience else ""
        if refuses_writes(error):
            return StoreCannotWriteError(
                f"the store at {where} takes no writes{waited} ({error}): make room on its disk, give it more memory "
                "(maxmemory), or name a primary; it goes on as soon as it can."
            )
        if isinstance(error, redis.ResponseError):
            return StoreUnavailableError(f"the store at {where} refused an operation of run {self._run_id!r}: {error}")
        return StoreUnavailableError(
            f"the store at {where} does not answer{waited} ({error}): see that its server runs, then try again."
        )


def text(value: bytes | None) -> str:
    """Bytes of a field known to be text."""
    return (value or b"").decode()
