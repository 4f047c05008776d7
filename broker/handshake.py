"""Handshake: who may join, and in one sentence why somebody may not."""

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

# @@ The run's token: what a broker may ask of everybody who wants to join, and where it comes from.
#
# It is a secret: it stands in no command line, no setting, no log and no answer, and nothing keeps it but the processes.
VARIABLE = "SLIPSTREAM_TOKEN"
"""Environment variable that holds it; a launcher's roles inherit it."""
_MAX_CHARACTERS = 1024
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_token(config: BrokerConfig) -> str:
    """From the environment, else from `broker.token_file`; empty when neither is set. Raises ConfigError."""
    if token := os.environ.get(VARIABLE, ""):
        return _checked(token.strip(), place=f"the environment variable {VARIABLE}")
    if config.token_file is None:
        return ""
    return _checked(_read_private(Path(config.token_file)), place=f"broker.token_file ({config.token_file})")


def token_objection(got: str, *, wanted: str) -> str:
    """Why whoever said `got` may not join a broker with the token `wanted`; empty when it may."""
    if not wanted or hmac.compare_digest(got.encode(), wanted.encode()):
        return ""
    what = "a wrong one" if got else "none"
    return (
        f"the token must be the broker's, got {what}: set {VARIABLE} to the run's token, or name a file that holds it "
        "with broker.token_file=PATH."
    )


def _read_private(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if mode & _OTHERS:
            raise ConfigError(
                f"broker.token_file must be open to its owner alone, got mode {stat.S_IMODE(mode):04o} of {path}: "
                f"chmod 600 {path}"
            )
        return path.read_bytes().decode("ascii", errors="replace").strip()
    except OSError as error:
        raise ConfigError(
            f"broker.token_file must be a file that can be read, got {path}: {error.strerror or error}."
        ) from None


def _checked(token: str, *, place: str) -> str:
    """The message tells nothing of it but its length."""
    if not 0 < len(token) <= _MAX_CHARACTERS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{place} must hold 1 to {_MAX_CHARACTERS} printable ASCII characters, got {len(token)} characters "
            f"that are not that: make a token with `python -c 'import secrets; print(secrets.token_urlsafe())'`."
        )
    return token


_NAMES_OF_OTHERS = ("broker", "learner", "archiver", "store", LAUNCHER)


class Objection(Record):
    """Why a peer may not join. Example: Objection("schema", "schema version must be 2, got 1 from 'g-0': ...")."""

    kind: Literal["schema", "token", "name"]
    """What it is about."""
    sentence: str
    """What must hold, what was got, what to do."""


class Handshake:
    """Looks at every Hello. The token comes before the name: strangers learn nothing of who is here."""

    def __init__(self, *, token: str, namesake: Callable[[Hello], str]) -> None:
        """`namesake` says where another living peer of the same name is; empty when there is none."""
        self._token = token
        self._namesake = namesake

    def objection(self, hello: Hello) -> Objection | None:
        """None lets it in."""
        if hello.schema_version != SCHEMA_VERSION:
            return _schema_objection(hello.peer_id, hello.schema_version)
        if sentence := token_objection(hello.token, wanted=self._token):
            return Objection("token", sentence)
        sentence = self._name_objection(hello)
        return Objection("name", sentence) if sentence else None

    def _name_objection(self, hello: Hello) -> str:
        if hello.role == "generator" and hello.peer_id in _NAMES_OF_OTHERS:
            return f"a generator's id must not be a role's name, got {hello.peer_id!r}: choose another with --id."
        if place := self._namesake(hello):
            return (
                f"peer id {hello.peer_id!r} is taken by {place}: "
                "ids must be unique; choose another with --id, or stop that process."
            )
        return ""


def objection_to_unreadable(hello: HelloHeader, refusal: RecordRefusedError) -> Objection:
    """Of a Hello that as a whole cannot be read: most likely its sender is of another version."""
    if isinstance(hello.schema_version, int) and hello.schema_version != SCHEMA_VERSION:
        return _schema_objection(hello.sender, hello.schema_version)
    sentence = f"a Hello must be as this version of Slipstream writes it, got one that is {refusal}: update both sides."
    return Objection("schema", sentence)


def _schema_objection(peer_id: str, version: int) -> Objection:
    got = f"got {version} from {peer_id!r}"
    return Objection("schema", f"schema version must be {SCHEMA_VERSION}, {got}: update the older side.")
