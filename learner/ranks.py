"""Ranks: the learner's processes and the collectives between them.

Only rank 0 talks to the store and the generators.

RankWatch: ends a learner rank when another or its machine has been silent for too long. A dying process closes its
connections, which fails the others' collectives. A vanished machine closes nothing.

Produces: an error message and exit code 75, which makes the launcher restart the ranks.
Invariant: a separate thread sends heartbeats, so a step may take any time.
"""

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, TypeVar

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.cluster.seat import MACHINE_VARIABLES
from slipstream.configs.base import ConfigError
from slipstream.learner.errors import RankGroupError
from slipstream.runtime.command_line import TRY_AGAIN
from slipstream.runtime.credentials import is_loopback
from slipstream.runtime.process import NCCL_ENVIRONMENT

SILENCE_S = 60.0
"""Silence of a rank or its machine after which the other ranks exit."""
COLLECTIVE_TIMEOUT_S = 2400.0
"""Limit of a collective. Other ranks wait in one while rank 0 publishes, reads a checkpoint, or waits for its store.
Longer waits call `keep_alive`, so no user setting can exceed it."""

_RENDEZVOUS = "SLIPSTREAM_RANKS"
"""Rendezvous of ranks on one machine, `file:///path`. Without it, they meet at MASTER_ADDR."""
_BEATS = 10
_MAX_INTERVAL_S = 5.0

T = TypeVar("T")

log = structlog.get_logger(__name__)


def launch_ranks(
    module: str, arguments: Sequence[str], *, num_ranks: int, on_cpu: bool, num_machines: int = 1
) -> NoReturn:
    """Run `python -m module arguments` as `num_ranks` ranks under torchrun. If one rank fails, all end.

    Each of several machines calls this with MACHINE_VARIABLES in its environment and starts its share.

    On GPU machines, ranks divide the cores for an offloaded optimizer. On CPU machines, each gets one thread, because
    other roles need the rest. `OMP_NUM_THREADS` overrides both.

    Exits with the code of the rank that failed first (torchrun alone would exit with 1), or with 75, for a restart by
    the launcher, if a signal killed it.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    num_here = num_ranks // num_machines
    num_threads = 1 if on_cpu else max(1, len(os.sched_getaffinity(0)) // num_here)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    # torchrun sets ASYNC_ERROR_HANDLING to 1 unless it is set.
    os.environ.update(NCCL_ENVIRONMENT | os.environ)
    with TemporaryDirectory(prefix="slipstream-ranks-") as folder:
        if num_machines > 1:
            rendezvous = machine_rendezvous(os.environ, num_machines=num_machines)
        else:
            rendezvous = _file_rendezvous(Path(folder))
        try:
            torchrun.run(torchrun.parse_args([*rendezvous, f"--nproc-per-node={num_here}", "-m", module, *arguments]))
        except ChildFailedError as failed:
            _, failure = failed.get_first_failure()
            raise SystemExit(TRY_AGAIN if failure.exitcode < 0 else failure.exitcode) from None
        except SignalException as stopped:
            raise SystemExit(128 + int(stopped.sigval)) from None
    raise SystemExit(0)


def _file_rendezvous(folder: Path) -> list[str]:
    """Torchrun options for ranks that meet through files in a private folder.

    `torchrun --standalone` is unsafe: its stores listen on every interface, and their content is unpickled.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[_RENDEZVOUS] = f"file://{folder}/ranks"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [
        "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={folder}/torchrun",
        "--local-addr=127.0.0.1",
    ]  # fmt: skip


def machine_rendezvous(environment: Mapping[str, str], *, num_machines: int) -> list[str]:
    """Torchrun options for one of several machines. Raises ConfigError without MACHINE_VARIABLES."""
    number, address, port = (environment.get(name, "") for name in MACHINE_VARIABLES)
    numbers = range(num_machines)
    if not (number.isdecimal() and int(number) in numbers and address and port.isdecimal()):
        got = ", ".join(f"{name}={environment.get(name, '')!r}" for name in MACHINE_VARIABLES)
        raise ConfigError(
            f"each machine of cluster.learner.machines={num_machines} must have its number, 0 to {numbers[-1]}, in "
            f"NODE_RANK, and an address and a free port of machine 0 in MASTER_ADDR and MASTER_PORT, got {got}: set "
            "them, start the ranks with torchrun, or use cluster.kind=ray or `slipstream launch`."
        )
    return [f"--nnodes={num_machines}", f"--node-rank={number}", f"--master-addr={address}", f"--master-port={port}"]


_GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torch reads to form the process group."""


def check_environment(environment: Mapping[str, str], *, num_ranks: int, is_trusted: bool) -> None:
    """Raise ConfigError unless a rank's variables fit. `is_trusted`: collectives may cross a network."""
    if missing := [name for name in _GIVEN if not environment.get(name)]:
        raise ConfigError(
            f"a learner rank must have {', '.join(_GIVEN)} in its environment, got no {', '.join(missing)}: start "
            "ranks with torchrun, or set all of these; without RANK, the learner starts its ranks itself."
        )
    if int(environment["WORLD_SIZE"]) != num_ranks:
        raise ConfigError(
            f"learner.num_ranks must be the number of ranks that were started, got {num_ranks} with WORLD_SIZE="
            f"{environment['WORLD_SIZE']}: it is machines x ranks per machine (torchrun: --nnodes x --nproc-per-node)."
        )
    is_one_machine = environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]
    if not (is_trusted or is_one_machine or is_loopback(environment["MASTER_ADDR"])):
        raise ConfigError(
            "cluster.trusted_network must be true for learner ranks on several machines, got false: their collectives "
            "are neither encrypted nor authenticated; set it, with cluster.interface, if the network is private."
        )


class Ranks:
    """One process's view of its rank group. Every method except `post` and `posted` is collective."""

    def __init__(self, *, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        """Device of this rank's models and collectives."""
        self._sharing = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        """Index of this rank's share of samples, and the number of shares."""
        return self.rank // self._sharing, self.size // self._sharing

    def share_sequences(self, size: int) -> dist.ProcessGroup | None:
        """Make each `size` consecutive ranks share sequences. Returns this rank's group, or None if `size` is 1."""
        self._sharing = size
        groups = [list(range(first, first + size)) for first in range(0, self.size, size)]
        return dist.new_subgroups_by_enumeration(groups)[0] if size > 1 else None

    def broadcast_bytes(self, payloads: Sequence[bytes] | None, *, source: int = 0) -> list[bytes]:
        """Send payloads of rank `source` to all. The others pass None and block until it calls."""
        if self.size == 1:
            return list(payloads or ())
        sizes = [len(payload) for payload in payloads] if payloads is not None else None
        lengths = self.broadcast_ints(sizes, source=source)
        if not sum(lengths):
            return [b""] * len(lengths)
        # A collective per payload would cost hundreds of round trips.
        if payloads is None:
            flat = torch.empty(sum(lengths), dtype=torch.uint8, device=self.device)
        else:
            flat = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8).to(self.device)
        self._collective("broadcast payloads", lambda: dist.broadcast(flat, src=source))
        joined = flat.cpu().numpy().tobytes()
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """One payload per rank, in rank order, on every rank."""
        sent = {self.rank: [payload]}
        return [self.broadcast_bytes(sent.get(rank), source=rank)[0] for rank in range(self.size)]

    def broadcast_ints(self, values: Sequence[int] | None, *, source: int = 0) -> list[int]:
        """Like `broadcast_bytes`, for numbers."""
        if self.size == 1:
            return list(values or ())
        count = torch.tensor([len(values or ())], dtype=torch.int64, device=self.device)
        self._collective("broadcast a count", lambda: dist.broadcast(count, src=source))
        numbers = torch.tensor(values or [0] * int(count), dtype=torch.int64, device=self.device)
        if len(numbers):
            self._collective("broadcast numbers", lambda: dist.broadcast(numbers, src=source))
        return numbers.tolist()

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum, on the device of `values`. Ranks with the same samples count once."""
        return self.sum_all(torch.zeros_like(values) if self.rank % self._sharing else values)

    def sum_all(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        self._reduce(torch.zeros(1), dist.ReduceOp.SUM)

    def post(self, subject: str, word: str) -> None:
        """Publish a value without waiting. Thread-safe."""
        if self.size > 1:
            self._call_store(lambda store: store.set(f"{subject}/{self.rank}", word))

    def posted(self, subject: str, *, rank: int) -> str:
        """Newest value that `rank` posted, or empty."""
        key = f"{subject}/{rank}"
        return self._call_store(lambda store: store.get(key).decode() if store.check([key]) else "")

    def _call_store(self, call: Callable[[Any], T]) -> T:
        try:
            return call(dist.distributed_c10d._get_default_store())
        except RuntimeError as error:
            raise RankGroupError(f"the rendezvous of the learner's ranks must be reachable, got: {error}") from error

    def _reduce(self, values: Tensor, operation: dist.ReduceOp) -> Tensor:
        if self.size == 1:
            return values
        reduced = values.to(self.device, copy=True)
        self._collective("reduce numbers", lambda: dist.all_reduce(reduced, op=operation))
        return reduced.to(values.device)

    def _collective(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise RankGroupError(
                f"all {self.size} learner ranks must be alive to {what}, got an error on rank {self.rank}: {error}"
            ) from error


def leave(store: Any, rank: int) -> None:
    """Announce that this rank ends normally. Raises RuntimeError."""
    store.set(f"left/{rank}", "1")


def _end_process(message: str) -> None:
    # An exception would not reach the main thread in a collective.
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(TRY_AGAIN)


class RankWatch:
    """Two threads per rank: one writes and reads heartbeats, one checks for silence.

    The first hangs if the rendezvous, on rank 0's machine, vanishes.
    """

    def __init__(self, store: Any, *, rank: int, size: int, timeout_s: float) -> None:
        """`store`: a dedicated connection to the rendezvous."""
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._timeout_s = timeout_s
        self._interval_s = min(_MAX_INTERVAL_S, timeout_s / _BEATS)
        self._host = socket.gethostname()
        self._beats = dict.fromkeys(self._others, "")
        """Newest heartbeat per rank: a number and the host name."""
        self._silent_s = dict.fromkeys(self._others, 0.0)
        self._unread_s = 0.0
        """Time since all heartbeats were last readable."""
        self._stopping = threading.Event()

    def meet(self, *, timeout_s: float) -> None:
        self._store.set(f"alive/{self._rank}", f"0 {self._host}")
        self._store.wait([f"alive/{other}" for other in self._others], timedelta(seconds=timeout_s))
        for other in self._others:
            self._listen_to(other)

    def start(self) -> None:
        for run in (self._beat, self._judge):
            threading.Thread(target=run, name=f"rank-watch-{run.__name__[1:]}", daemon=True).start()

    def _beat(self) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            try:
                self._store.set(f"alive/{self._rank}", f"{number} {self._host}")
                for other in self._others:
                    self._listen_to(other)
                self._unread_s = 0.0
            except RuntimeError as error:
                # Counts as silence, like a rendezvous that does not answer.
                log.debug("rendezvous_lost", reason=str(error))
            self._stopping.wait(self._interval_s)

    def _listen_to(self, other: int) -> None:
        key = f"alive/{other}"
        beat = self._store.get(key).decode() if self._store.check([key]) else ""
        if beat != self._beats[other]:
            self._beats[other], self._silent_s[other] = beat, 0.0
        if self._store.check([f"left/{other}"]):
            self._silent_s[other] = -math.inf

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._stopping.wait(self._interval_s):
            # Capped, because a suspended process cannot read heartbeats.
            passed_s = min(time.monotonic() - before, 2 * self._interval_s)
            before = time.monotonic()
            self._unread_s += passed_s
            for other in self._others:
                self._silent_s[other] += passed_s
            if silent := [other for other in self._others if self._silent_s[other] > self._timeout_s]:
                limit = f"within {self._timeout_s:g} s"
                names = " and ".join(f"rank {other} on {self._host_of(other)}" for other in silent)
                message = (
                    f"all learner ranks must send a heartbeat {limit}, got none from {names}: a machine is down or a "
                    "process hangs; the ranks are restarted."
                )
                # Without the rendezvous on rank 0's machine, the others' state is unknown.
                if self._unread_s > self._timeout_s / 2 and self._rank:
                    message = (
                        f"the machine of learner rank 0, {self._host_of(0)}, must answer the other ranks {limit}, got "
                        f"nothing on rank {self._rank}: the machine or the network to it is down; the ranks are "
                        "restarted."
                    )
                _end_process(message)
                return

    def _host_of(self, rank: int) -> str:
        return self._beats[rank].partition(" ")[2] or "an unknown machine"


def join_ranks(
    *,
    rank: int,
    size: int,
    device: torch.device,
    rendezvous: str | None = None,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    silence_s: float | None = None,
) -> Ranks:
    """Form the default process group: Gloo on CPUs, NCCL on GPUs. Raises RankGroupError.

    `rendezvous`: `tcp://host:port` or `file:///path`, by default from the environment. Blocks until all ranks have
    joined, at most `timeout_s`, which also limits later collectives. `silence_s`: for a RankWatch.
    """
    if size > 1 and rendezvous is None:
        rendezvous = os.environ.get(_RENDEZVOUS, "env://")
    # DeepSpeed needs a group even for one rank. Several in a process share the first.
    if not (size == 1 and dist.is_initialized()):
        _initialize(rank=rank, size=size, device=device, timeout_s=timeout_s, rendezvous=rendezvous)
    if size > 1 and silence_s is not None:
        # Forming a group can keep the default connection busy.
        store = dist.distributed_c10d._get_default_store().clone()
        watch = RankWatch(store, rank=rank, size=size, timeout_s=silence_s)
        try:
            watch.meet(timeout_s=timeout_s)
        except RuntimeError as error:
            raise RankGroupError(f"{size} learner ranks must meet within {timeout_s:g} s, got: {error}") from error
        watch.start()
    return Ranks(rank=rank, size=size, device=device)


def exit_rank() -> NoReturn:
    """Leave the group and end this process successfully."""
    # The rendezvous may have ended with the other ranks.
    with suppress(RuntimeError):
        leave(dist.distributed_c10d._get_default_store(), dist.get_rank())
    # NCCL requires destroying the group before the process ends.
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter teardown, where threads of training libraries aborted one in twenty ZeRO-3 ranks under load.
    os._exit(0)


def _initialize(*, rank: int, size: int, device: torch.device, timeout_s: float, rendezvous: str | None) -> None:
    where = {"init_method": rendezvous} if rendezvous else {"store": dist.HashStore()}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **where)
    except (RuntimeError, ValueError, OSError) as error:
        must = "a single learner rank must form its process group, which needs the loopback interface, and could not"
        if rendezvous:
            must = f"{size} learner ranks must meet at {rendezvous} within {timeout_s:g} s, rank {rank} could not"
        raise RankGroupError(f"{must}: {error}") from error
