"""Several machines: where roles listen for each other, and what may cross the network between them."""

import re
from ipaddress import IPv4Network

from slipstream.configs.base import Config, ConfigError, require

PLACE = (
    "resume", "runs_dir", "storage_uri", "storage_timeout_s", "cluster", "broker.address", "broker.token_file",
    "weights.fetch_address", "buffer.store",
)  # fmt: skip
"""Settings that say where a run lives and how it is started. They are no part of its identity: a run may move."""
_PORTS = range(1024, 65536)
"""Ports that a user may bind."""


class ClusterConfig(Config):
    """Addresses and ports of roles that other machines reach, and the trust in the network between them."""

    interface: str = ""
    """IPv4 network in which the machines reach each other, such as `10.0.0.0/8`. Every role listens at the address that
    its machine has in it. Empty: unix sockets and loopback addresses alone."""
    ports: str = "20000-20999"
    """First and last port that roles listen at; each takes the first that is free, and keeps it. Below the ephemeral
    ports, of which the kernel gives one to every outgoing connection."""
    trusted_network: bool = False
    """Whether TCPStore, Gloo and NCCL, which neither encrypt nor authenticate, may listen at that address: then anybody
    in the network can read and change what they carry, weights and gradients. All else speaks CURVE."""

    def __post_init__(self) -> None:
        if self.interface:
            self._check_interface()
        is_range = re.fullmatch(r"\d{1,5}-\d{1,5}", self.ports, re.ASCII) is not None
        is_fit = is_range and bool(own := self.port_range) and own[0] in _PORTS and own[-1] in _PORTS
        must = f"be FIRST-LAST within {_PORTS[0]}-{_PORTS[-1]}, such as 20000-20999"
        require(is_fit, "cluster.ports", must, got=self.ports, why="roles would have no port to take")
        require(
            bool(self.interface) or not self.trusted_network,
            "cluster.trusted_network",
            "be false without cluster.interface",
            got=True,
            why="there is no network to trust",
        )

    def _check_interface(self) -> None:
        try:
            IPv4Network(self.interface)
        except ValueError as error:
            raise ConfigError(
                f"cluster.interface must be an IPv4 network such as 10.0.0.0/8, got {self.interface!r}: {error}."
            ) from None

    @property
    def network(self) -> IPv4Network | None:
        """`interface`; None without one."""
        return IPv4Network(self.interface) if self.interface else None

    @property
    def port_range(self) -> range:
        """`ports`, both ends included."""
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1)

    @property
    def is_open(self) -> bool:
        """Whether roles listen where other machines reach them."""
        return self.network is not None and not self.network.is_loopback


LOCAL = ClusterConfig()
"""One machine."""
