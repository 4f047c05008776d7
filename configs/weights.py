"""The weight plane: how new weights reach the engines, and how that is verified."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config


class WeightsConfig(Config):
    """Publishing and adopting."""

    transport: Literal["collective", "snapshot", "delta", "memory"] = "collective"
    """Broadcast over NCCL (GPU) or Gloo (CPU) | each generator fetches every version whole and generates meanwhile | it
    fetches what changed since the version it holds | handed over inside one process (serial mode). A generator may
    choose one of the first three for itself: `python -m generators weights.transport=delta`. Joiners always fetch their
    first version."""
    backend: Literal["auto", "gloo"] = "auto"
    """NCCL between GPUs and Gloo between CPUs | Gloo through host memory, for generators that share the learner's GPU:
    NCCL refuses two ranks on one device."""
    publish_every_steps: Annotated[int, Meta(ge=1)] = 1
    """Steps per policy version."""
    host: str = "127.0.0.1"
    """Address of the learner as generators see it, loopback only; what they rendezvous at and fetch from listens
    there."""
    fetch_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Where generators fetch from that do not see the run's folder; 0 takes any free port. Give one for a tunnel."""
    bucket_bytes: Annotated[int, Meta(ge=1024)] = 64 * 1024 * 1024
    """Size of one flat buffer, bytes."""
    join_timeout_s: Annotated[float, Meta(gt=0)] = 20.0
    """Longest building of a membership epoch's process group, seconds."""
    transfer_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest broadcast of one bucket, seconds."""
    fetch_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest fetching of one version, seconds; generation goes on meanwhile."""
    adopt_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest wait for a generator's word that it adopted a version, seconds."""
    probe_sequences: Annotated[int, Meta(ge=1)] = 4
    """Canary sequences whose log-probabilities are compared after every adoption."""
    max_probe_diff: Annotated[float, Meta(gt=0)] = 1e-3
    """Largest mean absolute difference of canary log-probabilities, nats; above it the generator refuses work."""
