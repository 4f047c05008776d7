"""Model folders in transformers format: read with one sentence when something is missing, written whole or not."""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from configs.base import ConfigError


def save_model(folder: Path, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model and tokenizer; a folder that was there is replaced."""
    unfinished = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def load_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read model (float32) and tokenizer. Raises ConfigError."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} must be a model in transformers format, but has no config.json.")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)
