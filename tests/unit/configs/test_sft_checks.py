"""What mode=sft asks of the other settings, and what it does not."""

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.load import load


def test_supervised_training_needs_a_file_and_nothing_of_the_generators() -> None:
    run = load(["mode=sft", "sft.train_path=mine.parquet", "generators.group_size=1", "data.max_prompt_tokens=999"])
    assert run.mode == "sft"
    assert not run.is_one_process


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["mode=sft"], "mode=sft needs sft.train_path"),
        (["sft.train_path=mine.parquet"], "no other mode has one, got mode=async"),
        (["mode=sft", "sft.train_path=a", "replay.path=b"], "mode=replay needs replay.path"),
        (["mode=sft", "sft.train_path=a", "model.max_length=4096"], "learner.tokens_per_microbatch must be >="),
        (["mode=sft", "sft.train_path=a", "learner/engine=torch", "learner.num_ranks=2"], "runs one rank"),
        (["mode=sft", "sft.train_path=a", "sft.epochs=0"], "sft.epochs must be an integer >= 1"),
        (["mode=sft", "sft.train_path=a", "sft.unfit=drop"], "sft.unfit must be one of refuse, skip"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(overrides)


def test_any_preset_can_be_trained_supervised() -> None:
    for experiment in ("digits_serial", "gsm8k_1gpu"):
        assert load([f"experiment={experiment}", "mode=sft", "sft.train_path=a"]).sft.train_path == "a"
