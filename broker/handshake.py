"""Handshake: decides whether a peer may join, from the schema version, token and name in its Hello."""

import hmac
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from slipstream.broker.messages import Hello
from slipstream.broker.partial_decode import HelloHeader
from slipstream.broker.status.role_status import LAUNCHER
from slipstream.buffer.errors import RecordRefusedError
from slipstream.buffer.trajectory import SCHEMA_VERSION, Record
from slipstream.configs.base import ConfigError
from slipstream.configs.broker import BrokerConfig

TOKEN_VARIABLE = "SLIPSTREAM_TOKEN"
"""Environment variable that holds the run's token; the launcher's roles inherit it."""
_MAX_TOKEN_LENGTH = 1024
_ACCESS_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_RESERVED_IDS = ("broker", "learner", "archiver", "store", LAUNCHER)


class Rejection(Record):
    """Reason why a peer may not join.

    Example: Rejection("schema", "schema version must be 2, got 1 from 'g-0': update the older side.")
    """

    kind: Literal["schema", "token", "name"]
    reason: str
    """One sentence: what must hold, what was got, what to do."""


class Handshake:
    """Checks every Hello. The token comes before the name, so that strangers learn nothing about connected peers."""

    def __init__(self, *, token: str, locate_duplicate: Callable[[Hello], str]) -> None:
        """`locate_duplicate` describes another living peer of the same name; empty if there is none."""
        self._token = token
        self._locate_duplicate = locate_duplicate

    def check(self, hello: Hello) -> Rejection | None:
        """Return the reason to reject a peer; None if it may join."""
        if hello.schema_version != SCHEMA_VERSION:
            return _reject_schema(hello.peer_id, hello.schema_version)
        if reason := check_token(hello.token, expected=self._token):
            return Rejection("token", reason)
        reason = self._check_name(hello)
        return Rejection("name", reason) if reason else None

    def _check_name(self, hello: Hello) -> str:
        if hello.role == "generator" and hello.peer_id in _RESERVED_IDS:
            return f"a generator's id must not be a role's name, got {hello.peer_id!r}: choose another with --id."
        if location := self._locate_duplicate(hello):
            return (
                f"peer id {hello.peer_id!r} must be unique, but {location} has it: "
                "choose another with --id, or stop that process."
            )
        return ""


def reject_unreadable(hello: HelloHeader, refusal: RecordRefusedError) -> Rejection:
    """Build the rejection of a Hello that cannot be decoded: most likely its sender is of another version."""
    if isinstance(hello.schema_version, int) and hello.schema_version != SCHEMA_VERSION:
        return _reject_schema(hello.sender, hello.schema_version)
    return Rejection("schema", f"a Hello must match this version of Slipstream, got {refusal}: update both sides.")


def _reject_schema(peer_id: str, version: int) -> Rejection:
    got = f"got {version} from {peer_id!r}"
    return Rejection("schema", f"schema version must be {SCHEMA_VERSION}, {got}: update the older side.")


# --- token -----------------------------------------------------------------------------------------------------------
# A secret: it appears in no command line, setting, log or answer, and only the processes' memory holds it.
def read_token(config: BrokerConfig) -> str:
    """Read the token from the environment, else from `broker.token_file`; empty if neither is set.

    Raises ConfigError.
    """
    if token := os.environ.get(TOKEN_VARIABLE, ""):
        return _check_format(token.strip(), origin=f"the environment variable {TOKEN_VARIABLE}")
    if config.token_file is None:
        return ""
    return _check_format(_read_private(Path(config.token_file)), origin=f"broker.token_file ({config.token_file})")


def check_token(got: str, *, expected: str) -> str:
    """Return why a peer with the token `got` is rejected; empty if it may join, or if no token is expected."""
    # In constant time: how long the comparison takes must not tell how much of a guess is right.
    if not expected or hmac.compare_digest(got.encode(), expected.encode()):
        return ""
    found = "a wrong one" if got else "none"
    return (
        f"the token must be the broker's, got {found}: set {TOKEN_VARIABLE} to the run's token, or name a file that "
        "holds it with broker.token_file=PATH."
    )


def _read_private(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if mode & _ACCESS_BY_OTHERS:
            raise ConfigError(
                "broker.token_file must be accessible to its owner alone, "
                f"got mode {stat.S_IMODE(mode):04o} of {path}: chmod 600 {path}"
            )
        return path.read_bytes().decode("ascii", errors="replace").strip()
    except OSError as error:
        raise ConfigError(
            f"broker.token_file must be a readable file, got {path}: {error.strerror or error}."
        ) from None


def _check_format(token: str, *, origin: str) -> str:
    # The message reveals the token's length and nothing else of it.
    if not 0 < len(token) <= _MAX_TOKEN_LENGTH or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{origin} must hold 1 to {_MAX_TOKEN_LENGTH} printable ASCII characters, got {len(token)} characters "
            "that are not: make a token with `python -c 'import secrets; print(secrets.token_urlsafe())'`."
        )
    return token
