"""A CUDA-shaped fake: streams and events that run copies and broadcasts in any order that CUDA may choose.

Operations wait in their stream's queue until the host waits for something; then the device runs a random one of those
that may run, so that a missing event, or a buffer that is reused too early, damages the bytes under some seed.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(eq=False)
class Event:
    is_done: bool = False

    def query(self) -> bool:
        return self.is_done


@dataclass(eq=False)
class Stream:
    """A queue of (name, operation); an operation returns whether it has ended, and is tried again until then."""

    cuda: "FakeCuda"
    name: str
    speed: float = 1.0
    """Weight in the random choice."""
    queue: deque[tuple[str, Callable[[], bool]]] = field(default_factory=deque)

    def enqueue(self, name: str, operation: Callable[[], bool]) -> None:
        self.cuda.events.append(f"{self.name}: enqueue {name}")
        self.queue.append((name, operation))

    def record_event(self) -> Event:
        event = Event()
        self.queue.append(("", lambda: event.__setattr__("is_done", True) is None))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(("", event.query))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.cuda.run_until(lambda: not self.queue)


class FakeCuda(TorchDispatchMode):
    """Stands for torch.cuda; as a context, takes asynchronous copies and counts what is allocated."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.events: list[str] = []
        """Operations as they are enqueued and run, in order, each with its stream."""
        self.default = Stream(self, "default")
        self.streams = [self.default]
        self.current = self.default
        self.allocated: list[tuple[str, int]] = []
        """Stream and bytes of each allocation."""
        self.free_bytes = 2**30
        self.packs_later = False
        self._random = random.Random(seed)

    def Stream(self, device: object = None) -> Stream:  # noqa: N802  (torch's name)
        stream = Stream(self, f"stream-{len(self.streams)}", self._random.choice((0.03, 1.0)))
        self.streams.append(stream)
        return stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device: object = None) -> Stream:
        return self.current

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return self.free_bytes, self.free_bytes

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Run operations in a random order that the streams allow; fails if the device would wait for ever."""
        while not is_reached():
            ready = [stream for stream in self.streams if stream.queue]
            ready.sort(key=lambda stream: self._random.random() ** (1 / stream.speed), reverse=True)
            assert any(self._try(stream) for stream in ready), "the device waits for ever"

    def _try(self, stream: Stream) -> bool:
        name, operation = stream.queue[0]
        if not operation():
            return False
        stream.queue.popleft()
        if name:
            self.events.append(f"{stream.name}: {name}")
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and (kwargs.get("non_blocking") or args[2:3] == (True,)):
            into, source = args[:2]
            self.current.enqueue("copy", lambda: into.copy_(source) is not None)
            return into
        made = func(*args, **kwargs)
        if func is torch.ops.aten.empty.memory_format:
            self.allocated.append((self.current.name, made.nbytes))
        return made


class FakeNccl:
    """One member of a process group: a broadcast runs on a separate stream, after the calling stream.

    `arriving`: what a receiver gets; a sender's buckets are kept in `sent`. The buffer of a broadcast must not change.
    """

    def __init__(self, cuda: FakeCuda, arriving: list[Tensor] | None = None, *, is_stalled: bool = False) -> None:
        self.cuda = cuda
        self.stream = cuda.Stream()
        self.arriving = arriving
        self.sent: list[Tensor] = []
        self.is_stalled = is_stalled
        self.num_started = 0

    def broadcast(self, buffer: Tensor, root: int, *, timeout: timedelta) -> "FakeWork":
        index, begun = self.num_started, list[Tensor]()
        self.num_started += 1

        def begin() -> bool:
            begun.append(buffer.clone())
            return True

        def end() -> bool:
            if self.is_stalled:
                return False
            assert buffer.equal(begun[0]), f"the buffer of broadcast {index} changed during it"
            self.sent.append(buffer.clone())
            if self.arriving is not None:
                buffer.copy_(self.arriving[index])
            return True

        self.cuda.events.append(f"{self.cuda.current.name}: broadcast {index}")
        self.stream.wait_stream(self.cuda.current)
        self.stream.enqueue(f"begin {index}", begin)
        self.stream.enqueue(f"end {index}", end)
        return FakeWork(self.cuda, self.stream.record_event())


class FakeWork:
    def __init__(self, cuda: FakeCuda, ended: Event) -> None:
        self._cuda = cuda
        self._ended = ended

    def wait(self, timeout: timedelta) -> None:
        """The current stream waits, and so does the host, as NCCL's work does with a timeout."""
        self._cuda.current.wait_event(self._ended)
        try:
            self._cuda.run_until(self._ended.query)
        except AssertionError as error:
            raise RuntimeError("the broadcast timed out") from error
