"""Errors between processes.

BrokerError
├── ChannelClosedError
├── ClientDiedError
├── RefusedByBrokerError
└── WeightTransferError
    ├── AlteredWeightsError
    └── NotYetError
"""


class BrokerError(Exception):
    """Root of this package's errors."""


class ChannelClosedError(BrokerError, ConnectionError):
    """A channel was used after `close`, or its address cannot be bound or reached."""


class ClientDiedError(BrokerError, RuntimeError):
    """A bug ended the broker client's thread; see the log. Restarting recovers."""


class RefusedByBrokerError(BrokerError, ValueError):
    """The broker permanently rejected this peer; the message is its reason."""


class WeightTransferError(BrokerError, RuntimeError):
    """A process group, a broadcast, a fetch or its verification failed."""


class AlteredWeightsError(WeightTransferError):
    """The bytes differ from the learner's: damaged in storage or altered by a lender."""


class NotYetError(WeightTransferError):
    """The lender is still fetching the requested file."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: received so far; wait while this grows."""
        super().__init__("it is still being fetched")
        self.num_bytes = num_bytes
