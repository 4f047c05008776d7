"""Channels: how frames get from one process to another. Implemented over ZeroMQ and, for one process, over deques."""

from typing import Protocol

Frames = list[bytes]
"""[message] or [message, payload, ...]."""


class ClientChannel(Protocol):
    """A peer's end. `receive` and `close` belong to one thread; `send` and `wake` may be called from any."""

    def send(self, frames: Frames) -> None:
        """Queue frames for the broker. Never blocks: they leave with the next `receive`, when the broker is there."""
        ...

    def receive(self, *, timeout_s: float) -> Frames | None:
        """Send what is queued, then the next frames from the broker, or None after `timeout_s` or a `wake`."""
        ...

    def wake(self) -> None:
        """End a `receive` that is waiting."""
        ...

    def reconnect(self) -> None:
        """Drop the connection and what is queued, take a new identity, connect again."""
        ...

    def close(self) -> None:
        """Let go; queued frames get a short, bounded time to leave."""
        ...


class ServerChannel(Protocol):
    """The broker's end. Single-threaded."""

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        """(identity, frames) from some peer, or None after `timeout_s`."""
        ...

    def send(self, identity: bytes, frames: Frames) -> bool:
        """Send to one peer. Never blocks; False when the peer is gone or cannot take more."""
        ...

    def close(self) -> None:
        """Let go."""
        ...
