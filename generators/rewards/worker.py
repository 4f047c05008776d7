"""python -m slipstream.generators.rewards.worker FD: a process that scores one sample after the other.

Consumes: a Job, then RewardInputs, from socket FD.
Produces: one Reward per sample, in order.
Waits for: its pool. It holds no state and may be killed at any moment.
Invariant: nothing that a reward function started outlives its worker.

It is two processes: one scores, and its parent, the supervisor, cleans up when that one ends or SIGTERM comes.
"""

import math
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import psutil

from slipstream.buffer.trajectory import Reward
from slipstream.generators.rewards.reward import RewardFunction, RewardInput, evaluate, load_reward
from slipstream.runtime.process import adopt_orphans, die_with_parent

# --- frames: four bytes of length, then MessagePack ------------------------------------------------------------------
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Job(msgspec.Struct):
    """A worker's first frame: its reward function and limits.

    Example: Job("my_rewards:score", {"strictness": 2}, max_cpu_s=None, max_memory_mib=4096)
    """

    function: str
    """Import path of the reward function, `module:function`."""
    arguments: dict
    max_cpu_s: int | None = None
    """CPU time of one call, seconds; None = no limit."""
    max_memory_mib: int | None = None
    """Memory of each process, MiB; None = no limit."""


decode_job = msgspec.msgpack.Decoder(Job).decode
decode_sample = msgspec.msgpack.Decoder(RewardInput).decode
decode_reply = msgspec.msgpack.Decoder(Reward | int).decode
"""One reply per sample, in order; preceded by the id of the process that scores, once that is ready."""
MEMORY_EXIT = 77
"""Exit code of a worker whose reward function ran out of memory."""
SIGNAL_EXIT = 128
"""Exit code of a worker whose scoring process a signal ended, less the signal's number, as shells report it."""


