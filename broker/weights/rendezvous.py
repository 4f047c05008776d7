"""Rendezvous of the ranks of a membership epoch, in a store of the learner that is not the run's Redis store."""

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import NamedTuple

import torch.distributed as dist

from slipstream.broker.errors import WeightTransferError

TORCH_ERRORS = (RuntimeError, ValueError, OSError)
"""DistError and Gloo's errors are RuntimeErrors."""
SENDER_RANK = 0
STORE_TIMEOUT_S = 10.0
"""Default timeout of the learner's store operations."""
PROCEED = b"proceed"
_POLL_INTERVAL_S = 0.002


class EpochRank(NamedTuple):
    """A rank of a membership epoch. Example: EpochRank(epoch=3, rank=1, num_ranks=4)."""

    epoch: int
    rank: int
    num_ranks: int


def listen(host: str, *, ports: Iterable[int]) -> dist.TCPStore:
    """Open the store at the first free port (0 for any). Raises WeightTransferError."""
    # torch itself would listen on every interface.
    listener = _listen_first(host, ports)
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),  # the store now owns and closes it
    )


def _listen_first(host: str, ports: Iterable[int]) -> socket.socket:
    failure = ""
    for port in ports:
        try:
            return socket.create_server((host, port), backlog=128)
        except OSError as error:
            failure = failure or f"{host}:{port}: {error}"
    must = "be an address of this machine with a free port"
    raise WeightTransferError(f"the host of a rendezvous must {must}, got {failure}")


def connect(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """Open a client of the learner's store. Raises RuntimeError."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def own_address(host: str, port: int, *, timeout_s: float) -> str:
    """Local address of a connection to the learner; this machine's name need not resolve. Raises OSError.

    Fails early, whereas torch's client would retry and dump its stack.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as probe:
        return probe.getsockname()[0]


def gather(store: dist.Store, own: EpochRank, *, deadline: float, is_aborted: Event | None = None) -> None:
    """Wait until all ranks have registered. Raises RuntimeError naming the ranks missing at `deadline` (monotonic).

    Rank 0 also stops waiting when `is_aborted` is set.
    """
    if own.rank != SENDER_RANK:
        store.set(f"ready/{own.rank}", b"1")
        try:
            store.wait(["verdict"], timedelta(seconds=seconds_left(deadline)))
        except RuntimeError as error:
            raise RuntimeError("rank 0 (the learner) did not publish its verdict in time") from error
        if (verdict := store.get("verdict")) != PROCEED:
            raise RuntimeError(verdict.decode())
        return
    missing = ", ".join(str(rank) for rank in _missing_ranks(store, own, deadline, is_aborted))
    problem = f"rank {missing} did not arrive in time" if missing else ""
    store.set("verdict", problem.encode() or PROCEED)
    if problem:
        raise RuntimeError(problem)


def seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline, at least 0.001: torch treats 0 as no timeout."""
    return max(deadline - time.monotonic(), 0.001)


def _missing_ranks(store: dist.Store, own: EpochRank, deadline: float, is_aborted: Event | None) -> Iterator[int]:
    for rank in range(SENDER_RANK + 1, own.num_ranks):
        # Not `wait`, because torch writes two lines to stderr for every timeout.
        while not store.check([f"ready/{rank}"]):
            if time.monotonic() >= deadline or (is_aborted and is_aborted.is_set()):
                yield rank
                break
            time.sleep(_POLL_INTERVAL_S)


@contextmanager
def naming_phase(own: EpochRank, phase: str) -> Iterator[None]:
    """Convert torch's errors to WeightTransferErrors that name epoch, rank and phase."""
    try:
        yield
    except TORCH_ERRORS as error:
        where = f"weight epoch {own.epoch}, rank {own.rank} of {own.num_ranks}"
        raise WeightTransferError(f"{where}: {phase} failed: {error}") from error
