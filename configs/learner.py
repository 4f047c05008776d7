"""The learner role: engine, optimizer, batch, checkpoints, evaluation."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from slipstream.configs.base import Config, require

SHARD_SIZE = r"^[0-9]+(\.[0-9]+)?[KMGT]B\Z"
"""Sizes of files, as the hub's library reads them."""


class MetricBound(Config):
    """Condition on a metric of an evaluation.

    Example: MetricBound(metric="eval/accuracy_greedy", at_least=0.98)
    """

    metric: str
    """Key in the rows of metrics, such as `eval/accuracy_greedy`, `eval/reward_greedy`, `eval/pass@8_aime`."""
    at_least: float | None = None
    """Smallest value that meets the condition; null = none."""
    at_most: float | None = None
    """Largest value that meets the condition; null = none."""

    def __post_init__(self) -> None:
        require(
            self.at_least is not None or self.at_most is not None,
            f"a condition on {self.metric}",
            "have at_least or at_most",
            got="neither",
            why="every value would meet it",
        )

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of metrics has the metric, within its bounds."""
        if (value := row.get(self.metric)) is None:
            return False
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


class EvaluationConfig(Config):
    """Evaluation on held-out prompts, which generators answer beside their training work."""

    every_steps: Annotated[int, Meta(ge=0)] = 10
    """Steps between two monitored evaluations; 0 = only before and after training. The next version is published when
    the answers are in: each is sampled by the version that the evaluation names, and no other."""
    before_training: bool = True
    """Whether the final rows are evaluated before training, too."""
    only: bool = False
    """Evaluate the initial policy, and end without a step of training."""
    lease_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Largest share of the answers of a lease for evaluations while there are prompts to train on."""
    monitor_prompts: Annotated[int, Meta(ge=1)] = 128
    """First rows of the held-out file, evaluated during training and for early stopping. A file with fewer rows than
    `monitor_prompts` + `final_prompts` is shared between the two in that proportion."""
    final_prompts: Annotated[int, Meta(ge=1)] = 512
    """Rows after those, evaluated once before and once after training."""
    goals: list[MetricBound] = []
    """Conditions on the evaluation after training that the final verdict requires, all of them, such as `[{metric:
    eval/accuracy_greedy, at_least: 0.95}]`; empty = the verdict only reports."""
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest wait for the evaluations before and after training while answers arrive, seconds; without any hope of
    answers it ends earlier, see `learner.dead_end`."""

    def rows(self, num_rows: int) -> tuple[range, range]:
        """Rows monitored during training and rows evaluated before and after it, of a file with `num_rows`.

        No row is in both, unless the file has only one: early stopping must not choose by the numbers reported.
        """
        wanted = self.monitor_prompts + self.final_prompts
        if num_rows >= wanted:
            return range(self.monitor_prompts), range(self.monitor_prompts, wanted)
        if num_rows == 1:
            return range(1), range(1)
        monitored = min(max(1, num_rows * self.monitor_prompts // wanted), num_rows - 1)
        return range(monitored), range(monitored, num_rows)


Decay = Annotated[float, Meta(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW and its learning rate schedule."""

    learning_rate: Annotated[float, Meta(gt=0)] = 1e-4
    """Peak of the learning rate schedule."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay of the first and the second moment."""
    epsilon: Annotated[float, Meta(gt=0)] = 1e-8
    """Term added to the denominator."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Weight decay, decoupled from the gradient."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; `linear` and `cosine` reach zero at `max_steps`."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Length of the linear warm-up, optimizer updates."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Global gradient norm above which gradients are scaled down."""


class DeepSpeedEngineConfig(Config, tag="deepspeed", tag_field="kind"):
    """DeepSpeed, on GPUs or CPUs."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """Sharded over ranks. 0: nothing. 1: optimizer state. 2: also gradients. 3: also parameters."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory, from ZeRO stage 1 on."""
    offload_parameters: bool = False
    """Keep this rank's shards of the parameters in host memory, with ZeRO stage 3."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    offload_activations: bool = False
    """Keep the inputs of layers in host memory until the backward pass, with `gradient_checkpointing`."""

    def __post_init__(self) -> None:
        require(
            self.gradient_checkpointing or not self.offload_activations,
            "learner.engine.gradient_checkpointing",
            "be true with offload_activations",
            got="false",
            why="only what is recomputed from them leaves nothing else to keep",
        )
        key, stage = "learner.engine.zero_stage", self.zero_stage
        why = "only ZeRO-3 shards parameters"
        require(stage == 3 or not self.offload_parameters, key, "be 3 with offload_parameters", got=stage, why=why)
        why = "without ZeRO DeepSpeed leaves the optimizer where the model is"
        require(stage > 0 or not self.offload_optimizer, key, "be >= 1 with offload_optimizer", got=stage, why=why)


class TorchEngineConfig(Config, tag="torch", tag_field="kind"):
    """Plain torch in one process, the reference implementation of the DeepSpeed engine."""

    zero_stage: ClassVar[int] = 0
    gradient_checkpointing: ClassVar[bool] = False


class BestConfig(Config):
    """Checkpoint of the best monitored evaluation."""

    metric: str
    """Key in the rows of metrics, such as `eval/accuracy_greedy`."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is best."""


