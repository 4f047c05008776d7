"""Runs on a real Ray cluster of several nodes on this machine. Only the engine is scripted."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests import runs
from tests.runs import ROOT

pytest.importorskip("ray")
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

PATIENCE_S = 120.0
TOKEN = "a-token-that-appears-nowhere-at-all"
ADDRESS = "127.0.0.2"
"""Address of all nodes. Ray makes drivers replace 127.0.0.1 with an address that others can reach."""
DEMAND = """
import json, sys
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
state = get_cluster_resource_state(GcsClient(address=sys.argv[1]))
assert not state.pending_resource_requests, state.pending_resource_requests
groups = [group.bundle_selectors[0].resource_requests for group in state.pending_gang_resource_requests]
print(json.dumps([[dict(bundle.resources_bundle) for bundle in group] for group in groups]))
"""
ACCESS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class Cluster:
    """A cluster in a separate process, until the end of the block."""

    def __init__(self, *cpus: int) -> None:
        command = [sys.executable, "-m", "tests.integration.ray_cluster", ADDRESS, *map(str, cpus)]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, cwd=ROOT, env=os.environ | ACCESS, text=True, **streams)
        facts = json.loads(self._process.stdout.readline())
        self.address, self.folder = facts["address"], Path(facts["folder"])
        self.raylets: list[int] = facts["raylets"]
        self.gcs: int = facts["gcs"]

    def demand(self) -> list[list[dict[str, float]]]:
        """Bundles of each pending placement group, as seen by Ray's autoscaler."""
        command = [sys.executable, "-c", DEMAND, self.address]
        return json.loads(subprocess.check_output(command, env=os.environ | ACCESS, text=True, timeout=60))

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


class Run(runs.Run):
    """A run with generators placed by Ray."""

    def __init__(self, folder: Path, cluster: Cluster, *overrides: str) -> None:
        network = ("cluster.interface=127.0.0.0/8", "cluster.ports=21100-21119")
        placement = ("cluster.kind=ray", "cluster.learner.cpus=1", "broker.join_timeout_s=25")
        pace = ("learner.max_steps=100000", "generators.engine.seconds_per_token=0.2", "weights.transport=delta")
        environment = {TOKEN_VARIABLE: TOKEN, "RAY_ADDRESS": cluster.address} | ACCESS
        super().__init__(folder, "placed", *network, *placement, *pace, *overrides, **environment)

    def scale(self, number: int) -> None:
        done = self.call("scale", f"generators={number}")
        assert done.returncode == 0, done.stderr

    def at_work(self) -> dict[str, int]:
        """Process ids of the working generators, by name."""
        roles = [role for role in runs.status(self.folder, "placed")["roles"] if role["role"] == "generator"]
        return {each["name"]: each["pid"] for each in roles if (each["state"], each["liveness"]) == ("ready", "alive")}

    def interrupt(self) -> None:
        """End the run with Ctrl-C; it leaves nothing and has no step twice."""
        self.launcher.send_signal(signal.SIGINT)
        assert self.launcher.wait(timeout=PATIENCE_S) == 130, self.printed[-3000:]
        runs.assert_all_steps_once(self, self.steps)
        runs.assert_none_left(self.folder)


def host_of(role: int) -> psutil.Process:
    """The process at the other end of the pipe of a role's keeper."""
    keeper = psutil.Process(role).ppid()
    pipe = Path(f"/proc/{keeper}/fd/0").readlink()
    for process in psutil.process_iter():
        with suppress(OSError):
            ends = [each.readlink() for each in Path(f"/proc/{process.pid}/fd").iterdir()]
            if process.pid != keeper and pipe in ends:
                return process
    raise AssertionError("nobody holds the pipe")


def test_generators_come_and_go_and_what_ends_their_place_ends_them(folder: Path) -> None:
    with Cluster(2, 2) as cluster:
        run = Run(folder, cluster)
        run.until(lambda: set(run.at_work()) == {"generator-0"})
        assert "generator-0: waits" not in run.printed
        run.scale(3)
        run.until(lambda: set(run.at_work()) == {"generator-0", "generator-1", "generator-2"})
        before = run.at_work()
        host_of(before["generator-1"]).kill()
        run.until(lambda: not psutil.pid_exists(before["generator-1"]))
        run.until(lambda: run.at_work().get("generator-1", before["generator-1"]) != before["generator-1"])
        assert "generator-1 died (signal SIGKILL); last line of its log: the place of generator-1 is" in run.printed
        assert run.at_work()["generator-2"] == before["generator-2"]
        # Three generators and the core fill the cluster. The autoscaler is asked for the rest.
        assert cluster.demand() == []
        for number, demand in ((5, [[{"CPU": 1.0}], [{"CPU": 1.0}]]), (3, []), (4, [[{"CPU": 1.0}]])):
            run.scale(number)
            run.until(lambda demand=demand: cluster.demand() == demand)
        run.until(lambda: "generator-3 is abandoned, the target is 3 now" in run.printed)
        assert "generator-3 needs a machine with 1 CPU free, and got none within broker.join_timeout_s" in run.printed
        assert "the cluster has 127.0.0.2 with 0 of 2 CPU, 0 of 0 GPU free" in run.printed
        run.scale(1)
        run.until(lambda: set(run.at_work()) == {"generator-0"})
        # Places where the secret must not appear: command lines, and everything Ray keeps about jobs and workers.
        for process in runs.processes_of(folder):
            with suppress(psutil.Error):
                assert TOKEN not in " ".join(process.cmdline())
        kept = [path for path in cluster.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]
        run.interrupt()
    assert "joined" in run.log("generator-0")
    assert TOKEN not in run.log("generator-0") + run.printed


