"""Settings of the learner role: engine, optimizer, batch, checkpoints, evaluation."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from slipstream.configs.base import Config, Positive, require


class MetricBound(Config):
    """Condition on an evaluation metric.

    Example: MetricBound(metric="eval/accuracy_greedy", at_least=0.98)
    """

    metric: str
    """Metric key, such as `eval/accuracy_greedy`, `eval/reward_greedy`, `eval/pass@8_aime`."""
    at_least: float | None = None
    """Smallest value that meets the condition; null = none."""
    at_most: float | None = None
    """Largest value that meets the condition; null = none."""

    def __post_init__(self) -> None:
        key, is_bound = f"a condition on {self.metric}", self.at_least is not None or self.at_most is not None
        require(is_bound, key, "have at_least or at_most", got="neither", why="every value would meet it")

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has the metric within its bounds."""
        if (value := row.get(self.metric)) is None:
            return False
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


class EvaluationConfig(Config):
    """Evaluation on held-out prompts, answered by the generators during training."""

    every_steps: Annotated[int, Meta(ge=0)] = 20
    """Steps between two monitored evaluations; 0 = only before and after training. The next version is published once
    all answers of this one have arrived."""
    before_training: bool = True
    """Whether to evaluate the final rows before training as well."""
    num_prompts: Annotated[int, Meta(ge=1)] = 128
    """Rows at the start of the held-out file, evaluated during training and for early stopping. A file with fewer rows
    than `num_prompts` + `num_final_prompts` is split in that proportion."""
    num_final_prompts: Annotated[int, Meta(ge=1)] = 256
    """Rows after them, evaluated before and after training."""
    stop: list[MetricBound] | None = None
    """Conditions for early stopping, such as `[{metric: eval/accuracy_greedy, at_least: 0.97}]`: training ends once a
    monitored evaluation meets all of them. null = always run `max_steps`."""
    goals: list[MetricBound] = []
    """Conditions on the final evaluation, all required for a positive verdict, such as `[{metric: eval/accuracy_greedy,
    at_least: 0.95}]`; empty = the verdict only reports."""

    def rows(self, num_rows: int) -> tuple[range, range]:
        """Split rows into those monitored during training and those evaluated before and after it.

        No row is in both, unless it is the only one: early stopping must not select on reported numbers.
        """
        wanted = self.num_prompts + self.num_final_prompts
        if num_rows >= wanted:
            return range(self.num_prompts), range(self.num_prompts, wanted)
        if num_rows == 1:
            return range(1), range(1)
        monitored = min(max(1, num_rows * self.num_prompts // wanted), num_rows - 1)
        return range(monitored), range(monitored, num_rows)


Decay = Annotated[float, Meta(ge=0, lt=1)]


class OptimizerConfig(Config):
    """Optimizer and its learning rate schedule."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit`: moments in 8 bits, by bitsandbytes. `muon`: orthogonalized momentum for the matrices of hidden
    layers, at learning rates as for AdamW, which trains all others. Both need `learner.engine.zero_stage=0`."""
    learning_rate: Positive = 1e-6
    """Peak of the learning rate schedule. By default 1e-6, or 1e-5 with `model.lora`."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay of AdamW's first and second moment."""
    epsilon: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Decoupled weight decay; one-dimensional parameters (norms, biases) are excluded."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; `linear` and `cosine` reach zero at `max_steps`."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Length of the linear warm-up, in steps (of `algorithm.updates_per_step` updates)."""
    max_grad_norm: Positive | None = 1.0
    """Global gradient norm above which gradients are scaled down; null = never."""

    def check_installed(self, setting: str) -> None:
        """Raise ConfigError without the optimizer's library."""
        is_fit, must = self.name != "adamw_8bit" or find_spec("bitsandbytes"), "be adamw or muon without bitsandbytes"
        why = "it is not installed here: pip install 'bitsandbytes>=0.50,<0.51'"
        require(bool(is_fit), f"{setting}.name", must, got=self.name, why=why)


class DeepSpeedEngineConfig(Config, tag="deepspeed", tag_field="kind"):
    """DeepSpeed, on GPUs or CPUs."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """State sharded over ranks. 0: none. 1: optimizer state. 2: also gradients. 3: also parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory; needs ZeRO stage 1 or higher."""
    offload_parameters: bool = False
    """Keep this rank's parameter shards in host memory; needs ZeRO stage 3."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    offload_activations: bool = False
    """Keep layer inputs in host memory until the backward pass; needs `gradient_checkpointing`."""

    def __post_init__(self) -> None:
        is_fit, key = (
            self.gradient_checkpointing or not self.offload_activations,
            "learner.engine.gradient_checkpointing",
        )
        why = "otherwise other activations would stay on the device"
        require(is_fit, key, "be true with offload_activations", got="false", why=why)
        key, stage = "learner.engine.zero_stage", self.zero_stage
        why = "only ZeRO-3 shards parameters"
        require(stage == 3 or not self.offload_parameters, key, "be 3 with offload_parameters", got=stage, why=why)
        why = "without ZeRO, DeepSpeed keeps the optimizer on the device of the model"
        require(stage > 0 or not self.offload_optimizer, key, "be >= 1 with offload_optimizer", got=stage, why=why)


class TorchEngineConfig(Config, tag="torch", tag_field="kind"):
    """Plain torch in one process, the reference implementation of the DeepSpeed engine."""

    zero_stage: ClassVar[int] = 0
    gradient_checkpointing: ClassVar[bool] = False


class CheckpointConfig(Config):
    """Checkpoints for resuming a run."""

    every_steps: Annotated[int, Meta(ge=1)] = 50
    """Steps between checkpoints; the last step always writes one."""
    keep: Annotated[int, Meta(ge=1)] = 2
    """Number of newest checkpoints to keep."""
    best: str | None = None
    """Metric by which to keep one more checkpoint, exported as `best_model` at the end, such as `eval/accuracy_greedy`;
    of a loss, the smallest is best. Every monitored evaluation then writes a checkpoint. null = none."""


class StallConfig(Config):
    """Detection of waits that cannot end."""

    policy: Literal["fail", "wait"] = "fail"
    """`fail`: save a checkpoint and exit with an error that names the cause. `wait`: until the cause, shown in status,
    live view, and log, is removed."""
    timeout_s: Positive = 600.0
    """Seconds without a useful arrival after which the run is stalled; must exceed the time of the longest answer.
    While answers arrive, a batch or an evaluation may take three times as long, or half an hour. An engine may take
    three times as long to start, and a third for a step. By default at least `generators.answer_timeout_s` plus
    `generators.reward.timeout_s`."""


PAUSE_REQUEST = "pause"
"""Subject of a request to the learner; no step starts while it exists."""
PROFILE_REQUEST = "profile"
"""Subject of a request to the learner, and its gauge. Value: first and last step."""


class ProfileConfig(Config):
    """Recording of a few steps, with all roles on one timeline."""

    steps: list[int] | None = None
    """First and last step, such as `[20, 22]`; written to `profile/trace.json.gz`. null = none."""


class LearnerConfig(Config):
    """The learner role: batch, engine, optimizer, deadlines."""

    num_ranks: Annotated[int, Meta(ge=1)] = 1
    """Number of learner processes."""
    sequence_parallel: Annotated[int, Meta(ge=1)] = 1
    """Processes that share each sequence, one slice each; these groups share the batch. Must divide `num_ranks` and the
    model's attention heads. 1 = off."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors; `auto` = `cuda` if available."""
    engine: DeepSpeedEngineConfig | TorchEngineConfig = DeepSpeedEngineConfig()
    """Training engine, which holds parameters and optimizer."""
    compile: bool = False
    """Compile the layers (torch.compile): faster steps on GPUs after a minute or more. With ZeRO stage 3,
    `sequence_parallel`, or mixtures of experts, only the norms."""
    optimizer: OptimizerConfig = OptimizerConfig()
    prompts_per_step: Annotated[int, Meta(ge=1)] = 32
    """Groups claimed per step."""
    max_steps: Annotated[int, Meta(ge=1)] = 200
    """Total number of steps of the run."""
    epochs: Annotated[int, Meta(ge=1)] | None = None
    """Passes over the training data instead of `max_steps`, which becomes `epochs` x rows / `prompts_per_step` (of the
    store), rounded up: as many groups are trained as these passes have prompts. null = by `max_steps`."""
    tokens_per_microbatch: Annotated[int, Meta(ge=16)] = 8192
    """Maximum tokens of a microbatch, including padding; by default at least `model.max_length`. Larger: more memory,
    fewer passes."""
    packing: bool = True
    """Pack several sequences into a row, if the model keeps them apart; false = one per row."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    stall: StallConfig = StallConfig()

    def __post_init__(self) -> None:
        size = self.sequence_parallel
        must = f"be a multiple of learner.sequence_parallel ({size})"
        why = "ranks share sequences in groups of this size"
        require(self.num_ranks % size == 0, "learner.num_ranks", must, got=self.num_ranks, why=why)
