"""Clusters that a run does not join."""

import pytest

from slipstream.configs.base import ConfigError

ray_seats = pytest.importorskip("slipstream.cluster.ray_seats")


def test_a_ray_without_tokens_is_refused():
    ray_seats._check_version("2.52.0")
    ray_seats._check_version("3.0.0.dev0")
    with pytest.raises(ConfigError, match=r"^cluster.kind=ray needs Ray 2.52, .* got 2.9.3"):
        ray_seats._check_version("2.9.3")


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "localhost:6379", "[::1]:6379"])
def test_a_head_on_a_loopback_address_may_answer_anybody(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    ray_seats._check_access(address)


@pytest.mark.parametrize(
    ("mode", "probe", "is_refused"),
    [("disabled", "", True), ("", "", True), ("token", "", True), ("token", "raise SystemExit(1)", False)],
)
def test_a_head_that_others_reach_must_ask_for_a_token(
    mode: str, probe: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    # What a process without a token finds: an answer, or a refusal.
    monkeypatch.setattr(ray_seats, "_PROBE", f"import os; assert os.environ['RAY_AUTH_MODE'] == 'disabled'; {probe}")
    if not is_refused:
        ray_seats._check_access("10.0.0.1:6379")
        return
    with pytest.raises(ConfigError, match=r"^Ray's head at 10.0.0.1:6379 must require a token, but answers without"):
        ray_seats._check_access("10.0.0.1:6379")
