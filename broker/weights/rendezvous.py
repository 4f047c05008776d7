"""Rendezvous: the ranks of a membership epoch meet before they build a process group.

The learner owns one TCPStore for the whole run; every epoch has its own prefix in it. Each rank registers; rank 0 waits
for all and publishes a verdict, either to proceed or which ranks are missing, so that no rank waits in vain.
"""

import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from threading import Event
from typing import NamedTuple

import torch.distributed as dist

from slipstream.broker.errors import WeightTransferError

SENDER_RANK = 0
STORE_TIMEOUT_S = 10.0
"""Timeout of store operations other than our own waits, seconds."""
PROCEED = b"proceed"
_POLL_INTERVAL_S = 0.002


class EpochRank(NamedTuple):
    """A rank of a membership epoch. Example: EpochRank(epoch=3, rank=1, num_ranks=4)."""

    epoch: int
    rank: int
    num_ranks: int


def listen(host: str, *, port: int) -> dist.TCPStore:
    """Open the store on this address; port 0 takes any free one.

    Raises WeightTransferError.
    """
    # Bound here, because torch, given only a port, listens on every interface.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise WeightTransferError(
            f"weights.host must be an address of this machine with a free port, got {host}:{port}: {error}"
        ) from error
    bound_port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        bound_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),  # the store owns and closes it from here on
    )


def connect(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """Open a client of the learner's store. Raises RuntimeError."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def own_address(host: str, port: int, *, timeout_s: float) -> str:
    """Return the local address of a connection to the learner, independent of whether this machine's name resolves.

    Connecting by hand also detects an unreachable store early, with a short error; torch's client would retry and dump
    its stack. Raises OSError.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as probe:
        return probe.getsockname()[0]


def gather(store: dist.Store, own: EpochRank, *, deadline: float, is_aborted: Event | None = None) -> None:
    """Wait until all ranks have registered or `deadline` (monotonic) passes. Raises RuntimeError, naming the missing.

    Rank 0 stops waiting when `is_aborted` is set; its verdict then reaches all ranks.
    """
    if own.rank != SENDER_RANK:
        store.set(f"ready/{own.rank}", b"1")
        _await_verdict(store, deadline=deadline)
        return
    missing = ", ".join(str(rank) for rank in _missing_ranks(store, own, deadline, is_aborted))
    # Published in both cases: the other ranks wait for it, whether or not they are the missing ones.
    verdict = f"rank {missing} did not arrive in time" if missing else ""
    store.set("verdict", verdict.encode() or PROCEED)
    if missing:
        raise RuntimeError(verdict)


def seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline; at least a millisecond, because torch takes zero for no timeout."""
    return max(deadline - time.monotonic(), 0.001)


def _missing_ranks(store: dist.Store, own: EpochRank, deadline: float, is_aborted: Event | None) -> Iterator[int]:
    for rank in range(SENDER_RANK + 1, own.num_ranks):
        # Polling instead of `wait`: torch writes two lines to stderr for every wait that times out.
        while not store.check([f"ready/{rank}"]):
            if time.monotonic() >= deadline or (is_aborted and is_aborted.is_set()):
                yield rank
                break
            time.sleep(_POLL_INTERVAL_S)


def _await_verdict(store: dist.Store, *, deadline: float) -> None:
    try:
        store.wait(["verdict"], timedelta(seconds=seconds_left(deadline)))
    except dist.DistStoreError as error:
        raise RuntimeError("rank 0 (the learner) did not publish its verdict in time") from error
    verdict = store.get("verdict")
    if verdict != PROCEED:
        raise RuntimeError(verdict.decode())