def frame(record: Job | RewardInput | Reward | int) -> bytes:
    """Encode a record as one frame."""
    body = _encode(record)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Splits a byte stream, fed in chunks of any size, into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of the frames that `data` completes."""
        self._pending += data
        start = 0
        while (body_start := start + _LENGTH.size) <= len(self._pending):
            end = body_start + _LENGTH.unpack_from(self._pending, start)[0]
            if end > len(self._pending):
                break
            yield bytes(self._pending[body_start:end])
            start = end
        del self._pending[:start]


# --- the scoring process ---------------------------------------------------------------------------------------------
_READ_BYTES = 1 << 16
_MIB = 2**20


def _serve(fd: int, *, supervisor: int) -> None:
    """Score until the pool closes the socket."""
    # A reward function that hangs does not see the socket close: the kernel must end it with its supervisor.
    die_with_parent(signal.SIGKILL, parent=supervisor)
    with socket.socket(fileno=fd) as pool:
        bodies = _receive(pool)
        first = next(bodies, None)
        if first is None:
            # The pool closed before it had anything to score.
            return
        job = decode_job(first)
        _limit_memory(job.max_memory_mib)
        function = _ending_at_memory_error(load_reward(job.function, job.arguments))
        pid = os.getpid()
        # Ready: the import above may have taken long, and the time limit of samples must not include it.
        pool.sendall(frame(pid))
        for body in bodies:
            _limit_cpu(job.max_cpu_s)
            reward = evaluate(function, decode_sample(body))
            # A copy of this process that the function forked and let return must not answer in its place.
            if os.getpid() != pid:
                os._exit(0)
            pool.sendall(frame(reward))


def _receive(pool: socket.socket) -> Iterator[bytes]:
    decoder = FrameDecoder()
    while data := pool.recv(_READ_BYTES):
        yield from decoder.feed(data)


def _ending_at_memory_error(function: RewardFunction) -> RewardFunction:
    """Have the worker end when memory runs out: what the function still holds would fail the next calls, too."""

    def score(sample: RewardInput) -> object:
        try:
            return function(sample)
        except MemoryError:
            os._exit(MEMORY_EXIT)

    return score


def _limit_memory(limit_mib: int | None) -> None:
    """Bound the private writable memory of this process and, separately, of each one that it starts."""
    # Not the address space, of which runtimes such as Java's or Go's reserve far more than they use.
    if limit_mib is not None:
        _lower(resource.RLIMIT_DATA, limit_mib * _MIB)


def _limit_cpu(limit_s: int | None) -> None:
    """Allow `limit_s` of CPU time from now; beyond it the kernel ends this process with SIGXCPU."""
    if limit_s is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _lower(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + limit_s)


def _lower(limit: int, value: int) -> None:
    _, most = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if most == resource.RLIM_INFINITY else min(value, most), most))


# --- the supervisor --------------------------------------------------------------------------------------------------
_REAP_TIMEOUT_S = 1.0
_REAP_INTERVAL_S = 0.005
_EVENTS = {signal.SIGTERM, signal.SIGCHLD}
_STDOUT, _STDERR = 1, 2
_MAX_OUTPUT_BYTES, _OUTPUT_WINDOW_S = 2**16, 10.0
_LEFT_OUT = (
    f"\n[what the reward function prints beyond {_MAX_OUTPUT_BYTES} bytes in {_OUTPUT_WINDOW_S:g} s is left out]\n"
)


def main(fd: int, pool: int) -> None:
    """Fork the scoring process, wait for its end or SIGTERM, and kill everything that it started.

    `pool` is the process ID of the pool, with which this process ends. Exits with the scoring process's exit code, or
    128 + the number of the signal that ended it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Processes whose parent has ended become children of this one, even if they left the process group.
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output, printed = os.pipe()
    supervisor = os.getpid()
    # Blocked, they stay pending until `sigwait`: a handler may run just before a wait, which would then last.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _EVENTS)
    scorer = os.fork()
    if scorer == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setpgid(0, 0)
        for stream in (_STDOUT, _STDERR):
            os.dup2(printed, stream)
        os.close(output)
        os.close(printed)
        _serve(fd, supervisor=supervisor)
        return
    os.close(printed)
    forwarder = threading.Thread(target=_forward_output, args=(output,), daemon=True)
    forwarder.start()
    # In both processes, so that neither goes on before the group exists.
    with suppress(ProcessLookupError):
        os.setpgid(scorer, scorer)
    os.close(fd)
    die_with_parent(signal.SIGTERM, parent=pool)
    code = os.waitstatus_to_exitcode(_wait(scorer))
    _kill_group(scorer)
    _kill_children()
    # Last words, such as those of an import that failed.
    forwarder.join(timeout=_REAP_TIMEOUT_S)
    raise SystemExit(code if code >= 0 else SIGNAL_EXIT - code)


def _wait(scorer: int) -> int:
    """Return the wait status of the scoring process; kill its group on SIGTERM."""
    while True:
        pid, status = os.waitpid(scorer, os.WNOHANG)
        if pid:
            return status
        if signal.sigwait(_EVENTS) == signal.SIGTERM:
            _kill_group(scorer)


def _forward_output(source: int) -> None:
    """Copy what the scoring process prints to stdout; drop what would fill a disk or drown a log."""
    room, has_said_so, window_ends_at = 0, False, -math.inf
    while data := os.read(source, _READ_BYTES):
        if (now := time.monotonic()) >= window_ends_at:
            room, has_said_so, window_ends_at = _MAX_OUTPUT_BYTES, False, now + _OUTPUT_WINDOW_S
        kept = data[:room]
        room -= len(kept)
        if len(kept) < len(data) and not has_said_so:
            kept, has_said_so = kept + _LEFT_OUT.encode(), True
        # A full disk costs these lines, not the reward function: it must not wait for somebody to read them.
        with suppress(OSError):
            os.write(_STDOUT, kept)


def _kill_group(scorer: int) -> None:
    # One call for the whole group, which a process that forks without end cannot outrun.
    with suppress(ProcessLookupError):
        os.killpg(scorer, signal.SIGKILL)


def _kill_children() -> None:
    """Kill and reap children until none is left; those of a killed one are children of this process from then on."""
    ends_at = time.monotonic() + _REAP_TIMEOUT_S
    me = psutil.Process()
    while time.monotonic() < ends_at:
        for child in me.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
            time.sleep(_REAP_INTERVAL_S)
            continue
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
