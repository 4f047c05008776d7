"""Two machines (network namespaces): a generator joins with only an address and a token."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests import runs
from tests.runs import ROOT, SMALL, kill_tree, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Machine(NamedTuple):
    """A network namespace with one address and private mounts."""

    name: str
    address: str

    def start(self, folder: Path, *command: str, hidden: Path, **variables: str) -> subprocess.Popen[str]:
        """Start a command there that cannot see the folder `hidden`. Its output is in `NAME.out`."""
        script = f'mount -t tmpfs none "{hidden}" && exec "$@"'
        with (folder / f"{self.name}.out").open("w") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", script, "sh", *command],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
                stdout=output,
                stderr=output,
                text=True,
            )


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines in the network 10.77.0.0/24."""
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "ss", "unshare"))):
        pytest.skip("network namespaces need root, ip, ss and unshare")
    pair = (Machine(f"slip{os.getpid()}a", "10.77.0.1"), Machine(f"slip{os.getpid()}b", "10.77.0.2"))
    ends = [f"{machine.name}v" for machine in pair]
    try:
        if not all(ip("netns", "add", machine.name) for machine in pair):
            pytest.skip("no network namespace can be made here")
        made = ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for machine, end in zip(pair, ends, strict=True):
            made = made and ip("link", "set", end, "netns", machine.name)
            made = made and ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", end)
            made = made and ip("-n", machine.name, "link", "set", end, "up")
            made = made and ip("-n", machine.name, "link", "set", "lo", "up")
        if not made:
            pytest.skip("no pair of connected interfaces can be made here")
        yield pair
    finally:
        for machine in pair:
            ip("netns", "del", machine.name)


def listening(machine: Machine) -> list[tuple[str, int]]:
    """Addresses and ports on which processes of a machine listen."""
    listed = subprocess.run(
        ["ip", "netns", "exec", machine.name, "ss", "-ltnH"], capture_output=True, text=True, check=True
    ).stdout
    found = [line.split()[3].rpartition(":") for line in listed.splitlines()]
    return [(address, int(port)) for address, _, port in found]


def assert_fit(machine: Machine, folder: Path, address: str, *, token: str) -> None:
    """Check that `slipstream diagnose cluster` finds no failure on this machine and is reached by the broker."""
    words = ["-m", "slipstream", "diagnose", "cluster", "--json", address, "runs_dir=elsewhere"]
    asked = machine.start(folder, sys.executable, *words, hidden=folder / "runs", **{TOKEN_VARIABLE: token})
    code, printed = asked.wait(timeout=60), (folder / f"{machine.name}.out").read_text()
    assert code == 0, printed
    checks = {each["name"]: each for each in json.loads(printed)["checks"]}
    assert checks["interface"]["found"].startswith(machine.address)
    assert f"the broker reaches {machine.address}:2100" in checks["way back"]["found"]


def test_a_generator_on_another_machine_needs_an_address_and_the_token_alone(
    folder: Path, machines: tuple[Machine, Machine]
) -> None:
    here, there = machines
    (unseen := folder / "unseen").mkdir()
    steps = ("learner.max_steps=60", "generators.engine.seconds_per_token=0.05", "weights.transport=delta")
    settings = ("name=mine", "cluster.interface=10.77.0.0/24", "cluster.ports=21000-21009", *steps)
    launcher = here.start(folder, *runs.command(*SMALL, *settings), hidden=unseen)
    generator = None
    try:
        printed = folder / f"{here.name}.out"
        join = re.compile(
            rf"{TOKEN_VARIABLE}=\.\.\. python -m generators (broker\.address=tcp://10\.77\.0\.1:2100\d), with"
        )
        until(
            lambda: launcher.poll() is not None or bool(join.search(printed.read_text())), timeout_s=90, what="a join"
        )
        found = join.search(printed.read_text())
        assert found, printed.read_text()[-3000:]
        token = (folder / "runs/mine/token").read_text().strip()
        (folder / "elsewhere").mkdir()
        assert_fit(there, folder, found[1], token=token)
        command = [sys.executable, "-m", "slipstream.generators", "--id", "far", found[1], "runs_dir=elsewhere"]
        generator = there.start(folder, *command, hidden=folder / "runs", **{TOKEN_VARIABLE: token})
        log = folder / f"{there.name}.out"
        until(lambda: launcher.poll() is not None or "joined" in log.read_text(), timeout_s=60, what="the joining")
        # Listeners beyond the loopback interface are the two CURVE sockets.
        beyond = {each for each in listening(here) if not each[0].startswith("127.")}
        assert {address for address, _ in beyond} == {here.address}
        assert all(port in range(21000, 21010) for _, port in beyond)
        # All remaining work is answered there.
        drain = [sys.executable, "-m", "slipstream", "drain", "generator-0", "mine"]
        subprocess.run(drain, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=90)
        assert launcher.wait(timeout=150) == 0, printed.read_text()[-3000:]
        assert "version_fetched" in (folder / "runs/mine/logs/learner.log").read_text()
        assert re.search(r"peer_joined.*peer=far", (folder / "runs/mine/logs/broker.log").read_text())
        assert token not in printed.read_text() + log.read_text()
        shards = (folder / "runs/mine/archive").glob("*.parquet")
        assert "far" in {name for shard in shards for name in pq.read_table(shard)["generator_id"].to_pylist()}
    finally:
        for process in filter(None, (generator, launcher)):
            kill_tree(process)
