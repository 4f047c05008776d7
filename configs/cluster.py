"""Settings for several machines: addresses, resources, and trust."""

import re
from ipaddress import IPv4Network
from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError, Positive, require

PLACE = (
    "resume", "runs_dir", "storage", "cluster", "broker.address", "broker.token_file", "weights.fetch_address",
    "buffer.store", "broker.shards", "logging", "metrics",
)  # fmt: skip
"""Settings of where a run is and who is notified; not part of its identity, so that it can move."""
_GUEST_NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}"
PORTS = range(1024, 65536)
"""Ports that a user can bind."""


class LearnerMachinesConfig(Config):
    """Machines of the learner, and resources reserved on each; with `learner.device=cuda`, also a GPU for each rank.

    The first also runs broker, store, and rank 0.
    """

    machines: Annotated[int, Meta(ge=1)] = 1
    """Machines that share the learner ranks equally."""
    cpus: Positive = 2.0
    """CPU cores per machine, for all roles on it."""
    memory_gib: Positive | None = None
    """Main memory per machine, for Slurm and Kubernetes, GiB; null = the partition's default, or in a manifest 16, and
    64 for each GPU."""


class SeatConfig(Config):
    """Resources of one generator; with `learner.device=cuda`, also a GPU for each worker of its engine."""

    cpus: Positive = 1.0
    """CPU cores of the generator and its engine."""
    memory_gib: Positive | None = None
    """Main memory, as `cluster.learner.memory_gib`."""
    labels: dict[str, str] = {}
    """Labels that the machine must have, such as `{accelerator: H100}`; set with `ray start --labels`."""


class UntrustedGeneratorsConfig(Config):
    """Guests: generators on machines outside the operator's control, each with its own key."""

    names: list[str] = []
    """Generator ids of guests that may join. The broker writes a token for each into `guests/` of the run folder."""
    audit_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Fraction of the groups of untrusted generators that the run's own generators score and grade again."""

    def __post_init__(self) -> None:
        odd = next((name for name in self.names if not re.fullmatch(_GUEST_NAME, name)), "")
        must, why = "have names of 1 to 64 letters, digits, _ and -", "they become file names and ids"
        require(not odd, "cluster.untrusted_generators.names", must, got=odd, why=why)


class ClusterConfig(Config):
    """Machines of the roles, their addresses and ports, and trust in the network between them."""

    kind: Literal["local", "ray"] = "local"
    """`local`: the launcher starts all roles on its machine. `ray`: generators are placed individually on the
    Ray cluster that this machine belongs to, or that the environment variable `RAY_ADDRESS` names."""
    learner: LearnerMachinesConfig = LearnerMachinesConfig()
    generator: SeatConfig = SeatConfig()
    untrusted_generators: UntrustedGeneratorsConfig = UntrustedGeneratorsConfig()
    interface: str = ""
    """IPv4 network shared by the machines, such as `10.0.0.0/8`. Every role listens on the address of its machine in
    this network. Empty = only Unix sockets and loopback addresses."""
    ports: str = "20000-20999"
    """First and last port for listening. Each role keeps the first one that is free. Stay below the kernel's ephemeral
    ports, which outgoing connections use."""
    trusted_network: bool = False
    """Whether TCPStore, Gloo, and NCCL, which neither encrypt nor authenticate, may listen in that network. Anyone in
    it can then read and change weights and gradients. Everything else uses CURVE."""

    def __post_init__(self) -> None:
        if self.interface:
            try:
                IPv4Network(self.interface)
            except ValueError as error:
                raise ConfigError(
                    f"cluster.interface must be an IPv4 network such as 10.0.0.0/8, got {self.interface!r}: {error}."
                ) from None
        is_range = re.fullmatch(r"\d{1,5}-\d{1,5}", self.ports, re.ASCII) is not None
        is_fit = is_range and bool(own := self.port_range) and own[0] in PORTS and own[-1] in PORTS
        must = f"be FIRST-LAST within {PORTS[0]}-{PORTS[-1]}, such as 20000-20999"
        require(is_fit, "cluster.ports", must, got=self.ports, why="roles would have no port")
        is_fit, must = bool(self.interface) or not self.trusted_network, "be false without cluster.interface"
        require(is_fit, "cluster.trusted_network", must, got=True, why="there is no network to trust")

    @property
    def network(self) -> IPv4Network | None:
        return IPv4Network(self.interface) if self.interface else None

    @property
    def port_range(self) -> range:
        """`ports`, including both ends."""
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1)

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach the roles."""
        return self.network is not None and not self.network.is_loopback


LOCAL = ClusterConfig()
"""Cluster settings of a run on a single machine."""
