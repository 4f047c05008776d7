"""A learner with one rank on each of two machines (network namespaces) with separate run folders, over S3."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from slipstream.buffer.archive.archive import Archive, whole_ledger
from slipstream.buffer.records import StepEntry
from slipstream.buffer.redis.embedded import find_redis_binary
from slipstream.buffer.redis.run_store import open_run_store
from tests import runs
from tests.machines import Machine, network
from tests.runs import SMALL, kill_tree, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SUBNET = "10.78.0"
HOST = f"{SUBNET}.254"
"""This process, where the object store and Redis listen."""
SETTINGS = (
    *(*SMALL, "name=mine", "learner/engine=deepspeed_zero2", "learner.num_ranks=2", "weights.transport=delta"),
    *("learner.checkpoint.every_steps=3", "buffer/store=redis"),
    *(f"cluster.interface={SUBNET}.0/24", "cluster.trusted_network=true"),
)


class Scene(NamedTuple):
    """Four machines that cannot see each other's folders, an S3 server, and a Redis server."""

    machines: list[Machine]
    environment: dict[str, str]
    settings: tuple[str, ...]
    store_url: str

    def train(self, first: Machine, second: Machine, *overrides: str) -> None:
        """Run broker, generator, and rank 0 on one machine and rank 1 on another until both ranks end."""
        settings = (*SETTINGS, *self.settings, *overrides)
        with ExitStack() as started:

            def start(machine: Machine, role: str, *arguments: str) -> "subprocess.Popen[str]":
                others = [each.folder for each in self.machines if each != machine]
                command = [sys.executable, "-m", role, *arguments]
                process = machine.start(role, *command, hidden=others, environment=self.environment)
                started.callback(kill_tree, process)
                return process

            start(first, "slipstream.broker", *settings)
            start(first, "slipstream.generators", "--id", "one", "name=mine")
            torchrun = ["--nnodes=2", "--nproc-per-node=1", f"--master-addr={first.address}", "--master-port=29400"]
            learner = ["-m", "slipstream.learner", *settings]
            learners = [
                start(machine, "torch.distributed.run", *torchrun, f"--node-rank={rank}", *learner)
                for rank, machine in enumerate((first, second))
            ]
            until(lambda: all(each.poll() is not None for each in learners), timeout_s=240, what="the end of all ranks")
            printed = "\n".join(each.printed("torch.distributed.run")[-4000:] for each in (first, second))
            assert [each.returncode for each in learners] == [0, 0], printed
            archive = first.folder / "runs/mine/archive"
            with open_run_store(self.store_url, "mine", timeout_s=10) as store:
                steps = store.run_state().step
            until(lambda: is_whole(archive, steps=steps), timeout_s=60, what="an archive of all steps")

    def state(self, machine: Machine) -> tuple[list[StepEntry], str]:
        """The ledger, and the name of the checkpoint in the store's pointer."""
        with open_run_store(self.store_url, "mine", timeout_s=10) as store:
            pointer = store.run_state().checkpoint
            assert pointer
            return whole_ledger(store, Archive(machine.folder / "runs/mine/archive")), pointer.name


def is_whole(folder: Path, *, steps: int) -> bool:
    if not (folder / "manifest.jsonl").exists():
        return False
    check = Archive(folder).check()
    return check.is_sound and check.steps == steps


@contextmanager
def redis_at(address: str, folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    options = ["--bind", address, "--port", str(port), "--protected-mode", "no", "--maxmemory-policy", "noeviction"]
    folder.mkdir()
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([find_redis_binary(), *options], cwd=folder, stdout=log)
    try:
        until(lambda: "Ready to accept" in (folder / "log").read_text(), timeout_s=20, what="the store")
        yield f"redis://{address}:{port}/0"
    finally:
        kill_tree(server)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    pytest.importorskip("moto.server", reason="the object store is moto's")
    from tests.object_store import S3Server

    names = [f"slip-st-{letter}" for letter in "abcd"]
    with network(tmp_path, names, subnet=SUBNET) as machines, redis_at(HOST, tmp_path / "redis") as store_url:
        (tmp_path / "task").mkdir()
        runs.make_task(tmp_path / "task", warm=False)
        for machine in machines:
            for each in ("data", "models"):
                (machine.folder / each).symlink_to(tmp_path / "task" / each)
        server = S3Server(HOST)
        settings = (f"buffer.store.url={store_url}", f"storage.uri=s3://{server.new_bucket()}/runs")
        yield Scene(machines, server.environment, settings, store_url)
        server.stop()


def checkpoint(machine: Machine, name: str) -> dict[str, bytes]:
    """Files of a checkpoint, without their checksums."""
    folder = machine.folder / "runs/mine/checkpoints" / name
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "checksums.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_of_two_machines_goes_on_on_two_others_from_the_object_store(scene: Scene) -> None:
    a, b, c, d = scene.machines
    scene.train(a, b, "learner.max_steps=6")
    ledger, name = scene.state(a)
    assert [entry.step for entry in ledger] == [1, 2, 3, 4, 5, 6]
    first, second = checkpoint(a, name), checkpoint(b, name)
    assert second.keys() == {"optimizer-rank-1.safetensors"}
    assert {"state.json", "model/model.safetensors", "optimizer-rank-0.safetensors"} <= first.keys()
    assert second.keys().isdisjoint(first)

    scene.train(c, d, "learner.max_steps=8", "resume=true")
    longer, _ = scene.state(c)
    assert longer[:6] == ledger
    assert [entry.step for entry in longer] == [1, 2, 3, 4, 5, 6, 7, 8]
    # The state that both machines started from: all files of the other two machines, bit for bit.
    assert checkpoint(c, name) == checkpoint(d, name) == first | second
    assert (c.folder / "runs/mine/final_model/config.json").is_file()