def test_a_generator_ends_with_rays_process_on_its_machine_and_is_placed_on_another(folder: Path) -> None:
    with Cluster(1, 1, 1) as cluster:
        run = Run(folder, cluster)
        run.until(lambda: set(run.at_work()) == {"generator-0"})
        before = run.at_work()["generator-0"]
        keeper, raylet = psutil.Process(before).ppid(), host_of(before).ppid()
        assert raylet in cluster.raylets[1:]
        os.kill(raylet, signal.SIGKILL)
        run.until(lambda: not psutil.pid_exists(before) and not psutil.pid_exists(keeper))
        run.until(lambda: run.at_work().get("generator-0", before) != before)
        assert host_of(run.at_work()["generator-0"]).ppid() in {*cluster.raylets[1:]} - {raylet}
        run.interrupt()
    assert "the place of generator-0 is lost: " in run.log("generator-0")


def learners_of(folder: Path) -> dict[str, psutil.Process]:
    """On each machine, by number: the learner's process, which has started the ranks there."""
    found = {}
    for process in runs.processes_of(folder):
        with suppress(psutil.Error):
            if process.cmdline()[1:3] == ["-m", "slipstream.learner"] and "RANK" not in process.environ():
                found[process.environ()["NODE_RANK"]] = process
    return found


def test_ranks_on_several_machines_are_placed_started_and_ended_together(folder: Path) -> None:
    ranks = ("learner.num_ranks=2", "cluster.learner.machines=2", "learner/engine=deepspeed_zero2")
    trust = ("cluster.trusted_network=true", "learner.checkpoint.every_steps=2")
    with Cluster(1, 2, 2) as cluster:
        run = Run(folder, cluster, *ranks, *trust)
        run.until(lambda: run.steps > 3)
        before = learners_of(folder)
        assert set(before) == {"0", "1"}
        raylet = host_of(before["1"].pid).ppid()
        assert raylet in cluster.raylets[1:], "a machine other than the core's"
        (worker,) = before["1"].children()
        worker.kill()
        run.until(lambda: not before["0"].is_running() and not before["1"].is_running())
        steps = run.steps
        run.until(lambda: run.steps > steps + 3)
        assert "learner died (exit code " in run.printed
        # The machine of the second rank is lost and replaced by another.
        os.kill(host_of(learners_of(folder)["1"].pid).ppid(), signal.SIGKILL)
        run.until(lambda: "learner died" in run.printed.partition("learner restarted")[2])
        steps = run.steps
        run.until(lambda: run.steps > steps + 3)
        assert host_of(learners_of(folder)["1"].pid).ppid() in {*cluster.raylets[1:]} - {raylet}
        run.interrupt()


def test_a_core_that_is_not_to_be_had_as_a_whole_is_named(folder: Path) -> None:
    ranks = ("learner.num_ranks=2", "cluster.learner.machines=2", "cluster.trusted_network=true")
    with Cluster(1) as cluster:
        run = Run(folder, cluster, *ranks, "learner/engine=deepspeed_zero2", "broker.join_timeout_s=3")
        assert run.launcher.wait(timeout=PATIENCE_S) == 2
        needs = "error: cluster.learner needs 1 CPU free on the machine of the launcher and on each of 1 more, and got"
        assert f"{needs} no" in run.printed
        assert not run.path.exists()


def test_a_run_ends_with_rays_head_and_goes_on_in_another_cluster(folder: Path) -> None:
    with Cluster(1, 1) as cluster:
        run = Run(folder, cluster)
        run.until(lambda: runs.status(folder, "placed").get("step", 0) > 6)
        os.kill(cluster.gcs, signal.SIGKILL)
        # The store waits for a resume, and so does the process that eventually ends it.
        kept = re.compile("redis|idle_stop")
        is_over = lambda: all(kept.search(" ".join(each.cmdline())) for each in runs.processes_of(folder))  # noqa: E731
        runs.until(lambda: run.launcher.poll() is not None and is_over(), timeout_s=75, what="the end of all roles")
    with Cluster(1, 1) as cluster:
        steps, resumed = run.steps, Run(folder, cluster, "resume=true")
        resumed.until(lambda: resumed.steps > steps + 3)
        resumed.interrupt()
