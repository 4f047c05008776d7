"""New rewards for stored trajectories."""

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.broker.dataset import Dataset
from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.records import StoredGroup
from slipstream.buffer.trajectory import Reward, Trajectory
from slipstream.configs.base import ConfigError
from slipstream.configs.data import ReplayConfig
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.functions import position_match
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder
from slipstream.launch import replay
from slipstream.launch.replay import rescore
from slipstream.runtime.run_folder import RunFolder
from slipstream.scripts.make_digits_data import TRAIN, make_row, write_pair
from tests.builders import make_run, make_trajectory

HERE = "tests.unit.slipstream.launch.test_replay"
ANSWERS = ([3, 1, 2, 8, 4, 10], [3, 1, 2, 4, 8, 10], [3, 1, 10, 10, 10, 10])
"""To `48213=`: right, with two places swapped, short. The last token ends an answer."""


class Digits:
    """A tokenizer: token `n` is the digit `n`, 10 ends an answer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(str(token) for token in token_ids if token < 10)


def unwilling(sample: RewardInput) -> float:
    """Raises for the right answer, and takes the short one for worth 0."""
    if sample.response == sample.ground_truth:
        raise ValueError("no good")
    return 0.0 if len(sample.response) < len(sample.ground_truth) else 0.25


@pytest.fixture
def prompts(tmp_path: Path) -> Dataset:
    row = make_row("48213=", ground_truth="31284", data_source="digits", index=0, split="train")
    write_pair(tmp_path, train=[row], heldout=[row])
    return Dataset(tmp_path / TRAIN)


@pytest.fixture
def groups() -> list[StoredGroup]:
    """As position_match scored them."""
    members = [make_member(index, tokens) for index, tokens in enumerate(ANSWERS)]
    return [StoredGroup("0", "retired", "", [1], [encode(member) for member in members])]


def make_member(index: int, response: list[int]) -> Trajectory:
    text = Digits().decode(response, skip_special_tokens=True)
    reward = position_match(RewardInput(prompt="48213=", response=text, ground_truth="31284"))
    token_ids = np.array([4, 8, 2, 1, 3, 9, *response], np.int32)
    return make_trajectory("0", index, token_ids=token_ids, prompt_uid="train/00000", reward=reward)


def rewards_of(groups: list[StoredGroup], prompts: Dataset, function: str, **fields: Any) -> list[Reward]:
    """After rescoring; nothing else has changed."""
    config = RewardConfig(function=function, **({"num_workers": 0} | fields))
    (group,) = rescore(groups, config, prompts=prompts, prompting=PromptEncoder(Digits(), max_prompt_tokens=8))
    members = [unpack(payload) for payload in group.payloads]
    before = [unpack(payload) for payload in groups[0].payloads]
    kept = [msgspec.structs.replace(new, reward=old.reward) for new, old in zip(members, before, strict=True)]
    assert msgspec.structs.replace(group, payloads=[encode(member) for member in kept]) == groups[0]
    return [member.reward for member in members]


def test_the_same_function_gives_the_stored_rewards_and_another_gives_others(prompts, groups):
    stored = [unpack(payload).reward for payload in groups[0].payloads]
    assert [reward.total for reward in stored] == [1.0, 4 / 6, 2 / 6]
    functions = "slipstream.generators.rewards.functions"
    assert rewards_of(groups, prompts, f"{functions}:position_match") == stored
    assert [each.total for each in rewards_of(groups, prompts, f"{functions}:exact_match")] == [1.0, 0.0, 0.0]
    stranger = StoredGroup("1", "retired", "", [1], [encode(make_trajectory("1", prompt_uid="other/00007"))])
    with pytest.raises(ConfigError, match="but 'other/00007' of 1-0-0 is missing"):
        rewards_of([stranger], prompts, f"{functions}:exact_match")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failing_function_gives_a_failed_reward_and_not_zero(prompts, groups, num_workers):
    rewards = rewards_of(groups, prompts, f"{HERE}:unwilling", num_workers=num_workers, timeout_s=30.0)
    assert [(reward.status, reward.total) for reward in rewards] == [("error", 0.0), ("ok", 0.25), ("ok", 0.0)]
    assert "ValueError: no good" in rewards[0].detail


def test_a_reward_is_named_by_its_path_or_by_its_fields() -> None:
    assert ReplayConfig().reward is None
    assert ReplayConfig(rescore="mine:strict").reward == RewardConfig(function="mine:strict")
    config = msgspec.convert({"rescore": {"function": "mine:strict", "timeout_s": 1}}, ReplayConfig)
    assert config.reward == RewardConfig(function="mine:strict", timeout_s=1.0)


def test_several_ranks_are_ended_in_order_by_a_stop_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "run_kept", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    run = make_run(runs_dir=str(tmp_path), learner={"num_ranks": 2, "engine": {"kind": "deepspeed"}})
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    # An unhandled signal would end the tests.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            replay.run_replay(run, RunFolder(run), overrides=[])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
