"""An S3 server for tests: moto, in a thread of this process."""

import itertools
import socket
import urllib.request

from moto.server import ThreadedMotoServer

_numbers = itertools.count()


class S3Server:
    """Keeps its objects while it is stopped. Life: (start -> stop)*, started by its construction."""

    def __init__(self, address: str) -> None:
        with socket.socket() as probe:
            probe.bind((address, 0))
            self._port = probe.getsockname()[1]
        self._address = address
        self.start()

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address=self._address, port=self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    @property
    def url(self) -> str:
        return f"http://{self._address}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a client of this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def new_bucket(self) -> str:
        """Make an empty bucket; returns its name."""
        name = f"bucket-{next(_numbers)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=10).close()
        return name
