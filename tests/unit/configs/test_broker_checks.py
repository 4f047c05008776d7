"""Patience of broker and peers: pings come often enough for everything that waits for one."""

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from tests.builders import make_run


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"heartbeat_s": 5, "peer_timeout_s": 8}, r"peer_timeout_s must be >= 2 x broker.heartbeat_s \(10"),
        ({"heartbeat_s": 40, "peer_timeout_s": 80}, "heartbeat_s must be <= 4, half of the silence .* got 40"),
        ({"heartbeat_s": 4.5, "peer_timeout_s": 9, "lease_s": 90}, "heartbeat_s must be <= 4, .* got 4.5"),
        ({"lease_s": 2.9}, r"lease_s must be >= 3 x broker.heartbeat_s \(3\), got 2.9"),
    ],
)
def test_pings_that_are_too_rare_are_refused_with_the_reason(settings: dict[str, float], reason: str):
    with pytest.raises(ConfigError, match=reason):
        load([f"broker.{key}={value}" for key, value in settings.items()])


@pytest.mark.parametrize("settings", [{"heartbeat_s": 4.0, "peer_timeout_s": 8.0, "lease_s": 12.0}, {"lease_s": 3.0}])
def test_pings_that_are_just_often_enough_are_accepted(settings: dict[str, float]):
    assert make_run(broker=settings).broker.lease_s == settings["lease_s"]
