"""The stage: a run folder with a task and a model in it, and the settings all roles share."""

from collections import Counter
from pathlib import Path

from slipstream.buffer.redis.embedded import EmbeddedRedis
from tests.chaos import lineage
from tests.chaos.lineage import Sample
from tests.chaos.pace import Pace
from tests.chaos.warm_process import WarmProcess

NAME = "chaos"
"""Of the run."""
HOLD_FILE = "hold-the-last-step"
"""In the run's folder while the killing goes on."""
MEAN_STEP_S = 0.1
"""Of a scripted step."""
NUM_ROWS = 97
"""Prompts in the task: few, so that a run goes through many epochs."""
GROUP_SIZE = 4
"""Trajectories per prompt."""
GROUPS_PER_STEP = 4
"""Prompts per step."""
_MAKING_TIMEOUT_S = 60.0


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
    def wanted(self) -> Counter[Sample]:
        """What an uninterrupted run trains on, and how often."""
        num_groups = self.steps * GROUPS_PER_STEP
        return lineage.uninterrupted(num_groups=num_groups, group_size=GROUP_SIZE, num_rows=NUM_ROWS, seed=self.seed)

    @property
    def hold_file(self) -> Path:
        """The last step of the run waits while it exists."""
        return self.run_folder / HOLD_FILE

    @property
    def logs(self) -> Path:
        """One per role."""
        return self.run_folder / "logs"

    @property
    def address(self) -> str:
        """Override for generators: where the broker listens."""
        return f"broker.address=ipc://{self.folder}/broker.sock"

    @property
    def settings(self) -> list[str]:
        """Overrides for broker and learner.

        Patience is short, so that peers, leases and claims also lapse; `max_attempts` is out of reach, because here a
        prompt that is tried often is no poison.
        """
        patience_s = self.pace.patience_s
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
            f"buffer.claim_lease_s={patience_s}",
            "buffer.max_attempts=1000000",
            "broker.peer_timeout_s=1.5",
            f"broker.lease_s={patience_s}",
            f"weights.transfer_timeout_s={patience_s}",
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
        """Make task, model and folders. Raises RuntimeError with the end of the log when that fails."""
        self.logs.mkdir(parents=True)
        data = ["--task=reverse", "--digits=5", f"--train-rows={NUM_ROWS}", "--heldout-rows=16", "--out=data"]
        self._make("slipstream.scripts.make_digits_data", data)
        self._make("slipstream.scripts.init_random_model", ["--layers=1", "--width=32", "--out=models/tiny"])

    def _make(self, module: str, arguments: list[str]) -> None:
        maker = WarmProcess(module, arguments, cwd=self.folder, log=self.logs / "stage.log")
        maker.start()
        if maker.wait(timeout_s=_MAKING_TIMEOUT_S) != 0:
            raise RuntimeError(f"python -m {module} must end well, got: {maker.last_line}")
