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
    """The broker client's thread failed because of a bug; see the traceback in the log. Restarting recovers."""


class RefusedByBrokerError(BrokerError, ValueError):
    """The broker permanently rejected this peer; the message is the broker's reason."""


class WeightTransferError(BrokerError, RuntimeError):
    """A process group could not be built, or a broadcast, a fetch or its verification failed."""


class AlteredWeightsError(WeightTransferError):
    """The bytes are complete but differ from those the learner published: damaged in storage or altered by a lender."""


class NotYetError(WeightTransferError):
    """The lender is still fetching the requested file."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: received so far; waiting is worthwhile while this grows."""
        super().__init__("it is still being fetched")
        self.num_bytes = num_bytes
