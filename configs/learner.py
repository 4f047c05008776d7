"""The learner role: engine, optimizer, batch, checkpoints."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config


# @@ How progress is measured on held-out prompts.
class EvaluationConfig(Config):
    """Generators answer held-out prompts beside their training work."""

    every_steps: Annotated[int, Meta(ge=0)] = 10
    """Steps between two monitored evaluations; 0 = only before and after training."""
    monitor_prompts: Annotated[int, Meta(ge=1)] = 128
    """First rows of the held-out file, used while training (and for early stopping)."""
    final_prompts: Annotated[int, Meta(ge=1)] = 512
    """The rows after them, used once before and once after training."""
    goal_sampled: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Accuracy at temperature 1 that the verdict at the end asks for; None = the verdict only reports."""
    goal_greedy: Annotated[float, Meta(gt=0, le=1)] | None = None
    """The same at temperature 0."""
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    """Longest wait for the evaluations before and after training while answers do arrive, seconds; a hopeless one ends
    before, see `learner.dead_end`."""


class OptimizerConfig(Config):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Meta(gt=0)] = 1e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Moment decay."""
    epsilon: Annotated[float, Meta(gt=0)] = 1e-8
    """Denominator term."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Decoupled decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up, down to zero at `max_steps`."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Linear warm-up, optimizer updates."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """Global gradient norm above which gradients are scaled down."""


class DeepSpeedEngineConfig(Config, tag="deepspeed", tag_field="kind"):
    """DeepSpeed, on GPUs or CPUs."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is sharded over ranks: nothing | optimizer | + gradients | + parameters."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""


class TorchEngineConfig(Config, tag="torch", tag_field="kind"):
    """Plain torch in one process: the twin DeepSpeed is compared with."""


class CheckpointConfig(Config):
    """What is kept to resume from."""

    every_steps: Annotated[int, Meta(ge=1)] = 50
    """Steps between checkpoints; the last step always makes one."""
    keep: Annotated[int, Meta(ge=1)] = 2
    """Newest checkpoints kept."""


class StopConfig(Config):
    """Ends training before `max_steps` once the monitored evaluation is this good."""

    accuracy_sampled: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Held-out accuracy at temperature 1."""
    accuracy_greedy: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Held-out accuracy at temperature 0."""


class DeadEndConfig(Config):
    """When what the learner waits for will not come, and what it does then."""

    policy: Literal["fail", "wait"] = "fail"
    """Save a checkpoint and end with an error that names the cause | wait until somebody mends it, showing the cause in
    status, live view and log."""
    after_s: Annotated[float, Meta(gt=0)] = 120.0
    """Time in which nothing useful arrives, seconds; must exceed what the longest trajectory takes."""
    start_after_s: Annotated[float, Meta(gt=0)] = 600.0
    """The same while a living generator starts or fetches its weights; and time in which no generator adopts any newer
    weights while training goes on. Seconds."""
    failed_batches: Annotated[int, Meta(ge=1)] = 2
    """Batches' worth of trajectories whose rewards failed one after the other, without an answer among them."""


class LearnerConfig(Config):
    """The learner role."""

    num_ranks: Annotated[int, Meta(ge=1)] = 1
    """Data-parallel processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto = cuda when there is one."""
    engine: DeepSpeedEngineConfig | TorchEngineConfig = DeepSpeedEngineConfig()
    """What holds parameters and optimizer."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How they move."""
    groups_per_step: Annotated[int, Meta(ge=1)] = 32
    """Groups claimed for one step."""
    max_steps: Annotated[int, Meta(ge=1)] = 200
    """Steps of the whole run."""
    tokens_per_microbatch: Annotated[int, Meta(ge=16)] = 8192
    """Most input tokens of a microbatch, padding included."""
    stop: StopConfig | None = None
    """Early end; None = always `max_steps`."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept to resume from."""
    wait_timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    """Longest wait for a batch while trajectories do arrive, seconds; a hopeless one ends before, see `dead_end`."""
    dead_end: DeadEndConfig = DeadEndConfig()
    """What counts as hopeless."""
