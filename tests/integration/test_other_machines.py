"""Two machines (network namespaces): a generator joins with only an address and a token."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests import runs
from tests.machines import Machine, network
from tests.runs import SMALL, kill_tree, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def machines(folder: Path) -> Iterator[list[Machine]]:
    """Two machines in the network 10.77.0.0/24, which work in one folder."""
    if not shutil.which("ss"):
        pytest.skip("listeners are found with ss")
    names = [f"slip{os.getpid()}a", f"slip{os.getpid()}b"]
    with network(folder, names, subnet="10.77.0") as pair:
        yield [machine._replace(folder=folder) for machine in pair]


def listening(machine: Machine) -> list[tuple[str, int]]:
    """Addresses and ports on which processes of a machine listen."""
    listed = subprocess.check_output(["ip", "netns", "exec", machine.name, "ss", "-ltnH"], text=True)
    found = [line.split()[3].rpartition(":") for line in listed.splitlines()]
    return [(address, int(port)) for address, _, port in found]


def assert_fit(machine: Machine, address: str, *, token: str) -> None:
    """Check that `slipstream diagnose cluster` finds no failure on this machine and is reached by the broker."""
    words = ["-m", "slipstream", "diagnose", "cluster", "--json", address, "runs_dir=elsewhere"]
    hidden, secrets = [machine.folder / "runs"], {TOKEN_VARIABLE: token}
    asked = machine.start("diagnosis", sys.executable, *words, hidden=hidden, environment=secrets)
    code, printed = asked.wait(timeout=60), machine.printed("diagnosis")
    assert code == 0, printed
    checks = {each["name"]: each for each in json.loads(printed)["checks"]}
    assert checks["interface"]["found"].startswith(machine.address)
    assert f"the broker reaches {machine.address}:2100" in checks["way back"]["found"]


def test_a_generator_on_another_machine_needs_an_address_and_the_token_alone(folder, machines):
    here, there = machines
    steps = ("learner.max_steps=60", "generators.engine.seconds_per_token=0.05", "weights.transport=delta")
    settings = ("name=mine", "cluster.interface=10.77.0.0/24", "cluster.ports=21000-21009", *steps)
    launcher = here.start("launcher", *runs.command(*SMALL, *settings), hidden=[], environment={})
    generator = None
    try:
        printed = folder / "launcher.out"
        join = re.compile(rf"{TOKEN_VARIABLE}=\.\.\. python -m \S+ (broker\.address=tcp://10\.77\.0\.1:2100\d), with")
        is_told = lambda: launcher.poll() is not None or bool(join.search(printed.read_text()))  # noqa: E731
        until(is_told, timeout_s=90, what="a join")
        found = join.search(printed.read_text())
        assert found, printed.read_text()[-3000:]
        token = (folder / "runs/mine/token").read_text().strip()
        (folder / "elsewhere").mkdir()
        assert_fit(there, found[1], token=token)
        command = [sys.executable, "-m", "slipstream.generators", "--id", "far", found[1], "runs_dir=elsewhere"]
        hidden, secrets = [folder / "runs"], {TOKEN_VARIABLE: token}
        generator = there.start("generator", *command, hidden=hidden, environment=secrets)
        log = folder / "generator.out"
        until(lambda: launcher.poll() is not None or "joined" in log.read_text(), timeout_s=60, what="the joining")
        # Listeners beyond the loopback interface are the two CURVE sockets.
        beyond = {each for each in listening(here) if not each[0].startswith("127.")}
        assert {address for address, _ in beyond} == {here.address}
        assert all(port in range(21000, 21010) for _, port in beyond)
        # All remaining work is answered there.
        assert runs.exit_code("drain", "generator-0", "name=mine", f"runs_dir={folder}/runs") == 0
        assert launcher.wait(timeout=150) == 0, printed.read_text()[-3000:]
        assert "version_fetched" in (folder / "runs/mine/logs/learner.log").read_text()
        assert re.search(r"peer_joined.*peer=far", (folder / "runs/mine/logs/broker.log").read_text())
        assert token not in printed.read_text() + log.read_text()
        shards = (folder / "runs/mine/archive").glob("*.parquet")
        assert "far" in {name for shard in shards for name in pq.read_table(shard)["generator_id"].to_pylist()}
    finally:
        for process in filter(None, (generator, launcher)):
            kill_tree(process)
