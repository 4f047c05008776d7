"""Conversion into transformers folders: round trips, adapters, shards of other trainers, and bad input."""

import json
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.broker.dataset import Dataset
from slipstream.buffer.codec import encode, unpack
from slipstream.buffer.durable_files import find_damage
from slipstream.buffer.records import StoredGroup
from slipstream.buffer.trajectory import Reward, Trajectory
from slipstream.configs.base import ConfigError
from slipstream.configs.data import LoraConfig, ModelConfig, ReplayConfig
from slipstream.configs.generators import RewardConfig
from slipstream.generators.rewards.functions import position_match
from slipstream.generators.rewards.reward import RewardInput
from slipstream.generators.tokenization import PromptEncoder
from slipstream.launch import replay
from slipstream.launch.convert import convert
from slipstream.launch.replay import rescore
from slipstream.learner.checkpoint import Checkpoints
from slipstream.learner.training import saved_model
from slipstream.runtime.run_folder import RunFolder
from slipstream.scripts.make_digits_data import TRAIN, make_row, write_pair
from tests.builders import make_run, make_trajectory
from tests.fakes import no_file_above
from tests.families import make_family
from tests.tiny_model import make_tiny_model, make_tiny_module
from tests.unit.learner import builders
from tests.unit.learner.builders import make_alone, make_groups, make_trainer, save, zero


def run(source, target, *, base=None, dtype=None, max_shard_size="5GB"):
    return convert(source, target, base=base, dtype=dtype, max_shard_size=max_shard_size)


def held(folder, **options):
    """The weights that transformers loads."""
    return AutoModelForCausalLM.from_pretrained(folder, **options).state_dict()


