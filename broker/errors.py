"""What can go wrong between processes.

BrokerError
├── ChannelClosedError        a channel was used after close, or its address cannot be bound or reached
├── ClientDiedError             the thread that speaks with the broker ended by itself
├── RefusedByBrokerError      the broker will not have this peer; carries its sentence
└── WeightTransferError  a weight group could not be built, or a broadcast or its verification failed
"""


class BrokerError(Exception):
    """Root of the tree."""


class ChannelClosedError(BrokerError, ConnectionError):
    """A channel cannot be opened, or was used after it was closed."""


class ClientDiedError(BrokerError, RuntimeError):
    """Nobody speaks with the broker any more: a bug, whose traceback is in the log; another start mends it."""


class RefusedByBrokerError(BrokerError, ValueError):
    """The broker refused this peer for good; the message is the broker's sentence."""


class WeightTransferError(BrokerError, RuntimeError):
    """A process group could not be built, a broadcast failed, or what arrived is not what was sent."""
