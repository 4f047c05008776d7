"""python -m slipstream.generators.rewards.worker FD MARK POOL: a process that scores samples.

Consumes: a RewardConfig, then Requests, from socket FD.
Produces: one Reply per request, in order; if a function is `async def`, all requests run concurrently.
Waits for: its pool. It holds no state and may be killed at any moment.
Invariant: no process started by a reward function outlives its worker.

The scorer's parent process, the supervisor, cleans up when the scorer exits or on SIGTERM.
"""

import asyncio
import contextvars
import math
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Coroutine, Generator, Iterator
from contextlib import suppress
from types import coroutine
from typing import Any, NoReturn

import msgspec
import psutil

from slipstream.buffer.trajectory import Reward
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.composition import RewardFunctions
from slipstream.generators.rewards.reward import RewardInput, failed_reward
from slipstream.runtime.process import adopt_orphans, die_with_parent

# --- frames: 4-byte length, then MessagePack -------------------------------------------------------------------------
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Request(msgspec.Struct, array_like=True):
    """Samples to score: one, or all answers to compare."""

    id: int
    """Counts from 1."""
    samples: list[RewardInput]
    compares: bool = False


class Reply(msgspec.Struct, array_like=True):
    """The rewards of a request."""

    id: int
    rewards: list[Reward]


decode_config = msgspec.msgpack.Decoder(RewardConfig).decode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply | int | str).decode
"""First the id of the ready scoring process, or its error. Then Replies."""
MEMORY_EXIT = 77
"""Exit code after a reward function ran out of memory."""
STUCK_EXIT = 78
"""Exit code of a worker with a failed call that ignores cancellation."""
SIGNAL_EXIT = 128
"""Exit code of a scorer killed by a signal: this plus the signal number."""


def frame(record: RewardConfig | Request | Reply | int | str) -> bytes:
    """Encode a record with its length before it."""
    body = _encode(record)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Splits chunks of a byte stream into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
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


def _serve(fd: int, mark_fd: int, *, supervisor: int) -> None:
    # A hanging function would not notice a closed socket.
    die_with_parent(signal.SIGKILL, parent=supervisor)
    with socket.socket(fileno=fd) as pool:
        bodies = _receive(pool)
        if (first := next(bodies, None)) is None:
            return
        config = decode_config(first)
        if config.max_memory_mib is not None:
            # Private writable memory, of each child separately. Java and Go reserve more address space than they use.
            _lower(resource.RLIMIT_DATA, config.max_memory_mib * _MIB)
        try:
            # A function's leftover data would fail the next calls too.
            functions = RewardFunctions(config, on_memory_error=_end_without_memory)
            functions.start()
        except MemoryError:
            _end_without_memory()
        except ConfigError as error:
            pool.sendall(frame(str(error)))
            raise SystemExit(1) from None
        except Exception as error:
            pool.sendall(frame(f"{type(error).__name__}: {error}"))
            raise
        pid = os.getpid()
        # The time limit of samples must not include the import above.
        pool.sendall(frame(pid))
        if functions.is_async:
            asyncio.run(_ConcurrentServer(pool, functions, config, Mark(mark_fd)).serve())
            return
        for body in bodies:
            _limit_cpu(config.max_cpu_s)
            request = decode_request(body)
            reward = functions.score(request.samples[0])
            # A child that the function forked must not reply.
            if os.getpid() != pid:
                os._exit(0)
            pool.sendall(frame(Reply(request.id, [reward])))


def _receive(pool: socket.socket) -> Iterator[bytes]:
    decoder = FrameDecoder()
    while data := pool.recv(_READ_BYTES):
        yield from decoder.feed(data)


def _end_without_memory() -> NoReturn:
    os._exit(MEMORY_EXIT)


def _limit_cpu(limit_s: int | None) -> None:
    """Allow `limit_s` of CPU time from now. Beyond it, the kernel sends SIGXCPU."""
    if limit_s is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _lower(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + limit_s)


def _lower(limit: int, value: int) -> None:
    _, most = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if most == resource.RLIM_INFINITY else min(value, most), most))


# --- concurrent calls ------------------------------------------------------------------------------------------------
_CANCEL_S = 1.0
"""Time limit for a canceled call to end, before the worker exits."""
_request_id: contextvars.ContextVar[int] = contextvars.ContextVar("request_id", default=0)


class Mark:
    """Id of the running request, 0 = none, in memory shared with the pool."""

    SIZE = 8

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, self.SIZE)

    def set(self, request_id: int) -> None:
        self._memory[:] = request_id.to_bytes(self.SIZE, "little")

    def get(self) -> int:
        return int.from_bytes(self._memory[:], "little")


