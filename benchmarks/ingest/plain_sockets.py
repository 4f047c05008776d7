"""Unencrypted sockets, opened only by this benchmark to measure the cost of CURVE.

python -m benchmarks.ingest.plain_sockets KEY=VALUE...: a broker with such sockets
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import zmq

from slipstream.broker.__main__ import main
from slipstream.broker.transport import zmq_channels


@contextmanager
def plain_sockets() -> Iterator[None]:
    """Open channels without CURVE during the block, with all other options unchanged."""
    server = zmq_channels._SERVER_OPTIONS | {zmq.MAXMSGSIZE: zmq_channels.PIECE_BYTES}
    with (
        patch.object(zmq_channels, "_server_options", lambda keys: server),
        patch.object(zmq_channels, "_client_options", lambda keys: zmq_channels._CLIENT_OPTIONS),
    ):
        yield


if __name__ == "__main__":
    with plain_sockets():
        main(sys.argv[1:])
