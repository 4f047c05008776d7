"""Stage of a run under chaos: folder with task and model, shared settings, and pace."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.configs.base import Record
from tests.chaos.outcome import Sample, uninterrupted
from tests.chaos.processes import WarmProcess

EngineKind = Literal["light", "scripted", "vllm"]

NAME = "chaos"
HOLD_FILE = "hold-the-last-step"
"""File in the run's folder during the strikes."""
JOURNALS = "journal"
"""Folder of the journals, from the folder in which the roles work."""
POINTS = "points"
ANSWER_TIMEOUT_S = 2.0
"""Time after which the outbox of a light generator resends unanswered messages."""
PEER_TIMEOUT_S = 1.5
"""Silence after which the broker considers a peer gone."""
ALLOWED_REFUSALS = ["checksum", "content_conflict", "unknown_group"]
"""Reasons for which the broker must refuse deliberately bad offers."""
MEAN_STEP_S = 0.1
NUM_ROWS = 97
"""Prompts in the task; few, for many epochs per run."""
GROUP_SIZE = 4
_BUILD_TIMEOUT_S = 60.0


class Pace(Record):
    """Settings and durations that match the start time of generators. Example: PACES["scripted"]."""

    engine: list[str]
    has_cold_generators: bool
    """Whether they need a fresh interpreter: vLLM reads its environment when it is imported."""
    lapse_after_s: float
    """Seconds after which leases and claims lapse."""
    max_gap_s: float
    """Longest time between two strikes; half of it on average."""
    max_recovery_s: float
    """Longest time that a strike waits for all roles to recover."""
    steps_per_kill: int
    """Steps of the run per kill, so that run and strikes take about the same time."""
    prompts_per_step: int = 4
    max_lag: int = 4
    transfer_timeout_s: float = 0.0
    """Seconds after which members of a broadcast are evicted; 0: `lapse_after_s`."""
    read_every_s: float = 0.04
    max_stall_s: float = 120.0
    """Time without a step after which a run without strikes has stalled."""
    flags: list[str] = []

    @property
    def is_light(self) -> bool:
        """Whether roles start within milliseconds, and acts replace purely random strikes."""
        return "--light" in self.flags


PACES: dict[EngineKind, Pace] = {
    "light": Pace(
        engine=[
            *("generators/engine=scripted", "generators.engine.tokens_per_response=4"),
            *("generators.engine.seconds_per_token=0.1", "generators.sampling.max_tokens=40"),
            *("generators.max_concurrency=64", "buffer/filter=zero_advantage"),
            # One group suffices, so that about one row in ten is excluded at any time.
            "data.curriculum={min_answers: 4}",
        ],
        has_cold_generators=False,
        lapse_after_s=2.5,
        max_gap_s=0.6,
        max_recovery_s=3.0,
        steps_per_kill=3,
        prompts_per_step=8,
        max_lag=2,
        transfer_timeout_s=5.0,
        read_every_s=0.15,
        max_stall_s=25.0,
        flags=["--light"],
    ),
    "scripted": Pace(
        engine=[
            "generators/engine=scripted",
            "generators.engine.seconds_per_token=0.03",
            "generators.max_concurrency=16",
        ],
        has_cold_generators=False,
        lapse_after_s=2.0,
        max_gap_s=1.0,
        max_recovery_s=5.0,
        steps_per_kill=3,
    ),
    "vllm": Pace(
        engine=["generators/engine=vllm", "generators.max_concurrency=16"],
        has_cold_generators=True,
        lapse_after_s=10.0,
        max_gap_s=10.0,
        max_recovery_s=120.0,
        steps_per_kill=80,
    ),
}


class Stage:
    def __init__(self, folder: Path, *, seed: int, steps: int, pace: Pace) -> None:
        self.folder = folder
        self.run_folder = folder / "runs" / NAME
        self.logs = self.run_folder / "logs"
        self.hold_file = self.run_folder / HOLD_FILE
        self.journals, self.points = folder / JOURNALS, folder / POINTS
        self.broker_socket, self.relay_socket = f"{folder}/broker.sock", f"{folder}/relay.sock"
        self.address = f"broker.address=ipc://{self.broker_socket}"
        self.relayed_address = f"broker.address=ipc://{self.relay_socket}"
        self.seed = seed
        self.steps = steps
        self.pace = pace
        self.store = EmbeddedRedis(self.run_folder / "store", durability="standard")

    def expected(self, *, rejected: int = 0, skipped: Collection[int] = ()) -> Counter[Sample]:
        """Samples of an uninterrupted run with counts, if it rejects `rejected` groups and skips these prompts."""
        num_groups = self.steps * self.pace.prompts_per_step + rejected + len(skipped)
        samples = uninterrupted(num_groups=num_groups, group_size=GROUP_SIZE, num_rows=NUM_ROWS, seed=self.seed)
        return Counter({sample: count for sample, count in samples.items() if int(sample[0]) not in skipped})

    @property
    def window(self) -> int:
        """Groups that may be admitted beyond what was consumed."""
        return (self.pace.max_lag + 1) * self.pace.prompts_per_step

    @property
    def settings(self) -> list[str]:
        # Short times, so that peers and leases also lapse.
        pace, lapse_after_s = self.pace, self.pace.lapse_after_s
        settings = f"""
            experiment=digits_cpu {self.address} name={NAME} seed={self.seed} resume=true prepare=[]
            model.path=models/tiny data.train=data/train.parquet data.eval=data/heldout.parquet
            buffer/store=redis buffer.store.url='{self.store.url}'
            broker.lease_s={lapse_after_s} broker.peer_timeout_s={PEER_TIMEOUT_S}
            weights.transfer_timeout_s={pace.transfer_timeout_s or lapse_after_s} staleness.max_lag={pace.max_lag}
            generators.group_size={GROUP_SIZE} learner/engine=torch learner.prompts_per_step={pace.prompts_per_step}
            learner.max_steps={self.steps} learner.checkpoint.every_steps=5 learner.checkpoint.keep=1
            evaluation.stop=null evaluation.every_steps=0 evaluation.num_prompts=2 evaluation.num_final_prompts=4
        """
        return [*settings.split(), *pace.engine]

    def build(self) -> None:
        """Make task, model and folders. Raises RuntimeError with the last line of the log."""
        self.logs.mkdir(parents=True)
        self.journals.mkdir(exist_ok=True)
        self.points.mkdir()
        data = ["--task=reverse", "--digits=5", f"--train-rows={NUM_ROWS}", "--heldout-rows=16", "--out=data"]
        self._run("slipstream.scripts.make_digits_data", data)
        self._run("slipstream.scripts.init_random_model", ["--layers=1", "--width=32", "--out=models/tiny"])

    def _run(self, module: str, arguments: list[str]) -> None:
        program = WarmProcess(module, arguments, cwd=self.folder, log=self.logs / "stage.log")
        program.start()
        if program.wait(timeout_s=_BUILD_TIMEOUT_S) != 0:
            raise RuntimeError(f"python -m {module} must exit with 0, last line of its log: {program.last_line}")
