"""A learner and generators in separate processes: broadcasts survive members that are killed or stopped."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.broker.messages import GroupBackend, Member, OpenEpoch
from slipstream.broker.weights import buckets
from slipstream.broker.weights.collective import CollectiveReceiver, CollectiveSender
from tests.unit.broker.weight_versions import announce, pack

pytestmark = pytest.mark.slow

START_S = 60.0
TIMEOUT_S = 10.0
QUICKLY_S = 5.0
BUCKET_BYTES = 16 << 20
"""More than the kernel buffers for a peer that does not read."""
NUM_BUCKETS = 8


def serve_member(commands: Connection, device: str) -> None:
    """A generator's end in a separate process. Opens epochs and receives broadcasts until the pipe closes; answers with
    an error, or with the sum of each tensor."""
    torch.set_num_threads(1)
    receiver = CollectiveReceiver(device=device)
    commands.send("here")
    while True:
        try:
            action, options = commands.recv()
        except EOFError:
            return
        try:
            if action == "open_epoch":
                receiver.open_epoch(**options)
                commands.send({})
                continue
            received = receiver.receive(**options, cancelled=Event()).tensors
            named = buckets.unpack(received, options["update"].slots)
            commands.send({name: tensor.double().sum().item() for name, tensor in named})
        except WeightTransferError as error:
            commands.send(f"error {error}")


class MemberProcess:
    """A member's process and the pipe to it."""

    def __init__(self, serve: Callable[..., None] = serve_member, *arguments: Any, **variables: str) -> None:
        """`serve(pipe, *arguments)` runs in the process, which has these environment variables, too."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # A daemon could not start vLLM's processes.
        self.process: BaseProcess = context.Process(target=serve, args=(theirs, *(arguments or ("cpu",))))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            self.process.start()
        theirs.close()

    def send(self, action: str, **options: Any) -> None:
        self._pipe.send((action, options))

    def answer(self, *, timeout_s: float = TIMEOUT_S) -> Any:
        assert self._pipe.poll(timeout_s), "a member must answer in time"
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.join(TIMEOUT_S)


class Learner:
    """The sender and its members."""

    def __init__(self, members: list[MemberProcess], *, device: str = "cpu") -> None:
        self.members = members
        self.backend: GroupBackend = "gloo" if device == "cpu" else "nccl"
        self.sender = CollectiveSender("127.0.0.1", device=device)
        self.hold({f"layer.{i}": torch.full((BUCKET_BYTES // 4,), float(i)) for i in range(NUM_BUCKETS)})

    def hold(self, tensors: dict[str, Tensor]) -> None:
        """Take these as the weights to send."""
        self.tensors = tensors
        metadata = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        self.slots, self.sizes = buckets.plan(metadata, bucket_bytes=BUCKET_BYTES)
        self.packed = pack(tensors.items(), self.slots, self.sizes)

    def open_epoch(self, epoch: int, members: list[MemberProcess]) -> None:
        host, port = self.sender.address
        named = [Member(peer_id=f"generator-{i}", incarnation="0") for i in range(len(members))]
        limit_s = START_S if self.backend == "nccl" else TIMEOUT_S
        opening = OpenEpoch(epoch, named, host, port, limit_s, self.backend)
        for index, member in enumerate(members):
            member.send("open_epoch", opening=opening, rank=index + 1)
        self.sender.open_epoch(epoch, num_members=len(members), timeout_s=limit_s, backend=self.backend)
        assert [member.answer(timeout_s=limit_s) for member in members] == [{}] * len(members)

    def start_receiving(self, members: list[MemberProcess], *, timeout_s: float = TIMEOUT_S, version: int = 0) -> None:
        checksums = buckets.checksums(self.packed)
        update = announce(self.slots, self.sizes, checksums, version=version, timeout_s=timeout_s)
        for member in members:
            member.send("receive", update=update)

    def update(self, members: list[MemberProcess]) -> None:
        """Broadcast and check that all members receive it."""
        self.start_receiving(members)
        self.sender.broadcast(self.packed, timeout_s=TIMEOUT_S)
        expected = {name: tensor.double().sum().item() for name, tensor in self.tensors.items()}
        assert [member.answer() for member in members] == [expected] * len(members)


class SignalHalfway(list[Tensor]):
    """Buckets that send a signal to a member after half of them were sent."""

    def __init__(self, packed: list[Tensor], *, member: MemberProcess, number: int) -> None:
        super().__init__(packed)
        self._member = member
        self._number = number

    def __iter__(self) -> Iterator[Tensor]:
        for index, bucket in enumerate(super().__iter__()):
            if index == len(self) // 2:
                self._member.signal(self._number)
            yield bucket


@pytest.fixture(scope="module")
def processes() -> Iterator[list[MemberProcess]]:
    """Four members shared by the module, because each takes seconds to import torch. One may be killed."""
    started = [MemberProcess() for _ in range(4)]
    assert [member.answer(timeout_s=START_S) for member in started] == ["here"] * 4
    yield started
    for member in started:
        member.end()


@pytest.fixture
def learner(processes: list[MemberProcess]) -> Iterator[Learner]:
    alive = [member for member in processes if member.process.is_alive()]
    opened = Learner([alive[0], alive[-1], alive[1]])
    yield opened
    opened.sender.close()


def assert_error_within(limit_s: float, learner: Learner, sent: list[Tensor], *, timeout_s: float) -> None:
    """The sender and the surviving members must all raise within the limit."""
    started = time.monotonic()
    # The error and its traceback stay alive while the members answer, as they do in a future.
    with pytest.raises(WeightTransferError, match=r"epoch 1, rank 0 of 4: broadcast of bucket \d+ of 8 \(") as error:
        learner.sender.broadcast(sent, timeout_s=timeout_s)
    for member in (learner.members[0], learner.members[2]):
        assert member.answer().startswith("error weight epoch 1, rank ")
    assert time.monotonic() - started < limit_s
    assert error.value.__traceback__


def test_a_member_killed_during_a_broadcast_is_excluded(learner: Learner) -> None:
    first, victim, last = learner.members
    learner.open_epoch(1, learner.members)
    learner.update(learner.members)
    learner.start_receiving(learner.members, timeout_s=START_S)
    killing = SignalHalfway(learner.packed, member=victim, number=signal.SIGKILL)
    assert_error_within(QUICKLY_S, learner, killing, timeout_s=START_S)
    victim.process.join(TIMEOUT_S)
    learner.open_epoch(2, [first, last])
    learner.update([first, last])


def test_a_member_stopped_during_a_broadcast_costs_one_deadline(learner: Learner) -> None:
    first, victim, last = learner.members
    learner.open_epoch(1, learner.members)
    learner.start_receiving(learner.members, timeout_s=1.0)
    stopping = SignalHalfway(learner.packed, member=victim, number=signal.SIGSTOP)
    assert_error_within(QUICKLY_S, learner, stopping, timeout_s=1.0)
    learner.open_epoch(2, [last, first])
    learner.update([last, first])
    victim.signal(signal.SIGCONT)
    assert victim.answer().startswith("error weight epoch 1, rank 2 of 4")
    learner.open_epoch(3, learner.members)
    learner.update(learner.members)


def test_members_survive_the_death_of_the_learner(learner: Learner) -> None:
    learner.open_epoch(1, learner.members)
    learner.start_receiving(learner.members, timeout_s=START_S)
    learner.sender.close()
    for member in learner.members:
        assert member.answer(timeout_s=QUICKLY_S).startswith("error weight epoch 1")
    successor = Learner(learner.members)
    successor.open_epoch(1, learner.members)
    successor.update(learner.members)
    successor.sender.close()
