"""A pool keeps its target number of generators running; each role gets its own GPUs."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.cluster.role_process import RoleDiedError, RoleProcess
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.launch.generator_pool import GeneratorPool, check_placement, check_target, gpu_gib, place, visible_gpus
from tests.builders import make_run

STAYS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
open(sys.argv[1], "w").close()
signal.sigtimedwait([signal.SIGTERM], 120)
"""
ENDS = "import sys; sys.exit(int(sys.argv[1]))"
PATIENCE_S = 30.0


class Scene:
    """A pool of processes that run until they are asked to leave, except the names in `ends`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends: dict[str, str] = {}
        self.messages: list[str] = []
        self.has_others = False
        self.pool = GeneratorPool(self.make, has_others=lambda: self.has_others)

    def make(self, name: str) -> RoleProcess:
        arguments = ["ends", self.ends[name]] if name in self.ends else ["stays", str(self.folder / f"{name}.up")]
        return RoleProcess(name, arguments, logs=self.folder)

    def keep(self, target: int) -> None:
        self.messages += [event.message for event in self.pool.set_target(target)]

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline, self.messages
            self.messages += [event.message for event in self.pool.poll()]

    def are_up(self, *numbers: int) -> bool:
        names = {f"generator-{number}" for number in numbers}
        return {role.name for role in self.pool.roles if role.is_running} == names and all(
            (self.folder / f"{name}.up").exists() for name in names
        )

    def close(self) -> None:
        for role in self.pool.roles:
            role.stop(ends_at=0.0)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    (tmp_path / "stays.py").write_text(STAYS)
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Scene(tmp_path)
    yield made
    made.close()


def test_the_pool_grows_and_shrinks_and_a_name_is_reused_only_when_its_process_is_gone(scene: Scene):
    scene.keep(1)
    scene.until(lambda: scene.are_up(0))
    scene.keep(3)
    scene.until(lambda: scene.are_up(0, 1, 2))
    scene.keep(2)
    scene.until(lambda: scene.are_up(0, 1) and len(scene.pool.roles) == 2)
    assert "generator-2 is asked to leave: the target is 2" in scene.messages
    assert "generator-2 left" in scene.messages
    scene.keep(1)
    scene.keep(2)
    assert [role.name for role in scene.pool.roles] == ["generator-0", "generator-1"]
    (scene.folder / "generator-1.up").unlink()
    scene.until(lambda: scene.are_up(0, 1))
    assert len(scene.pool.roles) == 2


def test_a_generator_that_was_drained_is_not_replaced(scene: Scene):
    scene.keep(2)
    scene.until(lambda: scene.are_up(0, 1))
    scene.pool.roles[0].terminate()
    scene.until(lambda: scene.pool.target == 1)
    assert scene.messages[-1] == "generator-0 left; the target is 1 now"
    assert scene.are_up(1)


def test_a_generator_that_cannot_start_is_abandoned_while_another_lives(scene: Scene):
    scene.ends["generator-1"] = "2"
    scene.keep(2)
    scene.until(lambda: scene.pool.target == 1)
    assert "generator-1 is abandoned, the target is 1 now: generator-1 ended with exit code 2" in scene.messages[-1]
    scene.until(lambda: scene.are_up(0))


def test_the_last_generator_that_cannot_start_ends_the_run_unless_it_has_others(scene: Scene):
    scene.ends["generator-0"] = "2"
    scene.keep(1)
    with pytest.raises(RoleDiedError, match="generator-0"):
        scene.until(lambda: False)
    scene.has_others = True
    scene.until(lambda: scene.pool.target == 0)
    assert "generator-0 is abandoned, the target is 0 now" in scene.messages[-1]


EIGHT = list("01234567")


@pytest.mark.parametrize(
    ("overrides", "gpus", "placed"),
    [
        ([], [], {}),
        (["experiment=gsm8k_1gpu"], ["5"], {"learner": ["5"], "generator-0": ["5"]}),
        (["experiment=gsm8k_8gpu"], EIGHT, {"learner": EIGHT[:4], "generator-0": EIGHT[4:6], "generator-1": EIGHT[6:]}),
        ([], ["6", "GPU-8932f937"], {"learner": ["6"], "generator-0": ["GPU-8932f937"]}),
        # vLLM's build decides its device; a setting decides the learner's.
        (["learner.device=cpu"], ["5"], {"learner": [], "generator-0": ["5"]}),
        (["learner.device=cpu", "generators/engine=hf"], ["5"], {"learner": [], "generator-0": []}),
        (["generators/engine=hf"], ["5"], {"learner": ["5"], "generator-0": ["5"]}),
        (["generators/engine=scripted"], ["5"], {"learner": ["5"], "generator-0": []}),
    ],
)
def test_each_role_gets_its_gpus_in_order_and_one_is_shared(overrides, gpus, placed):
    assert place(load(overrides), gpus=gpus) == placed


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (["learner.num_ranks=2"], ["5"], r"learner.num_ranks must be <= the GPUs here \(1\), got 2: each"),
        (["generators.engine.tensor_parallel_size=2"], ["5"], r"size must be <= the GPUs here \(1\), got 2: each"),
        (["experiment=gsm8k_8gpu"], EIGHT[:4], "got 8"),
    ],
)
def test_no_two_processes_of_a_group_share_a_gpu(overrides: list[str], gpus: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        place(load(overrides), gpus=gpus)


def test_a_learner_that_must_have_a_gpu_and_an_implausible_number_of_generators_are_refused():
    check_placement(load(["learner.device=cpu"]))
    # A machine without a driver, or a CPU build of torch.
    with pytest.raises(ConfigError, match=r"^learner.device=cuda must have an NVIDIA GPU"):
        check_placement(load(["learner.device=cuda"]))
    with pytest.raises(ConfigError, match=r"weights\.backend=nccl must have a GPU for the learner and .* got 0 here"):
        check_placement(load(["weights.backend=nccl"]))
    check_target(make_run(), 8, num_cores=2)
    with pytest.raises(ConfigError, match=r"generators must be <= 8 on this machine of 2 cores, got 100: lower it"):
        check_target(make_run(), 100, num_cores=2)
    for settings in ({"count": 20}, {"autoscale": {"max": 20}}):
        check_target(make_run(generators=settings), 20, num_cores=2)
        with pytest.raises(ConfigError, match="<= 20"):
            check_target(make_run(generators=settings), 21, num_cores=2)


def test_the_driver_is_asked_for_the_gpus_and_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = tmp_path / "nvidia-smi"
    asked.write_text('#!/bin/sh\ncase "$*" in *memory.total*"-i 1") echo 81559;; *index*) echo 0; echo 1;; esac\n')
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_gpus({}, torch_version="2.13.0") == ["0", "1"]
    assert visible_gpus({}, torch_version="2.13.0+cpu") == []
    assert gpu_gib("1") == pytest.approx(79.65, abs=0.01)
    with pytest.raises(ConfigError, match=r"^nvidia-smi must report the memory of GPU MIG-3a"):
        gpu_gib("MIG-3a")


@pytest.mark.parametrize(
    ("value", "names"),
    [(" 7 , GPU-8932f937 ", ["7", "GPU-8932f937"]), ("MIG-3a/1/0", ["MIG-3a/1/0"]), ("", []), ("1,-1,2", ["1"])],
)
def test_only_gpus_visible_to_the_launcher_are_assigned(value: str, names: list[str]):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, torch_version="2.13.0+cu130") == names
