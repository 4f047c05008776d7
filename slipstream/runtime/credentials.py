"""Credentials: the run's token, CURVE key pairs derived from it, masking, and checks of hosts and secrets.

Only holders of the token can compute both pairs: sockets ignore other peers, and a peer knows that it talks to its own
run. Roles without the run folder get the token in the environment or a file. A guest's token does not reveal the
run's: the guest can connect to servers that admit it, but not serve.
"""

import base64
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from slipstream.configs.base import ConfigError, Record, require
from slipstream.configs.broker import BrokerConfig
from slipstream.configs.run import RunConfig
from slipstream.runtime.run_folder import RunFolder

TOKEN_VARIABLE = "SLIPSTREAM_TOKEN"
TOKEN_REMEDY = (
    f"set {TOKEN_VARIABLE} to the run's token, name a file that holds it with broker.token_file=PATH, or start on a "
    "machine with the run folder, with name=RUN."
)
_TOKEN_LENGTHS = range(16, 1025)
_MIN_OPEN_LENGTH = 32
"""Minimum length if other machines can guess."""
MAKE_TOKEN = "make a token with `python -c 'import secrets; print(secrets.token_urlsafe())'`"
_ACCESS_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_SCRYPT_COST = 2**15
"""Each guess at a token costs 0.1 s and 32 MiB."""
_GUEST = "guest."
"""Prefix of a guest token: `guest.NAME.KEYS`."""
_KEY_BYTES = 32


class Keys(Record):
    """Key pairs of both ends, in Z85. Example: Keys(b"rq:rM>}U...", b"JTKVSB%%...", b"Yne@$w-v...", b"D:)Q[IlA...")."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    guests: dict[bytes, str] = {}
    """Public key -> name of an admitted guest."""
    guest: str = ""
    """Owner of these keys, without a `server_secret`; empty for the run's."""


# --- the token -------------------------------------------------------------------------------------------------------
# The token appears in no command line, setting, log, or answer.
def find_token(run: RunConfig) -> str:
    """`given_token`, else the run folder's, else nothing. Raises ConfigError."""
    token = given_token(run.broker) or _token_in_folder(RunFolder(run))
    is_fit = not token or not run.cluster.is_open or len(token) >= _MIN_OPEN_LENGTH
    must, why = f"have >= {_MIN_OPEN_LENGTH} characters with cluster.interface", "other machines can try to guess it"
    require(is_fit, "the token", must, got=len(token), why=f"{why}; {MAKE_TOKEN}")
    return token


def make_token(run: RunConfig) -> str:
    """The run's token; create one in the run folder if none exists. Raises ConfigError."""
    if token := find_token(run):
        got, why = "a guest's, which can only start generators", f"unset {TOKEN_VARIABLE}, or use another token"
        require(not token.startswith(_GUEST), "the token", "be the run's", got=got, why=why)
        return token
    folder = RunFolder(run)
    folder.make()
    unfinished = folder.token.with_name(f"token.{os.getpid()}")
    unfinished.touch(mode=0o600)
    unfinished.write_text(secrets.token_urlsafe(32) + "\n")
    try:
        # Link instead of rename: concurrent roles all use the first one's token.
        os.link(unfinished, folder.token)
    except FileExistsError:
        pass
    finally:
        unfinished.unlink()
    return _token_in_folder(folder)


def given_token(config: BrokerConfig) -> str:
    """Token from environment or `broker.token_file`, else nothing. Raises ConfigError."""
    if token := os.environ.get(TOKEN_VARIABLE, ""):
        return _check_format(token.strip(), origin=f"the environment variable {TOKEN_VARIABLE}")
    path = config.token_file
    return _check_format(_read_private(Path(path)), origin=f"broker.token_file ({path})") if path is not None else ""


def _token_in_folder(folder: RunFolder) -> str:
    path = folder.token
    return _check_format(_read_private(path), origin=str(path)) if path.exists() else ""


def _read_private(path: Path) -> str:
    try:
        mode, must = path.stat().st_mode, "be accessible only to its owner"
        got = f"mode {stat.S_IMODE(mode):04o} of {path}"
        require(not mode & _ACCESS_BY_OTHERS, "a token file", must, got=got, why=f"chmod 600 {path}")
        return path.read_bytes().decode("ascii", errors="replace").strip()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"broker.token_file must be a readable file, got {path}: {reason}.") from None


def _check_format(token: str, *, origin: str) -> str:
    # Reveal only the length.
    is_fit = len(token) in _TOKEN_LENGTHS and token.isascii() and token.isprintable()
    must = f"hold {_TOKEN_LENGTHS[0]} to {_TOKEN_LENGTHS[-1]} printable ASCII characters"
    require(is_fit, origin, must, got=f"{len(token)} characters that are not", why=MAKE_TOKEN)
    return token


@lru_cache(maxsize=8)
def _derive_keys(token: str) -> Keys:
    if token.startswith(_GUEST):
        name, _, packed = token.removeprefix(_GUEST).partition(".")
        try:
            both = base64.urlsafe_b64decode(packed)
        except ValueError:
            both = b""
        is_fit, why = bool(name) and len(both) == 2 * _KEY_BYTES, "copy it from guests/NAME in the run folder"
        require(is_fit, f"a token that starts with {_GUEST}", "be a guest token", got="another", why=why)
        server_public, secret = z85.encode(both[:_KEY_BYTES]), z85.encode(both[_KEY_BYTES:])
        return Keys(server_public, b"", zmq.curve_public(secret), secret, guest=name)
    return Keys(*_derive_pair(token, end="server"), *_derive_pair(token, end="client"))


