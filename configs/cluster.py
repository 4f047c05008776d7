"""Several machines: where roles listen for each other, and what may cross the network between them."""

import re
from ipaddress import IPv4Network
from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError, require
from slipstream.configs.generators import GeneratorsConfig, SingleTurnConfig

PLACE = (
    "resume", "runs_dir", "storage_uri", "storage_timeout_s", "cluster", "broker.address", "broker.token_file",
    "weights.fetch_address", "buffer.store", "broker.shards", "loggers", "logging", "exporter",
)  # fmt: skip
"""Settings that say where a run lives, how it is started and who is told. They are no part of its identity: a run may
move."""
_GUEST_NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}"
_PORTS = range(1024, 65536)
"""Ports that a user may bind."""


class CoreConfig(Config):
    """Machines of the learner, on the first of which broker, store and rank 0 are, and what is reserved on each."""

    machines: Annotated[int, Meta(ge=1)] = 1
    """Machines that divide the ranks of the learner evenly."""
    cpus: Annotated[float, Meta(gt=0)] = 2.0
    """Cores on each, for all roles there."""
    gpus: Annotated[int, Meta(ge=0)] = 0
    """GPUs on each, one for each rank there; 0: the learner trains on the CPU."""


class SeatConfig(Config):
    """Needs of a generator, for which Ray chooses a machine."""

    cpus: Annotated[float, Meta(gt=0)] = 1.0
    """Cores of the generator and its engine."""
    gpus: Annotated[int, Meta(ge=0)] = 0
    """GPUs of its engine, one for each worker; 0: it has none."""
    labels: dict[str, str] = {}
    """Labels that the machine must have, such as `{accelerator: H100}`: those of `ray start --labels`."""


class GuestsConfig(Config):
    """Generators on machines that nobody of the run controls, each with a key of its own."""

    names: list[str] = []
    """Guests that may join, by the id of their generator. The broker writes the token of each into `guests/` of the run
    folder."""
    audit_share: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Share of a guest's groups whose answers generators of one's own score and grade again."""
    max_logprob_diff: Annotated[float, Meta(gt=0)] = 0.05
    """Largest mean absolute difference of a guest's log-probabilities from those of one's own engine, nats, beside
    twice the difference of one's own generators."""

    def __post_init__(self) -> None:
        odd = next((name for name in self.names if not re.fullmatch(_GUEST_NAME, name)), "")
        must, why = "have names of 1 to 64 letters, digits, _ and -", "they become file names and ids"
        require(not odd, "cluster.guests.names", must, got=odd, why=why)


class ClusterConfig(Config):
    """Machines of the roles, their addresses and ports, and the trust in the network between them."""

    kind: Literal["local", "ray"] = "local"
    """`local`: the launcher starts all roles on its machine. `ray`: generators on the machines of a Ray cluster, which
    is asked for each of them alone."""
    address: str = "auto"
    """Address of Ray's head, `HOST:PORT`; `auto`: the cluster to which this machine belongs."""
    place_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest wait for Ray to place the core or a generator, seconds: an autoscaler takes minutes to add a machine."""
    core: CoreConfig = CoreConfig()
    generator: SeatConfig = SeatConfig()
    guests: GuestsConfig = GuestsConfig()
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
        must, why = "be auto or HOST:PORT of Ray's head", "a driver of Ray Client is on no machine of the cluster"
        require("://" not in self.address, "cluster.address", must, got=self.address, why=why)
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

    def check_machines(self, *, num_ranks: int) -> None:
        """Check that the ranks of the learner can be on its machines. Raises ConfigError."""
        machines = self.core.machines
        must, why = f"divide learner.num_ranks ({num_ranks})", "each machine has as many ranks"
        require(num_ranks % machines == 0, "cluster.core.machines", must, got=machines, why=why)
        must = f"be true with cluster.core.machines={machines}"
        why = "gradients and trajectories cross the network between ranks without encryption"
        require(self.trusted_network or machines == 1, "cluster.trusted_network", must, got=False, why=why)

    def check_ray(self, *, mode: str, num_ranks: int, device: str, num_workers: int) -> None:
        """Check the rest of the run's settings against `kind=ray`; an engine without workers of its own has 0.

        Raises ConfigError.
        """
        if self.kind == "local":
            return
        must, why = f"be local with mode={mode}", "there is no generator to place"
        require(mode == "async", "cluster.kind", must, got=self.kind, why=why)
        must, why = "be set with cluster.kind=ray", "generators on other machines could not reach this one"
        require(bool(self.interface), "cluster.interface", must, got='""', why=why)
        gpus, ranks = self.core.gpus, num_ranks // self.core.machines
        fit = {"auto": (0, ranks), "cuda": (ranks,), "cpu": (0,)}[device]
        must = f"be {' or '.join(map(str, fit))} with learner.num_ranks={num_ranks}, learner.device={device}"
        must += f", cluster.core.machines={self.core.machines}" if self.core.machines > 1 else ""
        require(gpus in fit, "cluster.core.gpus", must, got=gpus, why="each rank has one of its own")
        gpus, must = self.generator.gpus, f"be 0, or the workers of generators.engine ({num_workers})"
        is_fit = not num_workers or gpus in (0, num_workers)
        require(is_fit, "cluster.generator.gpus", must, got=gpus, why="each has one of its own")

    def check_guests(self, *, mode: str, generators: GeneratorsConfig, router_replay: bool) -> None:
        """Check the rest of the run's settings against guests, whose answers must be such that they can be checked.

        Raises ConfigError.
        """
        own = generators.sampling
        agents = (generators.agent, *generators.agents.values())
        unfit = {
            f"mode={mode}": mode != "async",
            f"generators.sampling.temperature={own.temperature:g}": own.temperature != 1,
            f"generators.sampling.top_p={own.top_p:g}": own.top_p != 1,
            f"generators.sampling.top_k={own.top_k}": own.top_k > 0,
            f"generators.baseline={generators.baseline}": generators.has_baseline,
            "an agent that is not single_turn": not all(isinstance(agent, SingleTurnConfig) for agent in agents),
            "model.router_replay=true": router_replay,
        }
        found = next((setting for setting, is_unfit in unfit.items() if is_unfit), "")
        must = f"be empty with {found}"
        require(
            not (self.guests.names and found),
            "cluster.guests.names",
            must,
            got=self.guests.names,
            why="answers of guests could not be scored again by an engine of one's own",
        )

    def check_brokers(self, brokers: int, *, address: str | None, mode: str) -> None:
        """Check that the mode has brokers, and that there are ports for so many, the first at this `broker.address`.

        Raises ConfigError.
        """
        must, why = f"be 1 with mode={mode}", "only mode=async has brokers as processes"
        require(mode == "async" or brokers == 1, "broker.shards", must, got=brokers, why=why)
        port = int(found[1]) if address and (found := re.fullmatch(r"tcp://.*:(\d{1,5})", address, re.ASCII)) else 0
        must, why = f"be <= {_PORTS[-1] + 1 - brokers} with broker.shards={brokers}", "each broker takes the next port"
        require(port + brokers - 1 <= _PORTS[-1], "the port of broker.address", must, got=port, why=why)
        if self.interface and address is None and brokers > 1:
            must = f"hold at least {brokers + 1} ports with broker.shards={brokers}"
            why = "each broker takes one, and so does the learner for weights"
            require(len(self.port_range) > brokers, "cluster.ports", must, got=self.ports, why=why)

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
