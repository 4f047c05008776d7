"""Rendezvous: the ranks of a membership epoch meet before they build a process group.

The learner owns one store for the whole run, a file in the run's private folder, or a TCPStore, which takes what anyone
writes who reaches its port; every epoch has its own prefix in it. Each rank registers; rank 0 waits
for all and publishes a verdict, either to proceed or which ranks are missing, so that no rank waits in vain.
"""

import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
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


def listen(host: str, *, ports: Iterable[int]) -> dist.TCPStore:
    """Open the store on this address, at the first free port; 0 takes any. Raises WeightTransferError."""
    # Bound here, because torch, given only a port, listens on every interface.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _bind_first(listener, host, ports)
    bound_port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        bound_port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),  # the store owns and closes it from here on
    )


def _bind_first(listener: socket.socket, host: str, ports: Iterable[int]) -> None:
    failure = ""
    for port in ports:
        try:
            listener.bind((host, port))
            listener.listen(128)
            return
        except OSError as error:
            failure = failure or f"{host}:{port}: {error}"
    listener.close()
    raise WeightTransferError(
        f"the host of a rendezvous must be an address of this machine with a free port, got {failure}"
    )


_FILE = "file://"
FILE_NAME = "rendezvous-"


def create_file(folder: Path) -> str:
    """Return the address of a new store in `folder`; those of learners that were killed are deleted."""
    for left_behind in folder.glob(f"{FILE_NAME}*"):
        left_behind.unlink(missing_ok=True)
    path = folder.resolve() / f"{FILE_NAME}{uuid.uuid4().hex}"
    path.touch(mode=0o600)
    return f"{_FILE}{path}"


def delete_file(address: str) -> None:
    """Delete a store that `create_file` made. Idempotent."""
    Path(address.removeprefix(_FILE)).unlink(missing_ok=True)


def is_file(address: str) -> bool:
    """Return whether an address is that of a file, rather than a host."""
    return address.startswith(_FILE)


def open_file(address: str) -> dist.FileStore:
    """Open a store that `create_file` made. Raises OSError if there is none."""
    path = address.removeprefix(_FILE)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} must be there, on the learner's machine, got no such file")
    # A negative number of users: the learner deletes the file, and not its last user.
    return dist.FileStore(path, -1)


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
    except RuntimeError as error:
        raise RuntimeError("rank 0 (the learner) did not publish its verdict in time") from error
    verdict = store.get("verdict")
    if verdict != PROCEED:
        raise RuntimeError(verdict.decode())