class CheckpointConfig(Config):
    """Checkpoints from which a run resumes."""

    every_steps: Annotated[int, Meta(ge=1)] = 50
    """Steps between checkpoints; the last step always makes one."""
    keep: Annotated[int, Meta(ge=1)] = 2
    """Newest checkpoints that are kept."""
    max_shard_size: Annotated[str, Meta(pattern=SHARD_SIZE)] = "50GB"
    """Largest safetensors file of a saved model, such as `5GB`."""
    best: BestConfig | None = None
    """Metric by which one more checkpoint is kept, whatever its age, and exported as `best_model` at the end; every
    monitored evaluation makes a checkpoint then. null = none."""


class DeadEndConfig(Config):
    """Detection of waits that cannot end."""

    policy: Literal["fail", "wait"] = "fail"
    """`fail`: save a checkpoint and exit with an error that names the cause. `wait`: continue once the cause is
    removed; status, live view and log show it meanwhile."""
    after_s: Annotated[float, Meta(gt=0)] = 120.0
    """Time without any useful arrival, seconds; must exceed the time of the longest trajectory."""
    start_after_s: Annotated[float, Meta(gt=0)] = 600.0
    """The same while a living generator starts or fetches its weights, for a start of vLLM at least
    `generators.engine.start_timeout_s` + `after_s`; also the time in which no generator applies newer weights while
    training goes on. Seconds."""


PAUSE_REQUEST = "pause"
"""Subject of a standing request to the learner: while it is there, no step begins."""
PROFILE_REQUEST = "profile"
"""Subject of a request to the learner, and its gauge. The value is the first and the last step."""


class ProfileConfig(Config):
    """Recording of a few steps with all roles on one time line."""

    steps: list[int] | None = None
    """First and last step, such as `[20, 22]`; written to `profile/trace.json.gz`. null = none."""


class LearnerConfig(Config):
    """The learner role: batch, engine, optimizer, deadlines."""

    num_ranks: Annotated[int, Meta(ge=1)] = 1
    """Processes of the learner."""
    rank_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Silence of a rank, or of its machine, after which the others end, seconds. A thread of each tells that it lives,
    however long its step takes."""
    sequence_parallel: Annotated[int, Meta(ge=1)] = 1
    """Processes that share each sequence, a slice each; the others share the batch. Divides `num_ranks` and the model's
    attention heads. 1 = none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors; `auto` = `cuda` where there is one."""
    engine: DeepSpeedEngineConfig | TorchEngineConfig = DeepSpeedEngineConfig()
    """Training engine: holds parameters and optimizer."""
    compile: bool = False
    """Compile the layers of the model that is trained (torch.compile): faster steps on GPUs, after a minute or more in
    which the first ones compile. Not with ZeRO stage 3 or `sequence_parallel`, nor for mixtures of experts."""
    optimizer: OptimizerConfig = OptimizerConfig()
    groups_per_step: Annotated[int, Meta(ge=1)] = 32
    """Groups claimed for one step."""
    max_steps: Annotated[int, Meta(ge=1)] = 200
    """Steps of the whole run."""
    tokens_per_microbatch: Annotated[int, Meta(ge=16)] = 8192
    """Most input tokens of a microbatch, padding included; more need more memory and take fewer passes."""
    packing: bool = True
    """Put several sequences into a row where the model computes each as alone; false = one per row."""
    stop: list[MetricBound] | None = None
    """Conditions on a monitored evaluation, such as `[{metric: eval/accuracy_greedy, at_least: 0.97}]`; training ends
    before `max_steps` once one evaluation meets all of them. null = always `max_steps`."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    token_stats_gib: Annotated[float, Meta(ge=0)] = 1.0
    """Room for the learner's log-probability ratio and entropy of each token that a step trains on, which the pages of
    trajectories show, GiB; about 4 bytes per token, and the oldest steps go first. 0 = they are not recorded."""
    wait_timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    """Longest wait for a batch while trajectories arrive, seconds; without any hope of a batch it ends earlier, see
    `dead_end`."""
    dead_end: DeadEndConfig = DeadEndConfig()

    def __post_init__(self) -> None:
        is_sharded, size = self.engine.zero_stage == 3, self.sequence_parallel
        for setting, is_set, why in (
            ("learner.engine.zero_stage=3", is_sharded, "it gathers parameters within layers"),
            ("learner.sequence_parallel > 1", size > 1, "ranks exchange tokens within layers"),
        ):
            require(not (self.compile and is_set), "learner.compile", f"be false with {setting}", got=True, why=why)
        must = f"be a multiple of learner.sequence_parallel ({size})"
        why = "every rank shares its sequences with as many others"
        require(self.num_ranks % size == 0, "learner.num_ranks", must, got=self.num_ranks, why=why)
