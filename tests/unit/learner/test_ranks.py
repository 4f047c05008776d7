import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.learner import ranks as ranks_module
from slipstream.learner.build import choose_device
from slipstream.learner.errors import RankGroupError, TrainEngineError
from slipstream.learner.ranks import RankWatch, check_environment, join_ranks, leave, machine_rendezvous
from slipstream.learner.role import wait_for_token
from slipstream.runtime.clock import Deadline, WaitTimeoutError
from slipstream.runtime.credentials import TOKEN_VARIABLE, make_token
from slipstream.runtime.run_folder import RunFolder
from tests.unit.learner.builders import CPU

TIMEOUT_S = 2.0
DEADLINE_S = 20.0


class Lost(dist.Store):
    """A rendezvous on a machine that vanished."""

    def __init__(self) -> None:
        super().__init__()
        self.is_back = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.is_back.wait(DEADLINE_S)


class Watches:
    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.watches: list[RankWatch] = []
        self.ended: list[str] = []
        self.has_ended = threading.Event()

    def join(self, rank: int, *, size: int = 2, store: dist.Store | None = None) -> RankWatch:
        watch = RankWatch(store or self.store, rank=rank, size=size, timeout_s=TIMEOUT_S)
        watch._host = f"node{rank}"
        self.watches.append(watch)
        watch.start()
        return watch

    def end(self, message: str) -> None:
        self.ended.append(message)
        self.has_ended.set()


@pytest.fixture
def ranks(monkeypatch) -> Iterator[Watches]:
    made = Watches()
    monkeypatch.setattr(ranks_module, "_end_process", made.end)
    yield made
    for watch in made.watches:
        watch._stopping.set()
    # Before the patch goes: the real function would end this process.
    for thread in threading.enumerate():
        if thread.name == "rank-watch-judge":
            thread.join(DEADLINE_S)


def test_a_silent_rank_is_named_with_its_machine(ranks: Watches):
    ranks.join(0, size=3)
    ranks.join(1, size=3)
    silent = ranks.join(2, size=3)
    ranks.store.wait(["alive/2"], timedelta(seconds=DEADLINE_S))
    silent._stopping.set()
    assert ranks.has_ended.wait(DEADLINE_S)
    message = ranks.ended[0]
    assert message == (
        "all learner ranks must send a heartbeat within 2 s, got none from rank 2 on node2: "
        "a machine is down or a process hangs; the ranks are restarted."
    )


def test_live_ranks_and_ranks_that_left_end_no_rank(ranks: Watches):
    ranks.join(0)
    other = ranks.join(1)
    assert not ranks.has_ended.wait(1.25 * TIMEOUT_S)
    leave(ranks.store, 1)
    other._stopping.set()
    assert not ranks.has_ended.wait(1.25 * TIMEOUT_S)


def test_a_lost_rendezvous_is_blamed_on_rank_0(ranks: Watches):
    lost = Lost()
    ranks.join(1, store=lost)
    assert ranks.has_ended.wait(DEADLINE_S)
    lost.is_back.set()
    assert ranks.ended[-1].startswith("the machine of learner rank 0, an unknown machine, must answer")


def test_a_process_that_was_suspended_blames_no_rank(ranks: Watches, monkeypatch: pytest.MonkeyPatch):
    stood_still_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood_still_s[0])
    monkeypatch.setattr(ranks_module, "time", clock)
    ranks.join(0)
    ranks.join(1)
    assert not ranks.has_ended.wait(TIMEOUT_S / 4)
    stood_still_s[0] = 1000.0
    assert not ranks.has_ended.wait(1.25 * TIMEOUT_S)


def test_several_ranks_need_a_rendezvous():
    with pytest.raises(RankGroupError, match="2 learner ranks must meet at env://"):
        join_ranks(rank=0, size=2, device=CPU, timeout_s=1.0)


GIVEN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_ranks_of_another_launcher_need_all_variables_their_number_and_between_machines_a_trusted_network():
    check_environment(GIVEN, num_ranks=2, is_trusted=True)
    with pytest.raises(ConfigError, match=r"learner\.num_ranks must be the number .*, got 4 with WORLD_SIZE=2"):
        check_environment(GIVEN, num_ranks=4, is_trusted=True)
    with pytest.raises(ConfigError, match="got no LOCAL_RANK, MASTER_PORT: start ranks with torchrun"):
        check_environment(GIVEN | {"LOCAL_RANK": "", "MASTER_PORT": ""}, num_ranks=2, is_trusted=True)
    with pytest.raises(ConfigError, match=r"^cluster\.trusted_network must be true for learner ranks on several"):
        check_environment(GIVEN, num_ranks=2, is_trusted=False)
    for alone in ({"LOCAL_WORLD_SIZE": "2"}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "localhost"}):
        check_environment(GIVEN | alone, num_ranks=2, is_trusted=False)


def test_each_machine_of_a_learner_needs_its_number_and_where_all_meet():
    given = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "20999"}
    options = ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.5", "--master-port=20999"]
    assert machine_rendezvous(given, num_machines=2) == options
    for missing in ({"NODE_RANK": "2"}, {"NODE_RANK": ""}, {"MASTER_ADDR": ""}, {"MASTER_PORT": "any"}):
        with pytest.raises(ConfigError, match=r"^each machine of cluster\.learner\.machines=2 must have its number, 0"):
            machine_rendezvous(given | missing, num_machines=2)


def test_a_missing_loopback_interface_is_reported(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to find address for: lo")

    # Another test in this process may have formed its group.
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(RankGroupError, match=r"a single learner rank .* the loopback interface, .* address for: lo"):
        join_ranks(rank=0, size=1, device=CPU, timeout_s=5.0)


@pytest.mark.parametrize("token", ["", "a token of one's own"])
def test_a_learner_with_a_mistyped_name_suggests_existing_runs_and_creates_none(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    run, mistyped = (load([f"name={name}", f"runs_dir={tmp_path}"]) for name in ("mine", "mien"))
    expected = make_token(run)
    RunFolder(run).open()
    assert wait_for_token(run, deadline=Deadline(0, what="a run")) == expected
    with pytest.raises(WaitTimeoutError, match=r"missing: run 'mien' in .*: did you mean 'mine'\?; correct name="):
        wait_for_token(mistyped, deadline=Deadline(0.3, what="a run"))
    assert [folder.name for folder in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(("setting", "num_gpus"), [("cuda", 0), ("cuda", 2), ("auto", 2)])
def test_a_rank_without_a_gpu_is_reported(setting: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert choose_device("cpu", local_rank=2) == torch.device("cpu")
    with pytest.raises(TrainEngineError, match=rf"^learner.device={setting} needs .*, got {num_gpus} .* for 3 or more"):
        choose_device(setting, local_rank=2)
    if num_gpus:
        assert choose_device(setting, local_rank=1) == torch.device("cuda", 1)
