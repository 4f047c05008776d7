"""What can go wrong between processes.

BrokerFault
├── ChannelClosed        a channel was used after close, or its address cannot be bound or reached
├── LinkDied             the thread that speaks with the broker ended by itself
├── RefusedByBroker      the broker will not have this peer; carries its sentence
├── WaitTimeout          a wait with a deadline ran out; says who is missing
└── WeightTransferFault  a weight group could not be built, or a broadcast or its verification failed
"""


class BrokerFault(Exception):
    """Root of the tree."""


class ChannelClosed(BrokerFault, ConnectionError):
    """A channel cannot be opened, or was used after it was closed."""


class LinkDied(BrokerFault, RuntimeError):
    """Nobody speaks with the broker any more: a bug, whose traceback is in the log; another start mends it."""


class RefusedByBroker(BrokerFault, ValueError):
    """The broker refused this peer for good; the message is the broker's sentence."""


class WaitTimeout(BrokerFault, TimeoutError):
    """A deadline passed. The message names what was waited for and who did not deliver."""


class WeightTransferFault(BrokerFault, RuntimeError):
    """A process group could not be built, a broadcast failed, or what arrived is not what was sent."""
