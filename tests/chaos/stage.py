"""Stage of a run under chaos: its folder with task and model, the settings that all roles share, and its pace."""

from collections import Counter
from pathlib import Path
from typing import Literal

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.trajectory import Record
from tests.chaos.outcome import Sample, uninterrupted
from tests.chaos.processes import WarmProcess

EngineKind = Literal["scripted", "vllm"]

NAME = "chaos"
"""Name of the run."""
HOLD_FILE = "hold-the-last-step"
"""File in the run's folder during the strikes."""
MEAN_STEP_S = 0.1
"""Mean duration of a scripted step."""
NUM_ROWS = 97
"""Prompts in the task: few, so that a run passes through many epochs."""
GROUP_SIZE = 4
GROUPS_PER_STEP = 4
_BUILD_TIMEOUT_S = 60.0


class Pace(Record):
    """Settings and durations that fit the time that generators take to start. Example: PACES["scripted"]."""

    engine: list[str]
    """Overrides that choose the generators' engine."""
    has_cold_generators: bool
    """Whether they need a fresh interpreter: vLLM reads its environment when it is imported."""
    lapse_after_s: float
    """Seconds after which leases and claims lapse and members of a broadcast are evicted."""
    max_gap_s: float
    """Longest time between two strikes; half of it on average."""
    max_recovery_s: float
    """Longest time that a strike waits for all roles to recover."""
    steps_per_kill: int
    """Steps of the run per kill, so that run and strikes take about the same time."""


PACES: dict[EngineKind, Pace] = {
    "scripted": Pace(
        engine=["generators/engine=scripted", "generators.engine.seconds_per_token=0.03"],
        has_cold_generators=False,
        lapse_after_s=2.0,
        max_gap_s=1.0,
        max_recovery_s=5.0,
        steps_per_kill=3,
    ),
    "vllm": Pace(
        engine=["generators/engine=vllm"],
        has_cold_generators=True,
        lapse_after_s=10.0,
        max_gap_s=10.0,
        max_recovery_s=120.0,
        steps_per_kill=80,
    ),
}


class Stage:
    """Paths and settings of one run."""

    def __init__(self, folder: Path, *, seed: int, steps: int, pace: Pace) -> None:
        self.folder = folder
        self.run_folder = folder / "runs" / NAME
        self.seed = seed
        self.steps = steps
        self.pace = pace
        self.store = EmbeddedRedis(self.run_folder / "store", durability="standard")

    @property
    def expected(self) -> Counter[Sample]:
        """Samples that an uninterrupted run trains on, with their counts."""
        num_groups = self.steps * GROUPS_PER_STEP
        return uninterrupted(num_groups=num_groups, group_size=GROUP_SIZE, num_rows=NUM_ROWS, seed=self.seed)

    @property
    def hold_file(self) -> Path:
        """The last step of the run waits while this file exists."""
        return self.run_folder / HOLD_FILE

    @property
    def logs(self) -> Path:
        """Folder of the logs, one per role."""
        return self.run_folder / "logs"

    @property
    def address(self) -> str:
        """Override for generators: the broker's address."""
        return f"broker.address=ipc://{self.folder}/broker.sock"

    @property
    def settings(self) -> list[str]:
        """Overrides for broker and learner."""
        # Times are short, so that peers, leases and claims lapse too; max_attempts is out of reach, because here a
        # prompt with many attempts is no poison.
        lapse_after_s = self.pace.lapse_after_s
        return [
            self.address,
            f"name={NAME}",
            f"seed={self.seed}",
            "resume=true",
            "prepare=[]",
            "model.path=models/tiny",
            "data.train_path=data/train.parquet",
            "data.heldout_path=data/heldout.parquet",
            "buffer/store=redis",
            f"buffer.store.url='{self.store.url}'",
            "buffer.archive.groups_per_shard=64",
            "buffer.archive.flush_s=2.0",
            f"buffer.claim_lease_s={lapse_after_s}",
            "buffer.max_attempts=1000000",
            "broker.peer_timeout_s=1.5",
            f"broker.lease_s={lapse_after_s}",
            f"weights.transfer_timeout_s={lapse_after_s}",
            *self.pace.engine,
            f"generators.group_size={GROUP_SIZE}",
            "generators.max_concurrency=16",
            "learner/engine=torch",
            f"learner.groups_per_step={GROUPS_PER_STEP}",
            f"learner.max_steps={self.steps}",
            "learner.stop=null",
            "learner.checkpoint.every_steps=5",
            "evaluation.every_steps=0",
            "evaluation.monitor_prompts=2",
            "evaluation.final_prompts=4",
        ]

    def build(self) -> None:
        """Make task, model and folders. Raises RuntimeError with the last line of the log."""
        self.logs.mkdir(parents=True)
        data = ["--task=reverse", "--digits=5", f"--train-rows={NUM_ROWS}", "--heldout-rows=16", "--out=data"]
        self._run("slipstream.scripts.make_digits_data", data)
        self._run("slipstream.scripts.init_random_model", ["--layers=1", "--width=32", "--out=models/tiny"])

    def _run(self, module: str, arguments: list[str]) -> None:
        program = WarmProcess(module, arguments, cwd=self.folder, log=self.logs / "stage.log")
        program.start()
        if program.wait(timeout_s=_BUILD_TIMEOUT_S) != 0:
            raise RuntimeError(f"python -m {module} must exit with 0, last line of its log: {program.last_line}")
