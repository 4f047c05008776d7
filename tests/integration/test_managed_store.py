"""An externally managed store: TLS, a user limited to the run's keys, and one clear error message for each problem."""

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest
import redis

from slipstream.buffer.errors import StoreUnavailableError
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store, store_url
from slipstream.configs.base import ConfigError
from slipstream.configs.buffer import STORE_PASSWORD_VARIABLE
from slipstream.configs.load import load
from tests.contract.stores import as_limited_user, running

PASSWORD = "kept-to-ourselves-kept-to-ourselves"
TIMEOUT_S = 10.0


class Certificate(NamedTuple):
    """A self-signed certificate for `localhost` that is its own authority."""

    file: Path
    key: Path


def make_certificate(folder: Path, name: str) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with openssl")
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    paths = ("-addext", "subjectAltName=DNS:localhost", "-out", str(made.file), "-keyout", str(made.key))
    subprocess.run(["openssl", *words.split(), *paths], check=True, capture_output=True, timeout=30)
    return made


class TlsDoor:
    """A TLS port in front of the server's Unix socket: the wheel's redis-server is built without TLS."""

    def __init__(self, server: EmbeddedRedis, certificate: Certificate) -> None:
        self._path = unquote(server.url.removeprefix("unix://"))
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.file, certificate.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, *, user: str = "trainer@", host: str = "localhost") -> str:
        return f"rediss://{user}{host}:{self.port}/0"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with suppress(OSError):
            outside = self._context.wrap_socket(accepted, server_side=True)
            inside = socket.socket(socket.AF_UNIX)
            inside.connect(self._path)
            threading.Thread(target=_pump, args=(inside, outside), daemon=True).start()
            _pump(outside, inside)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while received := source.recv(2**16):
            sink.sendall(received)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with running(EmbeddedRedis(tmp_path / "store", durability="fast", max_memory_mib=64)) as started:
        yield started


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path, "own")


@pytest.fixture
def door(server: EmbeddedRedis, certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsDoor]:
    """A managed store for run `mine`: TLS, and a user whose password is in the environment."""
    as_limited_user(server, keys="{mine}:*", password=PASSWORD)
    monkeypatch.setenv(STORE_PASSWORD_VARIABLE, PASSWORD)
    opened = TlsDoor(server, certificate)
    yield opened
    opened.close()


def url_of(url: str, authority: Path | None) -> str:
    file = [] if authority is None else [f"buffer.store.tls_ca_file={authority}"]
    return store_url(load(["name=mine", "buffer/store=redis", f"buffer.store.url={url}", *file]), Path())


def refusal(url: str, run: str = "mine") -> str:
    with pytest.raises(StoreUnavailableError) as caught:
        open_run_store(url, run, timeout_s=TIMEOUT_S).open_run(run, config_json="{}", num_rows=5, seed=0)
    assert PASSWORD not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_is_kept_over_tls_by_a_user_of_its_keys_alone(
    server: EmbeddedRedis, door: TlsDoor, certificate: Certificate
) -> None:
    url = url_of(door.url(), certificate.file)
    with open_run_store(url, "mine", timeout_s=TIMEOUT_S) as store:
        store.open_run("mine", config_json="{}", num_rows=5, seed=0)
        assert store.run_state().phase == "starting"
        assert store.cpu_s() > 0
        assert store.full_disk() == ""
        assert store.counts().ready == 0
    assert PASSWORD not in url
    admin = redis.Redis.from_url(server.url)
    assert admin.execute_command("ACL LOG") == []
    admin.close()


def test_the_keys_of_another_run_are_refused_in_one_sentence(door: TlsDoor, certificate: Certificate) -> None:
    sentence = refusal(url_of(door.url(), certificate.file), run="theirs")
    assert sentence.startswith(
        f"the store at rediss://localhost:{door.port}/0 must let its user do what a run needs, got"
    )
    assert sentence.endswith("give it the rights in docs/cluster.md.")


def test_a_missing_right_is_named_in_one_sentence(
    server: EmbeddedRedis, door: TlsDoor, certificate: Certificate
) -> None:
    for right in ("+info", "+ping", "+script|load", "+evalsha", "+@hash"):
        as_limited_user(server, keys="{mine}:*", password=PASSWORD, without=right)
        sentence = refusal(url_of(door.url(), certificate.file))
        assert "must let its user do what a run needs, got: " in sentence, right


def test_a_wrong_password_or_user_is_named_without_it(
    door: TlsDoor, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(door.url(user="nobody@"), certificate.file)
    assert f"must take the password in {STORE_PASSWORD_VARIABLE}, got: " in refusal(url)
    monkeypatch.setenv(STORE_PASSWORD_VARIABLE, "another")
    url = url_of(door.url(), certificate.file)
    sentence = refusal(url)
    assert f"must take the password in {STORE_PASSWORD_VARIABLE}, got: " in sentence
    assert "another" not in sentence


def test_an_unknown_authority_a_wrong_host_and_a_port_without_tls_are_named_at_once(
    server: EmbeddedRedis, door: TlsDoor, certificate: Certificate, tmp_path: Path
) -> None:
    place = f"the store at rediss://localhost:{door.port}/0 must"
    unknown = f"{place} present a certificate of its name by a known authority, got: "
    assert refusal(url_of(door.url(), None)).startswith(unknown)
    assert refusal(url_of(door.url(), make_certificate(tmp_path, "other").file)).startswith(unknown)
    wrong_host = refusal(url_of(door.url(host="127.0.0.1"), certificate.file))
    assert "not valid for '127.0.0.1'; name the authority's file with buffer.store.tls_ca_file" in wrong_host
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer_plainly, args=(listener,), daemon=True).start()
        port = listener.getsockname()[1]
        assert "must speak TLS, got plain text" in refusal(url_of(f"rediss://localhost:{port}/0", certificate.file))


def _answer_plainly(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            accepted, _ = listener.accept()
            accepted.recv(2**16)
            accepted.sendall(b"-ERR unknown command\r\n")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_that_holds_no_authority_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"tls_ca_file must be a file of certificates in PEM, got .*ca.pem"):
        url_of("rediss://localhost/0", file)
    with pytest.raises(ConfigError, match=r"tls_ca_file must be null without .* got 'ca.pem' with redis://"):
        load(["buffer/store=redis", "buffer.store.url=redis://store", "buffer.store.tls_ca_file=ca.pem"])


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"rediss://trainer:{PASSWORD}@store:6380/0", "rediss://store:6380/0"),
        (f"redis://:{PASSWORD}@store", "redis://store"),
        (f"unix://me:{PASSWORD}@/run/redis.sock", "unix:///run/redis.sock"),
        (f"redis://store?db=1&password={PASSWORD}", "redis://store"),
    ],
)
def test_a_password_in_the_address_is_refused_and_not_repeated(url: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["buffer/store=redis", f"buffer.store.url='{url}'"])
    assert str(caught.value) == (
        f"buffer.store.url must not contain a password, got one for {shown}: settings are logged and saved; set "
        f"{STORE_PASSWORD_VARIABLE} instead."
    )