class _ConcurrentServer:
    """Runs every request as a task with a time limit."""

    def __init__(self, pool: socket.socket, functions: RewardFunctions, config: RewardConfig, mark: Mark) -> None:
        self._pool = pool
        self._functions = functions
        self._config = config
        self._mark = mark
        self._calls: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        asyncio.get_running_loop().set_task_factory(self._make_task)
        reader, writer = await asyncio.open_connection(sock=self._pool)
        decoder = FrameDecoder()
        while data := await reader.read(_READ_BYTES):
            for body in decoder.feed(data):
                request = decode_request(body)
                _request_id.set(request.id)
                call = asyncio.create_task(self._answer(request, writer))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
                _request_id.set(0)
        # The pool no longer waits for running calls.
        os._exit(0)

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        call = asyncio.create_task(self._functions.score_all(request.samples, compares=request.compares))
        done, _ = await asyncio.wait({call}, timeout=self._config.timeout_s)
        if done:
            writer.write(frame(Reply(request.id, call.result())))
            return
        call.cancel()
        writer.write(frame(Reply(request.id, [timeout_reward(self._config)] * len(request.samples))))
        done, _ = await asyncio.wait({call}, timeout=_CANCEL_S)
        if not done:
            await writer.drain()
            os._exit(STUCK_EXIT)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        # Tasks inherit the request id with the context.
        context = options.get("context") or contextvars.copy_context()
        request_id = context.get(_request_id, 0)
        marked = _run_marked(work, request_id, self._mark, self._config.max_cpu_s) if request_id else work
        return asyncio.Task(marked, loop=loop, **options)


async def _run_marked(work: Coroutine[Any, Any, Any], request_id: int, mark: Mark, max_cpu_s: int | None) -> Any:
    return await _steps(work, request_id, mark, max_cpu_s)


@coroutine
def _steps(
    work: Coroutine[Any, Any, Any], request_id: int, mark: Mark, max_cpu_s: int | None
) -> Generator[Any, Any, Any]:
    """Run `work` with the mark set except while it awaits."""
    resume, value = work.send, None
    while True:
        _limit_cpu(max_cpu_s)
        mark.set(request_id)
        try:
            awaited = resume(value)
        except StopIteration as end:
            return end.value
        finally:
            mark.set(0)
        try:
            resume, value = work.send, (yield awaited)
        except BaseException as error:
            resume, value = work.throw, error


def timeout_reward(config: RewardConfig) -> Reward:
    """Reward of a call that exceeded `timeout_s`."""
    return failed_reward(
        "timeout",
        f"the reward function ({config.summary}) must answer within generators.reward.timeout_s "
        f"({config.timeout_s:g} s), but did not",
    )


# --- the supervisor --------------------------------------------------------------------------------------------------
_REAP_TIMEOUT_S = 1.0
_REAP_INTERVAL_S = 0.005
_EVENTS = {signal.SIGTERM, signal.SIGCHLD}
_STDOUT, _STDERR = 1, 2
_MAX_OUTPUT_BYTES, _OUTPUT_WINDOW_S = 2**16, 10.0
_LEFT_OUT = f"\n[reward function output beyond {_MAX_OUTPUT_BYTES} bytes in {_OUTPUT_WINDOW_S:g} s is dropped]\n"


def main(fd: int, mark_fd: int, pool: int) -> None:
    """Fork the scorer, wait for its exit or SIGTERM, and kill its descendants.

    `fd`: socket to the pool. `mark_fd`: file of the Mark. `pool`: process id; this process exits with it. Exits with
    the scorer's exit code, or SIGNAL_EXIT + the number of the signal that killed it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Orphaned descendants become children, even if they left the process group.
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output, printed = os.pipe()
    supervisor = os.getpid()
    # Blocked signals stay pending until `sigwait`. A handler would lose a signal just before the wait.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _EVENTS)
    scorer = os.fork()
    if scorer == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setpgid(0, 0)
        for stream in (_STDOUT, _STDERR):
            os.dup2(printed, stream)
        os.close(output)
        os.close(printed)
        _serve(fd, mark_fd, supervisor=supervisor)
        return
    os.close(printed)
    forwarder = threading.Thread(target=_forward_output, args=(output,), daemon=True)
    forwarder.start()
    # In both processes, so that neither proceeds before the group exists.
    with suppress(ProcessLookupError):
        os.setpgid(scorer, scorer)
    os.close(fd)
    die_with_parent(signal.SIGTERM, parent=pool)
    code = os.waitstatus_to_exitcode(_wait(scorer))
    _kill_group(scorer)
    _kill_children()
    # For the traceback of a failed import.
    forwarder.join(timeout=_REAP_TIMEOUT_S)
    raise SystemExit(code if code >= 0 else SIGNAL_EXIT - code)


def _wait(scorer: int) -> int:
    while True:
        pid, status = os.waitpid(scorer, os.WNOHANG)
        if pid:
            return status
        if signal.sigwait(_EVENTS) == signal.SIGTERM:
            _kill_group(scorer)


def _forward_output(source: int) -> None:
    """Copy the scorer's output to stdout, rate-limited."""
    room, has_said_so, window_ends_at = 0, False, -math.inf
    while data := os.read(source, _READ_BYTES):
        if (now := time.monotonic()) >= window_ends_at:
            room, has_said_so, window_ends_at = _MAX_OUTPUT_BYTES, False, now + _OUTPUT_WINDOW_S
        kept = data[:room]
        room -= len(kept)
        if len(kept) < len(data) and not has_said_so:
            kept, has_said_so = kept + _LEFT_OUT.encode(), True
        # On a full disk, drop the output: a full pipe would block the reward function.
        with suppress(OSError):
            os.write(_STDOUT, kept)


def _kill_group(scorer: int) -> None:
    # One call, so that no forking process escapes.
    with suppress(ProcessLookupError):
        os.killpg(scorer, signal.SIGKILL)


def _kill_children() -> None:
    ends_at = time.monotonic() + _REAP_TIMEOUT_S
    me = psutil.Process()
    while time.monotonic() < ends_at:
        for child in me.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_REAP_INTERVAL_S)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
