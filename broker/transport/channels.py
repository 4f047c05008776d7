"""Channel protocols: moving frames between processes. Implemented over ZeroMQ and, within one process, over deques."""

from typing import Protocol

from slipstream.broker.messages import Frames


class ClientChannel(Protocol):
    """A peer's end. `receive` and `close` belong to one thread; `send` and `wake` may be called from any.

    `send` and `receive` raise ChannelClosedError after `close`.
    """

    def send(self, frames: Frames) -> None:
        """Queue frames for the broker. Never blocks: they leave with a `receive` once the broker is reachable."""
        ...

    def receive(self, *, timeout_s: float) -> Frames | None:
        """Send what is queued, then return the next frames; None after `timeout_s` or a `wake`."""
        ...

    def wake(self) -> None:
        """End a blocked `receive`, or the next one to block."""
        ...

    def reconnect(self, address: str = "") -> None:
        """Drop the connection and all queued frames, then connect under a new identity, to another address if given."""
        ...

    def close(self) -> None:
        """Close the connection; queued frames get a short, bounded time to leave."""
        ...


class ServerChannel(Protocol):
    """The broker's end. Belongs to one thread. `send` and `receive` raise ChannelClosedError after `close`."""

    guest: str
    """Guest that sent what `receive` returned last; empty: somebody with the run's token."""

    def receive(self, *, timeout_s: float) -> tuple[bytes, Frames] | None:
        """Return (identity, frames) from some peer; None after `timeout_s`."""
        ...

    def send(self, identity: bytes, frames: Frames) -> bool:
        """Send to one peer. Never blocks; False if the peer is gone or its queue is full."""
        ...

    def take_refused(self) -> int:
        """Return the number of connections since the last call that were refused for want of the run's token."""
        ...

    def close(self) -> None: ...
