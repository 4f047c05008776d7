"""Clusters that a run does not join."""

import pytest

from slipstream.configs.base import ConfigError

ray_seats = pytest.importorskip("slipstream.cluster.ray_seats")


def test_a_ray_without_tokens_is_refused():
    ray_seats._check_version("2.52.0")
    ray_seats._check_version("3.0.0.dev0")
    with pytest.raises(ConfigError, match=r"^cluster.kind=ray needs Ray 2.52, .* got 2.9.3"):
        ray_seats._check_version("2.9.3")


@pytest.mark.parametrize("mode", ["disabled", "", "token"])
def test_a_head_that_others_reach_must_ask_for_a_token(mode: str, monkeypatch: pytest.MonkeyPatch):
    for loopback in ("127.0.0.1:6379", "localhost:6379", "[::1]:6379"):
        ray_seats._check_access(loopback)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    # What a process without a token finds: an answer, or a refusal.
    answered = "import os; assert os.environ['RAY_AUTH_MODE'] == 'disabled'"
    monkeypatch.setattr(ray_seats, "_PROBE", answered)
    with pytest.raises(ConfigError, match=r"^Ray's head at 10.0.0.1:6379 must require a token, but answers without"):
        ray_seats._check_access("10.0.0.1:6379")
    monkeypatch.setattr(ray_seats, "_PROBE", f"{answered}; raise SystemExit(1)")
    if mode == "token":
        ray_seats._check_access("10.0.0.1:6379")
