import pytest

from slipstream.runtime.credentials import LEFT_OUT, known_secrets, mask, without_secrets

SECRET = "Zk3vN8qLw2XyT7bR"


def test_the_version_of_a_library_is_no_secret():
    assert mask('"tiktoken": "0.12.0"') == '"tiktoken": "0.12.0"'
    assert without_secrets({"tiktoken": "0.12.0"}) == {"tiktoken": "0.12.0"}


@pytest.mark.parametrize(
    "text",
    [
        f"redis://user:{SECRET}@host:6379/0",
        f"https://{SECRET}@github.com/a/b.git",
        f"https://host/path?api_key={SECRET}&x=1",
        f"Authorization: Bearer {SECRET}",
        f"authorization=Basic {SECRET}==",
        f"WANDB_API_KEY={SECRET}",
        f'{{"password": "{SECRET}", "user": "x"}}',
        f"hf_token: '{SECRET}'",
        f"sk-proj-{SECRET}{SECRET}",
        f"hf_{SECRET}{SECRET}",
        f"ghp_{SECRET}{SECRET}",
        f"xoxb-1234-{SECRET}",
        f"eyJhbGciOiJI.{SECRET}.{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_secret_is_left_out(text):
    masked = mask(f"before {text} after")
    assert SECRET not in masked
    assert LEFT_OUT in masked
    assert masked.startswith("before ")


@pytest.mark.parametrize(
    "text",
    [
        "generators.sampling.max_tokens=512", "tokens/s 5,210", "http://127.0.0.1:9400/metrics", "token: null",
        "broker.token_file=secrets/token", "a token that is missing or wrong", "runs/mine/checkpoints/step-00000012",
    ],
)  # fmt: skip
def test_what_a_reader_needs_stays(text):
    assert mask(text) == text


def test_what_is_known_is_left_out_wherever_it_stands():
    environment = {"WANDB_API_KEY": SECRET, "OTEL_EXPORTER_OTLP_HEADERS": f"x-a={SECRET[::-1]},b=c", "PATH": "/usr/bin"}
    known = known_secrets(environment, "the run's own token")
    assert known >= {SECRET, SECRET[::-1], "the run's own token"}
    assert "/usr/bin" not in known
    assert (
        mask(f"joined as x{SECRET}y with the run's own token", known=known) == f"joined as x{LEFT_OUT}y with {LEFT_OUT}"
    )


def test_settings_keep_their_shape():
    settings = {
        "max_tokens": 512, "tools": [{"headers": {"X-Key": SECRET}, "url": f"https://a:{SECRET}@host"}],
        "judge": {"api_key": SECRET, "model": "small"}, "token_file": "here", "token": None,
    }  # fmt: skip
    assert without_secrets(settings) == {
        "max_tokens": 512, "tools": [{"headers": LEFT_OUT, "url": f"https://{LEFT_OUT}@host"}],
        "judge": {"api_key": LEFT_OUT, "model": "small"}, "token_file": "here", "token": None,
    }  # fmt: skip
