"""Where prompts come from."""

from typing import Annotated

from msgspec import Meta

from configs.base import Config


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

    Example: PrepareStep(creates="data/digits/heldout.parquet", module="scripts.make_digits_data", args=["--digits=5"])
    """

    creates: str
    """Skipped when this path exists."""
    module: str
    """Started as `python -m module args...`."""
    args: list[str] = []
    """Its arguments."""
