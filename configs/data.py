"""Where prompts come from."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config
from slipstream.configs.generators import RewardConfig


# @@ Which model is trained.
class ModelConfig(Config):
    """A transformers checkpoint: a folder or a hub name."""

    path: str
    """Initial weights and tokenizer, in transformers format."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the engine computes in and what weights travel as. The learner keeps its master weights in float32."""
    max_length: int = 64
    """Longest prompt + response, tokens."""
    trust_remote_code: bool = False
    """Whether code that comes with the checkpoint may run."""


# @@ Training from stored rollouts.
class ReplayConfig(Config):
    """What `mode=replay` trains from."""

    path: str = ""
    """Archive folder of a run, such as `runs/mine/archive`."""
    rescore: RewardConfig | str | None = None
    """Another reward for the stored trajectories: `module:function`, or its fields as in `generators.reward`.

    Absent: the rewards they were stored with.
    """

    @property
    def reward(self) -> RewardConfig | None:
        """What rewards are recomputed with; None when they stay."""
        return RewardConfig(function=self.rescore) if isinstance(self.rescore, str) else self.rescore


class DataConfig(Config):
    """Parquet files in the verl-compatible form: `data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`."""

    train_path: str
    """Prompts to train on."""
    heldout_path: str
    """Prompts never trained on; evaluation alone reads them."""
    max_prompt_tokens: Annotated[int, Meta(ge=1)] = 32
    """A longer prompt is refused when the file is read, tokens."""


class PrepareStep(Config):
    """A command that makes a file the run needs, run once before the roles start.

    Example: PrepareStep(creates="data/digits/heldout.parquet", module="slipstream.scripts.make_digits_data", args=["--digits=5"])
    """

    creates: str
    """Skipped when this path exists."""
    module: str
    """Started as `python -m module args...`."""
    args: list[str] = []
    """Its arguments."""
