"""The broker role: address, limits, heartbeats."""

from typing import Annotated

from msgspec import Meta

from slipstream.configs.base import Config

BROKER_SILENCE_S = 8.0
"""Silence of the broker after which a peer connects anew, seconds."""


class BrokerConfig(Config):
    """Where the broker listens and how patient it is."""

    address: str = "tcp://127.0.0.1:5757"
    """ZeroMQ endpoint it binds, loopback or ipc only; for a generator on another machine, its end of a tunnel."""
    token_file: str | None = None
    """A file with the token without which nobody may join, open to its owner alone; `SLIPSTREAM_TOKEN` in the
    environment goes before it. Without either anybody may join who reaches the address."""
    join_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Time that a peer waits for the broker to let it in, seconds; also without a broker."""
    max_message_bytes: Annotated[int, Meta(ge=4096)] = 64 * 1024 * 1024
    """A larger frame is refused, and one of more than twice as much closes its connection."""
    credit_messages: Annotated[int, Meta(ge=1)] = 512
    """Trajectories a generator may have sent without an acknowledgement."""
    credit_bytes: Annotated[int, Meta(ge=4096)] = 64 * 1024 * 1024
    """Bytes a generator may have sent without an acknowledgement."""
    heartbeat_s: Annotated[float, Meta(gt=0)] = 1.0
    """Time between pings, seconds; at most half of `BROKER_SILENCE_S`."""
    peer_timeout_s: Annotated[float, Meta(gt=0)] = 8.0
    """Silence after which a peer counts as gone, seconds."""
    lease_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time a generator has for a leased prompt before it is handed out again, seconds; pings renew it, so at
    least three of them fit."""
