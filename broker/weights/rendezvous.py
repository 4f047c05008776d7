"""Rendezvous: where the ranks of a membership epoch find each other before a process group is built.

The learner owns one TCPStore for the whole run; every epoch has its own prefix in it. A rank says that it is here; rank
0 waits for all and gives the word, which is either to go on or who is missing, so that nobody waits in vain.
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
"""Longest answer of the store when no wait of ours is meant, seconds."""
GO = b"go"
_LOOK_EVERY_S = 0.002
"""Between two looks whether a member has arrived."""


class Seat(NamedTuple):
    """A rank's place in an epoch. Example: Seat(epoch=3, rank=1, num_ranks=4)."""

    epoch: int
    rank: int
    num_ranks: int


def listen(host: str, *, port: int) -> dist.TCPStore:
    """A store on this address alone (given only a port, torch would listen on every interface); port 0 takes any.

    Raises WeightTransferError.
    """
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
        master_listen_fd=listener.detach(),
    )


def connect(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """A client of the learner's store. Raises RuntimeError."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def own_address(host: str, port: int, *, timeout_s: float) -> str:
    """The local address that reaches the learner; found without this machine's name, which may not resolve.

    A store that does not answer ends here, in one sentence, where torch's client would retry and dump its stack.
    Raises OSError.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as probe:
        return probe.getsockname()[0]


def gather(store: dist.Store, seat: Seat, *, deadline: float, is_aborted: Event | None = None) -> None:
    """Wait until all ranks are here or `deadline` (monotonic) passes. Raises RuntimeError, naming who is missing.

    Rank 0 stops waiting when `is_aborted` is set, and all ranks learn of it.
    """
    if seat.rank != SENDER_RANK:
        store.set(f"here/{seat.rank}", b"1")
        _await_word(store, deadline=deadline)
        return
    missing = ", ".join(str(rank) for rank in _missing_ranks(store, seat, deadline, is_aborted))
    verdict = f"rank {missing} did not arrive in time" if missing else ""
    store.set("word", verdict.encode() or GO)
    if missing:
        raise RuntimeError(verdict)


def seconds_left(deadline: float) -> float:
    """Seconds until the deadline; never zero, which torch takes for no timeout at all."""
    return max(deadline - time.monotonic(), 0.001)


def _missing_ranks(store: dist.Store, seat: Seat, deadline: float, is_aborted: Event | None) -> Iterator[int]:
    for rank in range(SENDER_RANK + 1, seat.num_ranks):
        # Looks, instead of a short `wait`: torch writes two lines to stderr whenever one of those is over.
        while not store.check([f"here/{rank}"]):
            if time.monotonic() >= deadline or (is_aborted and is_aborted.is_set()):
                yield rank
                break
            time.sleep(_LOOK_EVERY_S)


def _await_word(store: dist.Store, *, deadline: float) -> None:
    try:
        store.wait(["word"], timedelta(seconds=seconds_left(deadline)))
    except dist.DistStoreError as error:
        raise RuntimeError("rank 0 (the learner) did not give the word in time") from error
    word = store.get("word")
    if word != GO:
        raise RuntimeError(word.decode())