def derive_keys(token: str, *, guests: Sequence[str] = ()) -> Keys:
    """Derive the keys of both ends, in 0.2 s. `guests`: admitted by servers. Raises ConfigError."""
    if (keys := _derive_keys(token)).guest:
        return keys
    return msgspec.structs.replace(keys, guests={zmq.curve_public(_guest_secret(keys, name)): name for name in guests})


def guest_token(keys: Keys, name: str) -> str:
    """The guest's token: its secret key and the run's public key."""
    both = z85.decode(keys.server_public) + z85.decode(_guest_secret(keys, name))
    return f"{_GUEST}{name}.{base64.urlsafe_b64encode(both).decode()}"


def write_guest_tokens(folder: RunFolder, keys: Keys) -> None:
    """Write guests' tokens, readable only by the owner."""
    folder.guests.mkdir(mode=0o700, exist_ok=True)
    for name in keys.guests.values():
        path = folder.guests / name
        path.touch(mode=0o600)
        path.write_text(guest_token(keys, name) + "\n")


def _guest_secret(keys: Keys, name: str) -> bytes:
    seed = hashlib.blake2b(name.encode(), key=keys.client_secret, person=b"slipstream-guest", digest_size=_KEY_BYTES)
    secret: bytes = z85.encode(seed.digest())
    return secret


def _derive_pair(token: str, *, end: str) -> tuple[bytes, bytes]:
    """Derive (public, secret). Any 32 bytes are a valid Curve25519 secret key."""
    salt = f"slipstream/curve/1/{end}".encode()
    seed = hashlib.scrypt(token.encode(), salt=salt, n=_SCRYPT_COST, r=8, p=1, maxmem=2**26, dklen=32)
    secret: bytes = z85.encode(seed)
    return zmq.curve_public(secret), secret


LEFT_OUT = "(left out)"
_KEY = (
    r"(?:api[-_]?key|(?<!tik)token|secret|passw(?:or)?d|passphrase|credentials?|authorization|private[-_]?key|"
    r"access[-_]?key)"
)
_SECRET_KEY = re.compile(rf"(?:^|[-_.a-z]){_KEY}$|^(?:headers|cookie)$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(rf"{_KEY}|_KEY$|COOKIE|^AWS_|HEADERS", re.IGNORECASE)
_MIN_KNOWN = 6
"""Shorter values occur by accident."""
_NO_VALUE = rf"(?!None|null|\(|{re.escape(LEFT_OUT)})"
_ISSUED = (
    r"\b(?:sk|pk|rk)-[\w-]{16,}", r"\bhf_\w{16,}", r"\bgh[opsru]_\w{16,}", r"\bgithub_pat_\w{16,}",
    r"\bglpat-[\w-]{16,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}", r"\bxox[abprs]-[\w-]{8,}", r"\bAIza[\w-]{30,}",
    r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
)  # fmt: skip
_PATTERNS = (
    # User and password in a URL, and query parameters with a secret name.
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/@\s'\"]*@", re.IGNORECASE), rf"\1{LEFT_OUT}@"),
    (re.compile(rf"([?&;][\w.-]*{_KEY}=)[^&\s'\"]+", re.IGNORECASE), rf"\1{LEFT_OUT}"),
    (re.compile(r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{LEFT_OUT}"),
    (re.compile(rf"(\b[\w.-]*{_KEY}['\"]?\s*[=:]\s*['\"]?){_NO_VALUE}[^\s'\",}}]+", re.IGNORECASE), rf"\1{LEFT_OUT}"),
    (re.compile("|".join(_ISSUED)), LEFT_OUT),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), LEFT_OUT),
)


def known_secrets(environment: Mapping[str, str] = os.environ, *others: str) -> set[str]:
    """Values of variables with secret names, and `others`."""
    found = {value for name, value in environment.items() if _SECRET_VARIABLE.search(name)}
    # A header variable holds several NAME=VALUE pairs.
    parts = {part.partition("=")[2].strip() for value in found for part in value.split(",")}
    return {value for value in found | parts | set(others) if len(value) >= _MIN_KNOWN}


def mask(text: str, *, known: Iterable[str] = ()) -> str:
    """Mask known secrets, and text that looks like a secret."""
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, LEFT_OUT)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def without_secrets(data: Any, *, known: Iterable[str] = ()) -> Any:
    """Mask values of keys such as `api_key`, and secrets within strings."""
    if isinstance(data, dict):
        # A number is no secret: max_token=8 is a limit.
        named = [key for key in data if _SECRET_KEY.search(str(key))]
        hidden = {key for key in named if data[key] and not isinstance(data[key], int | float)}
        return {key: LEFT_OUT if key in hidden else without_secrets(data[key], known=known) for key in data}
    if isinstance(data, list):
        return [without_secrets(each, known=known) for each in data]
    return mask(data, known=known) if isinstance(data, str) else data


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_equal(given: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(), secret.encode())


def host_of(header: str) -> str:
    """Name in a Host header, such as `[::1]:8420`, in lower case, to check against DNS rebinding."""
    name = header.lower()
    return name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