def stored(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same(first, second):
    assert set(first) == set(second)
    assert all(tensor.equal(second[name]) for name, tensor in first.items())


def refusal(*arguments, **options):
    with pytest.raises(ConfigError) as caught:
        run(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def trained(folder, *, engine=None, lora=None):
    """A trainer after one step on the tiny model, and its checkpoint."""
    model = make_tiny_model(folder / "base")
    learner = {"engine": engine} if engine else {}
    config = ModelConfig(max_length=64, dtype="float32", path=str(model), lora=lora)
    settings = builders.make_run(model, learner=learner, model=config)
    trainer = make_trainer(settings)
    trainer.step(make_groups(), learner_version=0, step=1)
    checkpoints = Checkpoints(folder / "checkpoints", run=settings, trainer=trainer, ranks=make_alone())
    with mock.patch.object(saved_model, "FILE_BYTES", 50_000):
        return trainer, folder / "checkpoints" / save(checkpoints, step=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("trained"))[1]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_model_becomes_shards_with_the_names_of_the_hub(tmp_path, family):
    source = make_family(tmp_path / "source", family)
    assert "float32" in run(source, tmp_path / "target", max_shard_size="100KB")
    assert_same(stored(tmp_path / "target"), stored(source))
    assert_same(held(tmp_path / "target"), held(source))
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert not find_damage(tmp_path / "target")
    again = tmp_path / "again"
    run(tmp_path / "target", again)
    assert_same(stored(again), stored(source))


def test_a_checkpoint_is_written_in_another_dtype_with_its_tokenizer(tmp_path, checkpoint):
    assert len(list((checkpoint / "model").glob("model-*.safetensors"))) > 2
    run(checkpoint, tmp_path / "target", dtype="bfloat16")
    expected = {name: tensor.bfloat16() for name, tensor in held(checkpoint / "model").items()}
    assert_same(held(tmp_path / "target", dtype="auto"), expected)
    one, other = (
        AutoTokenizer.from_pretrained(folder) for folder in (checkpoint.parents[1] / "base", tmp_path / "target")
    )
    assert (one.chat_template, one.get_vocab()) == (other.chat_template, other.get_vocab())
    assert not list(tmp_path.glob("*.draft"))


def test_a_run_folder_stands_for_its_final_model_or_its_newest_checkpoint(tmp_path, checkpoint):
    run_folder = tmp_path / "runs" / "mine"
    for step in (5, 10):
        shutil.copytree(checkpoint, run_folder / "checkpoints" / f"step-{step:08}")
    (run_folder / "config.yaml").touch()
    shutil.rmtree(run_folder / "checkpoints" / "step-00000005" / "model")
    run(run_folder, tmp_path / "newest")
    assert_same(held(tmp_path / "newest"), held(checkpoint / "model"))
    final = shutil.copytree(make_family(tmp_path / "other", "llama"), run_folder / "final_model")
    run(run_folder, tmp_path / "final")
    assert_same(held(tmp_path / "final"), held(final))


def test_an_adapter_is_merged_into_its_base(tmp_path):
    _, checkpoint = trained(tmp_path, lora=LoraConfig(rank=4))
    adapter = checkpoint / "model" / "adapter"
    run(adapter, tmp_path / "target", base=tmp_path / "base")
    run(adapter, tmp_path / "found")
    assert_same(stored(tmp_path / "found"), stored(tmp_path / "target"))
    merged, expected = held(tmp_path / "target"), held(checkpoint / "model")
    assert max(float((merged[name] - expected[name]).abs().max()) for name in expected) <= 1e-6
    assert any(not tensor.equal(merged[name]) for name, tensor in held(tmp_path / "base").items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    run(adapter, tmp_path / "as_base", base=tmp_path / "half")
    run(adapter, tmp_path / "finer", base=tmp_path / "half", dtype="float32")
    finer = stored(tmp_path / "finer")
    assert_same(stored(tmp_path / "as_base"), {name: tensor.bfloat16() for name, tensor in finer.items()})
    assert any(not tensor.equal(tensor.bfloat16().float()) for tensor in finer.values())
    other = make_family(tmp_path / "other", "llama")
    assert "--base must be the causal language model" in refusal(adapter, tmp_path / "no", base=other)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_zero_checkpoint_is_gathered(tmp_path, stage):
    trainer, checkpoint = trained(tmp_path, engine=zero(stage))
    trainer.engine._engine.save_checkpoint(str(tmp_path / "zero"))
    run(tmp_path / "zero", tmp_path / "target", base=tmp_path / "base")
    assert_same(held(tmp_path / "target"), held(checkpoint / "model"))
    (states,) = (tmp_path / "zero").glob("*/*_optim_states.pt")
    states.unlink()
    assert "SOURCE must be a folder with" in refusal(tmp_path / "zero", tmp_path / "no", base=tmp_path / "base")


class Planted:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", ["model_world_size_1_rank_0.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_nothing_of_a_checkpoint_is_executed(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "base")
    (tmp_path / "source").mkdir()
    for file in (name, "mp_rank_00_model_states.pt"):
        torch.save({"lm_head.weight": Planted()}, tmp_path / "source" / file)
    assert "UnpicklingError" in refusal(tmp_path / "source", tmp_path / "target", base=tmp_path / "base")
    assert not (tmp_path / "executed").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_bad_input_is_refused_in_one_sentence(tmp_path):
    model, target = make_tiny_model(tmp_path / "model"), tmp_path / "target"
    with no_file_above(2**15):
        assert "TARGET must be on a disk with room" in refusal(model, target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert "SOURCE must be a folder with" in refusal(tmp_path / "none", target)
    assert "TARGET must be a folder to be made" in refusal(model, model)
    assert "--dtype must be one of float32" in refusal(model, target, dtype="int8")
    assert "--max-shard-size must be" in refusal(model, target, max_shard_size="5 GiB")
    run(model, target, max_shard_size="50KB")
    shard = sorted(target.glob("model-*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "must have the checksum" in refusal(target, tmp_path / "no")
    (target / "checksums.json").unlink()
    shard.unlink()
    assert "hold every safetensors file" in refusal(target, tmp_path / "no")
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors")
    assert "missing keys: model.norm.weight" in refusal(model, tmp_path / "no")
    (model / "model.safetensors").write_bytes(b"{}")
    assert "readable safetensors" in refusal(model, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_fsdp_shards_of_one_rank_are_joined(tmp_path):
    make_tiny_model(tmp_path / "actor" / "huggingface")
    (tmp_path / "actor" / "huggingface" / "model.safetensors").unlink()
    weights = make_tiny_module(seed=3).state_dict()
    torch.save(weights, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    run(tmp_path, tmp_path / "target")
    assert_same(held(tmp_path / "target"), weights)
    (tmp_path / "actor" / "model_world_size_1_rank_0.pt").rename(tmp_path / "actor" / "model_world_size_2_rank_0.pt")
    assert "must hold FSDP shards" in refusal(tmp_path, tmp_path / "no")


HERE = "tests.unit.slipstream.launch.test_convert"
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


def rewards_of(groups: list[StoredGroup], prompts: Dataset, function: str) -> list[Reward]:
    """After rescoring; nothing else has changed."""
    config = RewardConfig(function=function, num_workers=0)
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


def test_a_failing_function_gives_a_failed_reward_and_not_zero(prompts, groups):
    rewards = rewards_of(groups, prompts, f"{HERE}:unwilling")
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
