"""Supervised fine-tuning: learning from right responses, without generators, store or broker."""

from typing import Annotated, Literal

from msgspec import Meta

from slipstream.configs.base import Config


class SftConfig(Config):
    """What `mode=sft` trains on, and for how long.

    A Parquet file has one of three forms, looked for in this order: `token_ids` with `model_mask`; `messages`, through
    the tokenizer's chat template; `prompt` (text or messages) with `response` (text).
    """

    train_path: str = ""
    """Demonstrations to learn from."""
    heldout_path: str = ""
    """Demonstrations to measure the loss on; empty = none."""
    prompt: str = "prompt"
    """Column of the prompts; `record.field` for one within a record."""
    response: str = "response"
    """Column of the responses to prompts, likewise; an end token is put after each."""
    unfit: Literal["refuse", "skip"] = "refuse"
    """What becomes of a row whose response is empty or that is longer than `model.max_length`; skipped ones are
    counted."""
    trajectories_per_step: Annotated[int, Meta(ge=1)] = 64
    """Demonstrations of one optimizer update, over all ranks."""
    epochs: Annotated[int, Meta(ge=1)] | None = None
    """Passes over the training file; None = `learner.max_steps` steps, however many passes that is."""
    heldout_every_steps: Annotated[int, Meta(ge=0)] = 20
    """Steps between two measurements of the held-out loss; 0 = only before and after training."""
    heldout_rows: Annotated[int, Meta(ge=1)] | None = None
    """The first rows of the held-out file are measured on; None = all."""
