from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.configs.algorithm import AlgorithmConfig, KlConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.data import LoraConfig
from slipstream.configs.learner import OptimizerConfig, TorchEngineConfig
from slipstream.learner.errors import CheckpointError
from slipstream.learner.training.model import load_policy
from slipstream.learner.training.saved_model import save_model
from slipstream.runtime.lora import ADAPTER_FILE
from slipstream.scripts.init_random_model import make_model as make_random_model
from tests.tiny_model import make_tokenizer
from tests.tolerance import largest_difference
from tests.unit.learner.builders import (
    CPU,
    load,
    make_alone,
    make_checkpoints,
    make_groups,
    make_model,
    make_run,
    make_trainer,
    model_config,
    save,
    train_steps,
    weights,
    zero,
)

PROMPT = torch.tensor([[4, 8, 2, 9, 5, 6, 7, 3]])
RECOMPUTING = msgspec.structs.replace(zero(2), gradient_checkpointing=True)
TORCH = TorchEngineConfig()
ENGINES = {"torch": TORCH, "zero-2": RECOMPUTING, "zero-3": zero(3)}


def make_lora_run(path, *, engine=TORCH, kl=0.0, estimator="k3", **lora):
    return make_run(
        path,
        model=model_config(path, lora=LoraConfig(**({"rank": 4} | lora))),
        learner={"engine": engine, "optimizer": OptimizerConfig(learning_rate=1e-2)},
        algorithm=AlgorithmConfig(kl=KlConfig(coef=kl, estimator=estimator)),
    )


def start(run, folder=None):
    torch.manual_seed(run.seed)
    return make_checkpoints(run, folder) if folder else (make_trainer(run), None)


def whole(trainer):
    return {name: tensor.clone() for name, tensor in trainer.engine.gather_parameters(is_whole=True)}


def logits_of(module):
    with torch.no_grad():
        return module.eval()(input_ids=PROMPT).logits


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_every_engine_moves_the_adapter_alone_and_alike(tmp_path, engine):
    path = make_model(tmp_path)
    expected, reference = start(make_lora_run(path, kl=0.1))[0], start(make_lora_run(path, engine=engine, kl=0.1))[0]
    before = whole(reference)
    for one, other in zip(train_steps(expected, range(2)), train_steps(reference, range(2)), strict=True):
        assert other == pytest.approx(one, abs=1e-5, rel=1e-4)
    found = weights(reference)
    assert largest_difference(weights(expected), found) < 1e-5
    moved = {name for name, tensor in whole(reference).items() if not tensor.equal(before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert len(moved) == len(found) == 28
    assert all(name.startswith("base_model.model.model.layers.") for name in found)
    moments = sum(state["exp_avg"].numel() for state in reference.engine.optimizer.state.values())
    assert moments == sum(tensor.numel() for tensor in found.values())


def test_a_base_that_changed_is_refused(tmp_path):
    run = make_lora_run(make_model(tmp_path))
    _, checkpoints = start(run, tmp_path)
    name = save(checkpoints, step=1)
    file = Path(run.model.path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.path must hold the model that the adapter in .* got other"):
        start(run, tmp_path)[1].restore(name)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2"])
def test_the_saved_model_is_the_base_with_its_adapter(tmp_path, architecture):
    import peft

    base = make_random_model(architecture=architecture, layers=2, width=64, seed=3, head_width=32)
    base.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    run = make_lora_run(tmp_path / "base", alpha=7.0)
    policy = load_policy(run.model, device=CPU)
    for _, parameter in policy.weights():
        torch.nn.init.normal_(parameter, std=0.05)
    trainer, _ = start(run)
    trainer.engine.model.load_state_dict(policy.state_dict())
    save_model(trainer.engine, tmp_path / "model", config=run.model, ranks=make_alone())
    trained = logits_of(policy.causal_lm)
    assert (trained - logits_of(base)).abs().max() > 0.01
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in base.named_parameters()}
    assert (logits_of(merged) - trained).abs().max() < 1e-6
    adapted = peft.PeftModel.from_pretrained(base, (tmp_path / "model" / ADAPTER_FILE).parent)
    assert (logits_of(adapted) - trained).abs().max() < 1e-6


@pytest.mark.parametrize(("engine", "estimator"), [(TorchEngineConfig(), "k3"), (zero(3), "full")], ids=["k3", "full"])
def test_the_reference_is_the_base_without_a_second_model(tmp_path, engine, estimator):
    path = make_model(tmp_path)
    trainer, _ = start(make_lora_run(path, engine=engine, kl=0.5, estimator=estimator))
    first, *_, last = train_steps(trainer, range(3))
    assert first["learner/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert last["learner/reference_kl"] > 1e-4
    twin = load(path)
    samples = trainer.collate(trainer._build(make_groups(), learner_version=0).updates[0])
    reference = trainer._frozen_models.reference
    with torch.no_grad():
        assert all(reference.forward(one)["logprobs"].equal(twin(one)["logprobs"]) for one in samples)
        assert not trainer.engine.forward(samples[0])["logprobs"].equal(twin(samples[0])["logprobs"])


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_proj", "w_proj"], "name layers of the model, got w_proj: this Qwen2ForCausalLM has down_proj, gate_proj,"),
        (["lm_head"], "name linear layers other than the head, embeddings, and experts, .* got lm_head"),
        (["embed_tokens"], ".* other than the head, embeddings, .* got embed_tokens"),
        (["roj"], "name layers of the model, got roj"),
    ],
)
def test_targets_that_cannot_be_are_refused_before_anything_is_loaded(tmp_path, targets, words):
    path = make_model(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"model\.lora\.targets must {words}"):
        load(path, lora=LoraConfig(targets=targets))


def test_only_chosen_layers_get_an_adapter_and_a_reward_models_head_is_trained_whole(tmp_path):
    policy = load(make_model(tmp_path), lora=LoraConfig(targets=["q_proj", "layers.1.mlp.up_proj"]))
    layers = ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj")
    expected = [f"{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"]
    assert [name.removeprefix("base_model.model.model.layers.") for name, _ in policy.weights()] == expected
    policy = load(make_model(tmp_path), lora=LoraConfig(targets=["q_proj"]), is_reward_model=True)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert {name for name, _ in policy.weights() if ".lora_" not in name} == {"base_model.model.score.weight"}
    assert len(trained) == len(dict(policy.weights())) == 5
