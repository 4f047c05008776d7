"""The token comes from the environment, a private file or the run folder; both ends derive the same keys from it."""

import stat
from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils import z85

from slipstream.configs.base import ConfigError
from slipstream.configs.cluster import ClusterConfig
from slipstream.configs.run import RunConfig
from slipstream.runtime.credentials import (
    LEFT_OUT,
    TOKEN_VARIABLE,
    derive_keys,
    find_token,
    guest_token,
    known_secrets,
    make_token,
    mask,
    without_secrets,
    write_guest_tokens,
)
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_run
from tests.cases import cases

SECRET = "kept-to-ourselves"
PLANTED = "Zk3vN8qLw2XyT7bR"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    return monkeypatch


def run_in(folder: Path, content: str | bytes | None = None, *, mode: int = 0o600) -> RunConfig:
    """A run in `folder`, with a token file if `content` is given."""
    runs_dir = str(folder / "runs")
    if content is None:
        return make_run(runs_dir=runs_dir)
    path = folder / "token"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return make_run(runs_dir=runs_dir, broker={"token_file": str(path)})


def refusal(run: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        find_token(run)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_run_makes_its_token_once_for_its_owner_alone_and_does_not_write_down_a_given_one(tmp_path, environment):
    assert make_token(run_in(tmp_path, SECRET)) == SECRET
    assert not (tmp_path / "runs").exists()
    run = run_in(tmp_path)
    assert find_token(run) == ""
    token = make_token(run)
    path = tmp_path / "runs/test/token"
    assert len(token) >= 43
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (make_token(run), find_token(run)) == (token, token)
    assert [each.name for each in path.parent.iterdir() if each.is_file()] == ["token"]
    assert make_token(make_run(runs_dir=str(tmp_path / "others"))) != token
    # A given token comes first, and that of the environment before it.
    run = run_in(tmp_path, f"{SECRET}\n")
    assert find_token(run) == SECRET
    environment.setenv(TOKEN_VARIABLE, "another, as long")
    assert find_token(run) == "another, as long"


def test_a_token_that_is_missing_malformed_or_accessible_to_others_is_refused(tmp_path, environment):
    for mode in (0o640, 0o604, 0o620, 0o777):
        sentence = refusal(run_in(tmp_path, SECRET, mode=mode))
        assert f"{mode:04o}" in sentence
        assert f"chmod 600 {tmp_path}/token" in sentence
    for content in ("", " \n", SECRET[:15], f"{SECRET}\n{SECRET}", SECRET + "ü", b"\xff\xfe", SECRET * 100):
        assert "16 to 1024 printable ASCII" in refusal(run_in(tmp_path, content)), content
    assert f"{tmp_path}/nope" in refusal(make_run(broker={"token_file": f"{tmp_path}/nope"}))
    assert str(tmp_path) in refusal(make_run(broker={"token_file": str(tmp_path)}))
    environment.setenv(TOKEN_VARIABLE, "  ")
    assert TOKEN_VARIABLE in refusal(run_in(tmp_path))


def test_every_token_has_key_pairs_of_its_own_which_stay_what_they_are():
    keys, others = derive_keys(SECRET), derive_keys(SECRET + "!")
    assert len({keys.server_public, keys.client_public, others.server_public, others.client_public}) == 4
    for public, secret in ((keys.server_public, keys.server_secret), (keys.client_public, keys.client_secret)):
        assert zmq.curve_public(secret) == public
        assert len(z85.decode(secret)) == 32
    # Machines with different releases must meet.
    assert keys.server_public == b"Qx4y)n(:/:AO(RxM8}/59%7wFqYT%V[d*}!^kA4T"


def test_other_machines_need_a_long_token_and_a_run_makes_one(tmp_path: Path):
    run = run_in(tmp_path, SECRET)
    assert find_token(run) == make_token(run) == SECRET
    for interface in ("10.0.0.0/8", "0.0.0.0/0"):
        there = msgspec.structs.replace(run, cluster=ClusterConfig(interface=interface))
        for find in (find_token, make_token):
            with pytest.raises(ConfigError, match=r"must have >= 32 characters with cluster.interface, got 17:"):
                find(there)
    loopback = msgspec.structs.replace(run, cluster=ClusterConfig(interface="127.0.0.0/8"))
    assert find_token(loopback) == SECRET
    run = make_run(runs_dir=str(tmp_path), cluster={"interface": "10.0.0.0/8"})
    assert find_token(run) == ""
    assert len(make_token(run)) >= 32


def test_a_guests_token_gives_its_own_key_and_the_public_one_of_the_run_alone(tmp_path: Path):
    run = run_in(tmp_path)
    keys = derive_keys(make_token(run), guests=["alice", "bob"])
    write_guest_tokens(RunFolder(run), keys)
    files = sorted((tmp_path / "runs/test/guests").iterdir())
    assert [(path.name, stat.S_IMODE(path.stat().st_mode)) for path in files] == [("alice", 0o600), ("bob", 0o600)]
    guest = derive_keys(files[0].read_text().strip())
    assert (guest.guest, guest.server_public, guest.server_secret) == ("alice", keys.server_public, b"")
    assert keys.guests[guest.client_public] == "alice"
    assert zmq.curve_public(guest.client_secret) == guest.client_public
    secrets = {keys.client_secret, keys.server_secret}
    assert not secrets & {guest.client_secret, guest.server_secret}
    others = derive_keys("another run's token", guests=["alice"])
    assert not others.guests.keys() & keys.guests.keys()


def test_a_damaged_guest_token_is_refused_and_a_guest_cannot_begin_a_run(tmp_path: Path):
    for token in ("guest.alice", "guest.alice.AAAA", "guest..AAAA", "guest.alice.!!!"):
        with pytest.raises(ConfigError, match=r"a token that starts with guest\. must be a guest token"):
            derive_keys(token)
    token = guest_token(derive_keys("the run's own token"), "alice")
    with pytest.raises(ConfigError, match="the token must be the run's, got a guest's"):
        make_token(run_in(tmp_path, token))


@cases(
    "text",
    f"redis://user:{PLANTED}@host:6379/0",
    f"https://{PLANTED}@github.com/a/b.git",
    f"https://host/path?api_key={PLANTED}&x=1",
    f"Authorization: Bearer {PLANTED}",
    f"authorization=Basic {PLANTED}==",
    f"WANDB_API_KEY={PLANTED}",
    f'{{"password": "{PLANTED}", "user": "x"}}',
    f"hf_token: '{PLANTED}'",
    f"sk-proj-{PLANTED}{PLANTED}",
    f"hf_{PLANTED}{PLANTED}",
    f"ghp_{PLANTED}{PLANTED}",
    f"xoxb-1234-{PLANTED}",
    f"eyJhbGciOiJI.{PLANTED}.{PLANTED}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{PLANTED}\n-----END RSA PRIVATE KEY-----",
)
def test_what_looks_like_a_secret_is_left_out(text):
    masked = mask(f"before {text} after")
    assert PLANTED not in masked
    assert LEFT_OUT in masked
    assert masked.startswith("before ")


def test_what_a_reader_needs_stays():
    for text in (
        *("generators.sampling.max_tokens=512", "tokens/s 5,210", "http://127.0.0.1:9400/metrics", "token: null"),
        *("broker.token_file=secrets/token", "a token that is missing or wrong", "runs/mine/checkpoints/step-00000012"),
    ):
        assert mask(text) == text


def test_what_is_known_is_left_out_wherever_it_stands_and_settings_keep_their_shape():
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": f"x-a={PLANTED[::-1]},b=c"}
    environment = headers | {"WANDB_API_KEY": PLANTED, "PATH": "/usr/bin"}
    known = known_secrets(environment, "the run's own token")
    assert known >= {PLANTED, PLANTED[::-1], "the run's own token"}
    assert "/usr/bin" not in known
    masked = mask(f"joined as x{PLANTED}y with the run's own token", known=known)
    assert masked == f"joined as x{LEFT_OUT}y with {LEFT_OUT}"
    settings = {
        "max_tokens": 512, "tools": [{"headers": {"X-Key": PLANTED}, "url": f"https://a:{PLANTED}@host"}],
        "judge": {"api_key": PLANTED, "model": "small"}, "token_file": "here", "token": None,
    }  # fmt: skip
    assert without_secrets(settings) == {
        "max_tokens": 512, "tools": [{"headers": LEFT_OUT, "url": f"https://{LEFT_OUT}@host"}],
        "judge": {"api_key": LEFT_OUT, "model": "small"}, "token_file": "here", "token": None,
    }  # fmt: skip
    assert mask('"tiktoken": "0.12.0"') == '"tiktoken": "0.12.0"'
    assert without_secrets({"tiktoken": "0.12.0"}) == {"tiktoken": "0.12.0"}
