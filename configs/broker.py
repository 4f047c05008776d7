"""Settings of the broker, weight transfer, loggers, and exporter."""

import re
from typing import Annotated, Any, Literal

from msgspec import Meta

from slipstream.configs.base import Config, Positive, require

BROKER_SILENCE_S = 8.0
"""Silence of the broker after which a peer reconnects, seconds."""
CLAIM_LEASES = 4
"""Lease of a claimed batch, in `broker.lease_s`."""
FIRST_BROKER = "broker"
"""Name of the first or only broker of a run."""
BROKER_NAME = re.compile(rf"{FIRST_BROKER}(-\d+)?", re.ASCII)
PROBE_SEQUENCES = 4
"""Canary sequences compared after an update: few, because engines reserve room, but several, because a damaged tensor
may not affect every token."""


class BrokerConfig(Config):
    """Address, limits, and timeouts of the broker."""

    address: str | None = None
    """ZeroMQ endpoint that the broker binds. null: a Unix socket in the run folder, and with `cluster.interface` also a
    port, shown by `status`. Otherwise a port (`tcp://127.0.0.1:5757`) on a loopback address, for tunnels, or in
    `cluster.interface`. For a generator on another machine: the address at which it reaches the broker."""
    shards: Annotated[int, Meta(ge=1, le=64)] = 1
    """Brokers that share the generators of a run, each a process with its own address: `address` and the ports after
    it, or its own Unix socket and port. One broker serves a thousand generators; with several, the others continue when
    one is down."""
    token_file: str | None = None
    """File with the token that encrypts and authenticates all sockets of the run, readable only by its owner. The
    environment variable `SLIPSTREAM_TOKEN` takes precedence. Without either, a token is created in the run folder."""
    join_timeout_s: Positive = 600.0
    """Longest wait of a starting role for the broker, which may start later, or for Ray to place it, seconds."""
    max_message_bytes: Annotated[int, Meta(ge=4096)] = 64 * 1024 * 1024
    """Maximum size of a message, bytes. A larger trajectory is rejected with an error that names it; a data row may
    have half of it. Generators started elsewhere need the same value."""
    peer_timeout_s: Positive = 8.0
    """Silence after which a peer is considered gone, seconds. Larger values tolerate pauses but detect failures
    later."""
    lease_s: Positive = 30.0
    """Time after which a leased prompt is leased again unless its generator pings, seconds; at least three pings must
    fit. A store that does not answer for twice as long ends the run, and a batch that the learner has not renewed for
    four times as long lapses."""

    @property
    def names(self) -> list[str]:
        return [FIRST_BROKER, *(f"{FIRST_BROKER}-{number}" for number in range(1, self.shards))]

    @property
    def store_timeout_s(self) -> float:
        """Longest retry without an answer of the store, seconds: a restart with much data takes 20."""
        return 2 * self.lease_s

    @property
    def claim_lease_s(self) -> float:
        """Time to commit or renew a claim, seconds: long, because a lapsed one costs a whole step."""
        return CLAIM_LEASES * self.lease_s

    @property
    def heartbeat_s(self) -> float:
        """Time between pings, seconds: far below BROKER_SILENCE_S, so that quiet peers don't reconnect, and the peer
        timeout, so that a late ping is no failure.
        """
        return min(1.0, self.peer_timeout_s / 8)


class WeightsConfig(Config):
    """Publication, transfer, and verification of weights."""

    transport: Literal["collective", "snapshot", "delta", "memory"] = "collective"
    """`collective`: shared memory on one machine, and broadcasts over NCCL (GPU) or Gloo (CPU) between machines.
    `snapshot`: each generator fetches every complete version. `delta`: each generator fetches the difference to the
    version it holds. `memory`: handed over within one process (serial mode). A generator can override the first three:
    `python -m generators weights.transport=delta`. On other machines, generators fetch their first version and, without
    `cluster.trusted_network`, deltas instead of joining broadcasts."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: `nccl` if the learner and every generator have their own GPU, otherwise `gloo` through host memory;
    chosen again whenever generators join or leave. `nccl`: rejected where it cannot work."""
    staging: Literal["auto", "device", "host"] = "auto"
    """Memory into which a version is copied while the learner waits. `device`: on the GPU, from where it moves to the
    host during training; takes the size of one version. `host`: always used on CPUs. `auto`: `device` if that is at
    most half of the memory that is free after the first step."""
    publish_every_steps: Annotated[int, Meta(ge=1)] = 1
    """Steps between two policy versions."""
    fetch_address: str | None = None
    """ZeroMQ endpoint of the learner for generators without access to the run folder. null: a Unix socket in the run
    folder, or with `cluster.interface` a port. A tunnel needs a port, such as `tcp://127.0.0.1:5758`, with the same
    number at both ends."""
    bucket_bytes: Annotated[int, Meta(ge=1024)] = 64 * 1024 * 1024
    """Size of one flat broadcast buffer, bytes."""
    transfer_timeout_s: Positive = 60.0
    """Longest broadcast of one bucket, and longest wait for a generator's confirmation of a version, seconds; 10 s more
    per GB of the version."""
    fetch_timeout_s: Positive = 600.0
    """Longest fetch of one version, seconds."""
    max_probe_diff: Positive = 1e-3
    """Maximum mean absolute difference of log-probabilities after an update, nats: between engine and learner on canary
    sequences, and between sampled tokens and the same in a prompt. A generator above it gets no work.
    With a `model.dtype` below float32, the limit is at least three times the difference at the first version. The run
    stops if the tokens of step 1 exceed it."""


class LoggingConfig(Config):
    """Loggers of a run."""

    backends: list[str] | dict[str, dict[str, Any]] = {}
    """Metric destinations: `trackio`, `wandb`, `tensorboard`, or a class as `module:Class`; with their arguments as
    `{wandb: {project: digits}}`. On the command line, a list chooses among those of a file, and a record adds to
    them."""
    samples_every_steps: Annotated[int, Meta(ge=0)] = 10
    """Steps between two tables of eight trained answers; 0 = none. Only with mode=async."""

    def __post_init__(self) -> None:
        is_fit, why = len(set(self.backends)) == len(self.backends), "two would write the same data"
        require(is_fit, "logging.backends", "name each once", got=self.backends, why=why)

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """Arguments of each logger."""
        return self.backends if isinstance(self.backends, dict) else {name: {} for name in self.backends}


class MetricsConfig(Config):
    """Prometheus metrics and OpenTelemetry spans of a run."""

    prometheus_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """Port for Prometheus to scrape, on a loopback address, or on all addresses with `cluster.interface`, where each
    request needs the run's token. null = none."""
    otlp_endpoint: str | None = None
    """OTLP/HTTP address to which recorded steps are sent as spans, such as `http://127.0.0.1:4318/v1/traces`.
    Credentials come from the environment variable `OTEL_EXPORTER_OTLP_HEADERS`."""

    def __post_init__(self) -> None:
        is_url = self.otlp_endpoint is None or re.fullmatch(r"https?://[^@?#\s]+", self.otlp_endpoint) is not None
        # Not shown: it may contain a password.
        shown = "one with them" if "@" in (self.otlp_endpoint or "") else repr(self.otlp_endpoint)
        must = "be an http:// or https:// address without credentials or options"
        require(is_url, "metrics.otlp_endpoint", must, got=shown, why="settings are logged and saved")

    @property
    def is_wanted(self) -> bool:
        return self.prometheus_port is not None or self.otlp_endpoint is not None
