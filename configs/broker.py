"""The broker role, the weight plane, loggers and exporter: addresses, limits, timeouts, verification."""

import re
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from msgspec import Meta

from slipstream.configs.base import Config, require

BROKER_SILENCE_S = 8.0
"""Silence of the broker after which a peer connects anew, seconds."""
FIRST_BROKER = "broker"
"""Name of the only broker of a run, or of the first."""
BROKER_NAME = re.compile(rf"{FIRST_BROKER}(-\d+)?", re.ASCII)
PROBE_SEQUENCES = 4
"""Canary sequences whose log-probabilities are compared after every weight update: few, as engines reserve room for
them, and more than one, as a damaged tensor may spare some tokens."""


class BrokerConfig(Config):
    """Address, limits and timeouts of the broker."""

    address: str | None = None
    """ZeroMQ endpoint that the broker binds; null: a unix socket in the run folder, where every role of the run finds
    it, and with `cluster.interface` also a port, which `status` shows. A port (`tcp://127.0.0.1:5757`) on a loopback
    address for tunnels, or in `cluster.interface`; for a generator on another machine, where it reaches the broker."""
    shards: Annotated[int, Meta(ge=1, le=64)] = 1
    """Brokers that share the generators of a run. Each is a process with an address: `address` and the ports after it,
    or a unix socket and a port of its own. One carries a thousand generators; without it the others go on."""
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
    def names(self) -> list[str]:
        return [FIRST_BROKER, *(f"{FIRST_BROKER}-{number}" for number in range(1, self.shards))]

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
    """`collective`: broadcast over NCCL (GPU), unix sockets or Gloo (CPU). `snapshot`: each generator fetches every
    version whole and generates meanwhile. `delta`: it fetches the difference to the version it holds. `memory`: handed
    over inside one process (serial mode). A generator may choose one of the first three for itself: `python -m
    generators weights.transport=delta`. A joining generator always fetches its first version, and one on another
    machine fetches deltas instead of broadcasts unless `cluster.trusted_network` is set."""
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
    """Largest mean absolute difference between engine and learner in the log-probabilities of the canary sequences, and
    between sampled tokens and the same tokens in a prompt, nats; above it the generator gets no work. With a
    `model.dtype` below float32 three times the difference at the first version, if that is more. Beyond it, the tokens
    of step 1 stop the run."""


class LoggingConfig(Config):
    """Settings of the loggers of a run."""

    options: dict[str, dict[str, Any]] = {}
    """Arguments of a logger by its name in `loggers`, such as `{wandb: {project: digits}}`."""
    curve_every_s: Annotated[float, Meta(ge=0)] = 60.0
    """Least time between two images of the curve, seconds; 0: none."""
    samples_every_steps: Annotated[int, Meta(ge=0)] = 10
    """Steps between two tables of answers that were trained on; 0: none. Only with mode=async."""
    num_samples: Annotated[int, Meta(ge=1)] = 8
    """Answers in such a table."""
    max_queue: Annotated[int, Meta(ge=1)] = 1000
    """Entries that wait for a logger that is slow or hangs, besides the rows of before its start; beyond them the
    oldest is dropped and counted."""
    close_timeout_s: Annotated[float, Meta(gt=0)] = 20.0
    """Time for a logger to take what waits for it once the roles have ended, seconds; it is killed then."""

    def check(self, loggers: list[str]) -> None:
        """Raise ConfigError unless each logger is named once, and all options are of those."""
        why = "two would write the same"
        require(len(set(loggers)) == len(loggers), "loggers", "name each once", got=loggers, why=why)
        unknown = sorted(set(self.options) - set(loggers))
        require(not unknown, "logging.options", "name loggers of the run", got=unknown, why="no other is started")


class ExporterConfig(Config):
    """Metrics of a run for Prometheus, and spans for OpenTelemetry."""

    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """Port at which Prometheus reads the metrics; null: none."""
    host: str = "127.0.0.1"
    """IP address at which it listens; one that is no loopback address asks for the run's token."""
    otlp_endpoint: str | None = None
    """OTLP/HTTP address that recorded steps are sent to as spans, such as `http://127.0.0.1:4318/v1/traces`; its
    credentials are those of `OTEL_EXPORTER_OTLP_HEADERS` in the environment."""

    def __post_init__(self) -> None:
        why = "a name may mean several addresses"
        require(_is_address(self.host), "exporter.host", "be an IP address", got=repr(self.host), why=why)
        is_url = self.otlp_endpoint is None or re.fullmatch(r"https?://[^@?#\s]+", self.otlp_endpoint) is not None
        # Not shown, because it may hold a password.
        shown = "another" if "@" in (self.otlp_endpoint or "") else repr(self.otlp_endpoint)
        must = "be an http:// or https:// address without credentials or options"
        require(is_url, "exporter.otlp_endpoint", must, got=shown, why="settings are logged and written down")

    def check(self, *, mode: str) -> None:
        """Raise ConfigError where no times could be told."""
        is_fit, key = mode == "async" or not self.is_wanted, "exporter.port and exporter.otlp_endpoint"
        require(
            is_fit, key, "be null without mode=async", got=f"mode={mode}", why="the roles of one process count turns"
        )

    @property
    def is_wanted(self) -> bool:
        return self.port is not None or self.otlp_endpoint is not None

    @property
    def is_open(self) -> bool:
        """Whether other machines may reach it."""
        return not ip_address(self.host).is_loopback


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
