"""The broker role and the weight plane: addresses, limits, timeouts, verification."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config

BROKER_SILENCE_S = 8.0
"""Silence of the broker after which a peer connects anew, seconds."""
PROBE_SEQUENCES = 4
"""Canary sequences whose log-probabilities are compared after every weight update: few, as engines reserve room for
them, and more than one, as a damaged tensor may spare some tokens."""


class BrokerConfig(Config):
    """Address, limits and timeouts of the broker."""

    address: str | None = None
    """ZeroMQ endpoint that the broker binds; null: a unix socket in the run folder, where every role of the run finds
    it, and with `cluster.interface` also a port, which `status` shows. A port (`tcp://127.0.0.1:5757`) on a loopback
    address for tunnels, or in `cluster.interface`; for a generator on another machine, where it reaches the broker."""
    token_file: str | None = None
    """File with the token that encrypts and admits to all sockets of the run, readable by its owner alone.
    `SLIPSTREAM_TOKEN` in the environment takes precedence; without either, a token is made in the run folder."""
    join_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest wait of a starting role for the broker to admit it, seconds; the broker may start later."""
    max_message_bytes: Annotated[int, Meta(ge=4096)] = 64 * 1024 * 1024
    """Largest frame accepted, bytes. A trajectory above it is refused by name, and so is a row of data above half of
    it. Generators that are started elsewhere need the same."""
    peer_timeout_s: Annotated[float, Meta(gt=0)] = 8.0
    """Silence after which a peer counts as gone, seconds. Larger values tolerate longer pauses and detect deaths later.
    """
    lease_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time a generator has for a leased prompt before it is leased again, seconds; pings renew it, so at least three
    must fit."""

    @property
    def heartbeat_s(self) -> float:
        """Time between pings, seconds.

        A second keeps leases and gauges fresh and lies well below BROKER_SILENCE_S: quiet peers need not reconnect. A
        short peer timeout makes pings denser, so that a lost or late one does not look like a death.
        """
        return min(1.0, self.peer_timeout_s / 8)


class WeightsConfig(Config):
    """Publishing weights, applying them in the engines, and verifying the result."""

    transport: Literal["collective", "snapshot", "delta", "memory"] = "collective"
    """`collective`: broadcast over NCCL (GPU) or Gloo (CPU). `snapshot`: each generator fetches every version whole and
    generates meanwhile. `delta`: it fetches the difference to the version it holds. `memory`: handed over inside one
    process (serial mode). A generator may choose one of the first three for itself: `python -m generators
    weights.transport=delta`. A joining generator always fetches its first version, and one on another machine fetches
    deltas instead of broadcasts unless `cluster.trusted_network` is set."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: chosen whenever generators join or leave, by where they are: NCCL if the learner and each of them have a
    GPU of their own, else `gloo`, through host memory. `nccl`: refused where it cannot work."""
    staging: Literal["auto", "device", "host"] = "auto"
    """Memory into which a version is copied while the learner waits. `device`: on its GPU, from where it goes to the
    host while the learner trains on; takes the size of a version there. `auto`: `device` if that is at most half of the
    free memory at the start. `host`: always on a CPU."""
    publish_every_steps: Annotated[int, Meta(ge=1)] = 1
    """Steps between two policy versions."""
    fetch_address: str | None = None
    """ZeroMQ endpoint of the learner from which generators fetch that cannot read the run folder; null: a unix socket
    in it, or with `cluster.interface` a port. A tunnel needs a port, such as `tcp://127.0.0.1:5758`, equal at both of
    its ends."""
    fan_out: Annotated[int, Meta(ge=1)] = 8
    """Generators on other machines that fetch a version from the learner itself; the others fetch it from generators
    that have it, each of which lends it to as many."""
    bucket_bytes: Annotated[int, Meta(ge=1024)] = 64 * 1024 * 1024
    """Size of one flat buffer of a broadcast, bytes."""
    transfer_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest broadcast of one bucket, and longest wait for a generator's confirmation of a version, seconds."""
    fetch_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest fetch of one version, seconds; the generator keeps generating meanwhile."""
    max_probe_diff: Annotated[float, Meta(gt=0)] = 1e-3
    """Largest mean absolute difference between engine and learner in the log-probabilities of the canary sequences,
    nats; above it the generator gets no work. With a `model.dtype` below float32 three times the difference at the
    first version, if that is more."""
