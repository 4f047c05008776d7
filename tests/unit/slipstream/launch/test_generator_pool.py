"""A fleet keeps as many generators as are wanted, whatever happens to each."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.launch.generator_pool import GeneratorPool
from slipstream.runtime.process import RoleDiedError, RoleProcess

STAYS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
open(sys.argv[1], "w").close()
signal.sigtimedwait([signal.SIGTERM], 120)
"""
ENDS = "import sys; sys.exit(int(sys.argv[1]))"
PATIENCE_S = 30.0


class Scene:
    """A fleet of processes that stay until they are told to go, but for the names in `ends`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends: dict[str, str] = {}
        self.said: list[str] = []
        self.lives_another = False
        self.fleet = GeneratorPool(self.make, lives_another=lambda: self.lives_another)

    def make(self, name: str) -> RoleProcess:
        arguments = ["ends", self.ends[name]] if name in self.ends else ["stays", str(self.folder / f"{name}.up")]
        return RoleProcess(name, arguments, logs=self.folder)

    def keep(self, wanted: int) -> None:
        self.said += [sentence for _, sentence in self.fleet.set_wanted(wanted)]

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline, self.said
            self.said += [sentence for _, sentence in self.fleet.poll()]

    def are_up(self, *numbers: int) -> bool:
        names = {f"generator-{number}" for number in numbers}
        return {role.name for role in self.fleet.roles if role.is_running} == names and all(
            (self.folder / f"{name}.up").exists() for name in names
        )

    def close(self) -> None:
        for role in self.fleet.roles:
            role.stop(ends_at=0.0)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    (tmp_path / "stays.py").write_text(STAYS)
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Scene(tmp_path)
    yield made
    made.close()


def test_the_number_goes_up_and_down_and_the_highest_go_first(scene: Scene):
    scene.keep(1)
    scene.until(lambda: scene.are_up(0))
    scene.keep(3)
    scene.until(lambda: scene.are_up(0, 1, 2))
    scene.keep(1)
    scene.until(lambda: scene.are_up(0) and len(scene.fleet.roles) == 1)
    assert "generator-2 is told to leave: 1 are wanted" in scene.said
    assert "generator-2 has left" in scene.said


def test_a_name_is_given_again_only_when_its_process_is_gone(scene: Scene):
    scene.keep(2)
    scene.until(lambda: scene.are_up(0, 1))
    scene.keep(1)
    scene.keep(2)
    assert [role.name for role in scene.fleet.roles] == ["generator-0", "generator-1"]
    (scene.folder / "generator-1.up").unlink()
    scene.until(lambda: scene.are_up(0, 1))
    assert len(scene.fleet.roles) == 2


def test_one_that_was_drained_by_somebody_else_is_not_started_again(scene: Scene):
    scene.keep(2)
    scene.until(lambda: scene.are_up(0, 1))
    scene.fleet.roles[0].terminate()
    scene.until(lambda: scene.fleet.wanted == 1)
    assert scene.said[-1] == "generator-0 has left; 1 are kept now"
    assert scene.are_up(1)


def test_one_that_cannot_start_is_given_up_while_another_lives(scene: Scene):
    scene.ends["generator-1"] = "2"
    scene.keep(2)
    scene.until(lambda: scene.fleet.wanted == 1)
    assert "generator-1 is given up, 1 are kept now: generator-1 ended with exit code 2" in scene.said[-1]
    scene.until(lambda: scene.are_up(0))


def test_the_last_one_that_cannot_start_ends_the_run(scene: Scene):
    scene.ends["generator-0"] = "2"
    scene.keep(1)
    with pytest.raises(RoleDiedError, match="generator-0"):
        scene.until(lambda: False)


def test_the_last_one_kept_is_given_up_too_while_the_run_has_another(scene: Scene):
    scene.ends["generator-0"] = "2"
    scene.lives_another = True
    scene.keep(1)
    scene.until(lambda: scene.fleet.wanted == 0)
    assert "generator-0 is given up, 0 are kept now" in scene.said[-1]
