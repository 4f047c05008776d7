"""Two machines (network namespaces): weights are broadcast over a trusted network, otherwise fetched and lent."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests import runs
from tests.integration.test_other_machines import Machine, machines  # noqa: F401
from tests.runs import SMALL, kill_tree, until

# In CI: tests/contract/test_weight_relay.py lends, tests/integration/test_other_machines.py fetches over a network.
pytestmark = [pytest.mark.long, pytest.mark.timeout(480)]
_ADDRESS = re.compile(r"broker\.address=tcp://10\.77\.0\.1:2100\d")
_LENT = re.compile(r"weights_fetched +source=tcp://10\.77\.0\.2:2100\d version=(\d+)")


class Scene:
    """A run on the first machine and generators on the second."""

    def __init__(self, folder: Path, here: Machine, there: Machine) -> None:
        self.folder, self.here, self.there = folder, here, there
        (folder / "elsewhere").mkdir()

    @property
    def learner(self) -> str:
        """The learner's log."""
        path = self.folder / "runs/mine/logs/learner.log"
        return path.read_text() if path.exists() else ""

    @property
    def generators(self) -> str:
        """Output of the generators on the second machine."""
        return (self.folder / f"{self.there.name}.out").read_text()

    @contextmanager
    def running(self, *settings: str, generators: tuple[str, ...]) -> Iterator[None]:
        """Start the run, then a generator on the second machine for each of these arguments."""
        network = ("name=mine", "cluster.interface=10.77.0.0/24", "cluster.ports=21000-21009")
        # More steps than any generator needs to join; the run is killed.
        steps = ("learner.max_steps=100000", "generators.engine.seconds_per_token=0.05", "weights.bucket_bytes=65536")
        command = runs.command(*SMALL, *network, *steps, *settings)
        processes = [self.here.start(self.here.name, *command, hidden=[], environment={})]
        printed = self.folder / f"{self.here.name}.out"
        try:
            until(lambda: bool(_ADDRESS.search(printed.read_text())), timeout_s=90, what="an address")
            found = _ADDRESS.search(printed.read_text())
            assert found
            token = (self.folder / "runs/mine/token").read_text().strip()
            join = f"{sys.executable} -m slipstream.generators {found[0]} runs_dir=elsewhere"
            all_of_them = " & ".join(f"{join} {arguments}" for arguments in generators) + " & wait"
            hidden, variables = [self.folder / "runs"], {TOKEN_VARIABLE: token}
            joiners = ("sh", "-c", all_of_them)
            processes.append(self.there.start(self.there.name, *joiners, hidden=hidden, environment=variables))
            yield
        finally:
            for process in reversed(processes):
                kill_tree(process)


@pytest.fixture
def scene(folder: Path, machines: list[Machine]) -> Scene:  # noqa: F811
    return Scene(folder, *machines)


def test_without_trust_generators_elsewhere_fetch_and_lend_and_one_that_insists_on_broadcasts_is_refused(
    scene: Scene,
) -> None:
    refused = "weights.transport=collective on another machine needs cluster.trusted_network=true"
    insisting = "--id far-2 weights.transport=collective"
    with scene.running(generators=("--id far-0", "--id far-1", insisting)):
        until(lambda: refused in scene.generators, timeout_s=120, what="a refusal")
        until(lambda: len(set(_LENT.findall(scene.generators))) >= 3, timeout_s=300, what="lent versions")
    assert re.search(r"weights_fetched +source=learner", scene.generators)
    assert len(re.findall("weights_not_broadcast", scene.learner)) == 2
    assert not re.search(r"epoch_opened.*far", scene.learner)
    assert "members_evicted" not in scene.learner
    # A lender that was further ahead lacks the older deltas, which the learner has.
    assert all("must be lent here" in line for line in re.findall("lender_failed.*", scene.generators))
    assert "Traceback" not in scene.generators


# The admission: tests/unit/broker/test_router_joining.py, a generator elsewhere that insists on broadcasts. Broadcasts
# over a link: tests/integration/test_weights_over_a_slow_link.py[broadcast].
def test_over_a_trusted_network_generators_elsewhere_take_part_in_broadcasts(scene: Scene) -> None:
    with scene.running("cluster.trusted_network=true", generators=("--id far-0", "--id far-1")):
        together = re.compile(r"epoch_opened.*far-0.*far-1")
        until(lambda: bool(together.search(scene.learner)), timeout_s=120, what="an epoch of all")
        rows = scene.folder / "runs/mine/metrics.jsonl"
        steps = len(rows.read_text().splitlines())
        until(lambda: len(rows.read_text().splitlines()) >= steps + 3, timeout_s=60, what="steps after that")
    assert "weights_not_broadcast" not in scene.learner
    assert "members_evicted" not in scene.learner
    # Only the first version is fetched.
    assert scene.generators.count("weights_fetched") == 2
