"""A run over three machines (network namespaces): a link that is cut for 20 s costs time but no trajectory."""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slipstream.buffer.archive.archive import Archive
from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests import runs
from tests.machines import Machine, network
from tests.runs import SMALL, assert_all_steps_once, kill_tree, left_behind, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

SUBNET = "10.79.0"
CUT_S = 20.0
TOKEN = "a-token-of-more-than-thirty-two-characters"
SETTINGS = (
    *(*SMALL, "name=mine", "generators.count=0", f"cluster.interface={SUBNET}.0/24", "cluster.ports=21400-21409"),
    *("weights.transport=delta", "learner.max_steps=100000"),
)


class Scene(NamedTuple):
    """A launcher on the first of three machines and a generator on each of the others."""

    machines: list[Machine]
    launcher: "subprocess.Popen[str]"
    generators: list["subprocess.Popen[str]"]

    name = "mine"

    @property
    def path(self) -> Path:
        return self.machines[0].folder / "runs" / self.name

    def steps(self) -> int:
        path = self.path / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def roles(self) -> dict[str, dict[str, Any]]:
        return {role["name"]: role for role in runs.status(self.machines[0].folder, self.name)["roles"]}

    def set_link(self, machine: Machine, state: str) -> float:
        subprocess.run(["ip", "link", "set", f"{machine.name}-o", state], check=True)
        return time.monotonic()

    def is_at_work(self, name: str) -> bool:
        role = self.roles().get(name, {})
        return (role.get("state"), role.get("liveness")) == ("ready", "alive")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    names = [f"slip-lc-{letter}" for letter in "abc"]
    with network(tmp_path, names, subnet=SUBNET) as machines, ExitStack() as started:
        (tmp_path / "task").mkdir()
        runs.make_task(tmp_path / "task", warm=False)
        for machine in machines:
            for each in ("data", "models"):
                (machine.folder / each).symlink_to(tmp_path / "task" / each)

        def start(machine: Machine, *command: str) -> "subprocess.Popen[str]":
            others = [each.folder for each in machines if each != machine]
            process = machine.start("role", *command, hidden=others, environment={TOKEN_VARIABLE: TOKEN})
            started.callback(kill_tree, process)
            return process

        launcher = start(machines[0], *runs.command(*SETTINGS))
        address = machines[0].folder / "runs/mine/address"
        until(lambda: address.exists() or launcher.poll() is not None, timeout_s=60, what="the broker")
        join = [sys.executable, "-m", "slipstream.generators", f"broker.address={address.read_text().strip()}", "--id"]
        generators = [start(machine, *join, f"far-{number}") for number, machine in enumerate(machines[1:])]
        yield Scene(machines, launcher, generators)


def test_a_link_cut_for_20_s_loses_nothing_and_repeats_nothing(scene: Scene) -> None:
    first, second = scene.machines[1:]
    until(lambda: scene.is_at_work("far-0") and scene.is_at_work("far-1"), timeout_s=90, what="both generators")
    until(lambda: scene.steps() > 5, timeout_s=60, what="steps")
    at = scene.set_link(first, "down")
    until(lambda: scene.roles()["far-0"]["liveness"] != "alive", timeout_s=CUT_S, what="the broker's notice")
    steps = scene.steps()
    until(lambda: time.monotonic() >= at + CUT_S, timeout_s=2 * CUT_S, what="the end of the cut")
    assert scene.steps() > steps, "the other generator continues to work"
    scene.set_link(first, "up")
    cut_ended_at = time.time()
    until(lambda: scene.is_at_work("far-0"), timeout_s=60, what="the return of the generator")
    # Now the other generator is cut off, so new training data must come from the one that was cut off before.
    scene.set_link(second, "down")
    steps = scene.steps()
    until(lambda: scene.steps() > steps + 5, timeout_s=90, what="steps with what was cut off")
    scene.set_link(second, "up")
    until(lambda: scene.is_at_work("far-1"), timeout_s=60, what="the return of the other")
    assert [each.poll() for each in scene.generators] == [None, None], "neither was restarted"
    scene.launcher.send_signal(signal.SIGINT)
    assert scene.launcher.wait(timeout=60) == 130, scene.machines[0].printed("role")[-3000:]
    counts, _, audit = left_behind(scene)
    assert audit.is_sound, audit
    placed = counts.leased + counts.returned + counts.ready + counts.claimed + counts.used
    assert counts.admitted == placed + counts.outcomes.get("retired", 0), "each prompt is in one place"
    assert_all_steps_once(scene, scene.steps())
    archive = Archive(scene.path / "archive")
    trained = Counter(group for entry in archive.steps() for group in entry.group_ids)
    assert trained
    assert set(trained.values()) == {1}, "trained on twice"
    found = list(archive.read())
    assert set(Counter(stored.trajectory.id for stored in found).values()) == {1}
    members = Counter(stored.trajectory.group_id for stored in found if stored.state == "retired")
    assert len(set(members.values())) == 1, members
    mine = [stored.trajectory for stored in found if stored.trajectory.generator_id == "far-0"]
    assert max(trajectory.finished_at for trajectory in mine) > cut_ended_at
