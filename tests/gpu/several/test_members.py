"""Broadcasts between GPUs while a member is killed or stopped: it costs one deadline, and no other process."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from slipstream.broker.errors import WeightTransferError
from slipstream.runtime.process import NCCL_ENVIRONMENT
from tests.gpu.device import DEVICE, IS_SMALL, num_generators, take_gpus
from tests.integration.test_weight_round_trip import START_S, Learner, MemberProcess, SignalHalfway, serve_member

pytestmark = [pytest.mark.own_process, pytest.mark.timeout(150)]

LIMIT_S = 3.0
# NCCL's watchdog ends a process this long after it has seen a timeout, unless Slipstream's environment prevents it.
WATCHDOG = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5"}


class SignalAtAccess(SignalHalfway):
    """The same for buckets that are accessed by index, as those that pass through a GPU."""

    def __iter__(self) -> Iterator[Tensor]:
        return list.__iter__(self)

    def __getitem__(self, index: Any) -> Any:
        if index == len(self) // 2:
            self._member.signal(self._number)
        return super().__getitem__(index)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_is_killed_or_stopped_costs_one_deadline(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (NCCL_ENVIRONMENT | WATCHDOG).items():
        monkeypatch.setenv(name, value)
    places = take_gpus(*[1] * num_generators())
    members = [MemberProcess(serve_member, DEVICE.type, **place) for place in places]
    learner = Learner(members, device=DEVICE.type)
    try:
        assert [member.answer(timeout_s=START_S) for member in members] == ["here"] * len(members)
        learner.open_epoch(1, members)
        learner.update(members)
        learner.start_receiving(members, timeout_s=LIMIT_S)
        halfway = (SignalHalfway if IS_SMALL else SignalAtAccess)(learner.packed, member=members[-1], number=number)
        began_at = time.monotonic()
        with pytest.raises(WeightTransferError):
            learner.sender.broadcast(halfway, timeout_s=LIMIT_S)
        assert time.monotonic() - began_at < LIMIT_S + 10
        for member in members[:-1]:
            assert member.answer(timeout_s=LIMIT_S + 20).startswith("error weight epoch 1")
        # The GPU is free again only once the process has ended.
        members[-1].end()
        members[-1] = MemberProcess(serve_member, DEVICE.type, **places[-1])
        members[-1].answer(timeout_s=START_S)
        learner.open_epoch(2, members)
        learner.update(members)
        if not IS_SMALL:
            time.sleep(15)
        learner.update(members)
    finally:
        learner.sender.close()
        for member in members:
            member.end()
