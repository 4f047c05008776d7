from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.buffer.trajectory import Reward
from slipstream.configs.algorithm import AdaptiveKlConfig, AlgorithmConfig, CorrectionConfig, KlConfig, RejectionConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.data import LoraConfig
from slipstream.configs.learner import OptimizerConfig, TorchEngineConfig
from slipstream.learner.errors import CheckpointError, DivergenceError
from slipstream.learner.training.model import load_policy
from slipstream.learner.training.saved_model import save_model
from slipstream.runtime.lora import ADAPTER_FILE
from slipstream.scripts.init_random_model import make_model as make_random_model
from tests.cases import cases
from tests.metric_docs import STEP, TOKENS, keys_under
from tests.tiny_model import make_tokenizer
from tests.tolerance import largest_difference
from tests.unit.learner.builders import (
    CPU,
    documented,
    load,
    make_alone,
    make_checkpoints,
    make_groups,
    make_model,
    make_response,
    make_run,
    make_samples,
    make_trainer,
    model_config,
    save,
    train_steps,
    weights,
    zero,
)


def train(run, batches):
    trainer = make_trainer(run)
    metrics = [trainer.step(groups, learner_version=0, step=i + 1) for i, groups in enumerate(batches)]
    return metrics, weights(trainer)


def test_the_same_seed_gives_the_same_numbers_bit_for_bit_all_documented_and_finite(tmp_path):
    run, batches = make_run(make_model(tmp_path)), [make_groups(seed=0), make_groups(seed=1)]
    (metrics, found), (again, others) = train(run, batches), train(run, batches)
    assert metrics == again
    assert largest_difference(found, others) == 0
    first, second = metrics
    assert documented(second) == keys_under(STEP, TOKENS) - {"learner/stale_length_ratio"}, "nothing is stale"
    assert set(second) - set(first) == {"learner/grad_cosine"}
    assert all(type(value) is float and np.isfinite(value) for value in second.values())


def test_batches_without_a_trainable_token_change_nothing_and_masked_tokens_may_hold_anything(tmp_path):
    def poison(trajectory):
        if trajectory.reward.status != "ok":
            return msgspec.structs.replace(trajectory, reward=Reward(total=1e30, status="error"))
        logprobs = np.where(trajectory.model_mask, trajectory.generator_logprobs, np.float32(1e30))
        return msgspec.structs.replace(trajectory, generator_logprobs=logprobs)

    run = make_run(make_model(tmp_path))
    groups = make_groups()
    groups[0][1] = msgspec.structs.replace(groups[0][1], reward=Reward(total=0.0, status="error"))
    poisoned = [[poison(member) for member in group] for group in groups]
    (clean, clean_weights), (dirty, dirty_weights) = train(run, [groups]), train(run, [poisoned])
    assert clean == dirty
    assert largest_difference(clean_weights, dirty_weights) == 0
    kl = KlConfig(coef=0.1, adaptive=AdaptiveKlConfig(target=0.01, horizon=8))
    trainer = make_trainer(make_run(make_model(tmp_path), algorithm=AlgorithmConfig(kl=kl)))
    before = weights(trainer)
    error = Reward(total=0.0, status="error")
    failed = [[msgspec.structs.replace(make_response(0, i), reward=error) for i in range(2)]]
    metrics = [trainer.step(failed, learner_version=0, step=1)]
    assert (metrics[0]["learner/updates"], trainer.num_updates) == (0, 0)
    assert largest_difference(before, weights(trainer)) == 0
    metrics += [trainer.step(make_groups(), learner_version=0, step=step) for step in (2, 3)]
    coefficients = [each["learner/kl_coefficient"] for each in metrics]
    assert coefficients[:2] == [0.1, 0.1]
    assert coefficients[2] != 0.1


@pytest.mark.parametrize(
    ("budget", "proximal", "num_updates"), [(64, "reuse", 1), (8192, "recompute", 1), (8192, "recompute", 2)]
)
def test_numbers_of_tokens_are_those_of_the_policy_before_the_step(tmp_path, budget, proximal, num_updates):
    learner = {"tokens_per_microbatch": budget}
    algorithm = AlgorithmConfig(proximal=proximal, updates_per_step=num_updates)
    run = make_run(make_model(tmp_path), learner=learner, algorithm=algorithm)
    groups = make_groups(num_groups=4)
    groups[0][1] = msgspec.structs.replace(groups[0][1], reward=Reward(total=0.0, status="error"))
    trainer = make_trainer(run)
    expected = {}
    for member in groups[0] + groups[1] + groups[2]:
        (microbatch,) = trainer.collate(make_samples([member]))
        with torch.no_grad():
            outputs = trainer.engine.forward(microbatch, requested=trainer.objective.requested)
        expected[member.id] = [outputs["logprobs"] + 2, outputs["entropies"]]
    del expected[groups[0][1].id]
    trainer.step(groups, learner_version=0, step=1, num_mixed=1)
    assert trainer.step_tokens.ids == list(expected), "neither a failed one nor those of another run"
    found = torch.tensor(np.stack([trainer.step_tokens.columns[name] for name in ("log_ratio", "entropy")]))
    wanted = [torch.cat(columns) for columns in zip(*expected.values(), strict=True)]
    # Entropies are those of the update.
    rows = 2 if num_updates == 1 else 1
    assert torch.allclose(found[:rows], torch.stack(wanted)[:rows], atol=1e-5)


@pytest.mark.parametrize("num_updates", [1, 2])
def test_an_update_whose_tokens_are_all_rejected_is_measured_and_moves_nothing(tmp_path, num_updates):
    correction = CorrectionConfig(level="none", max_weight=None, reject=[RejectionConfig(over="token", low=50.0)])
    algorithm = AlgorithmConfig(correction=correction, updates_per_step=num_updates)
    trainer = make_trainer(make_run(make_model(tmp_path), algorithm=algorithm))
    before = weights(trainer)
    groups = make_groups()
    metrics = trainer.step(groups, learner_version=0, step=1)
    assert (metrics["learner/updates"], trainer.num_updates) == (0, 0)
    assert metrics["learner/kept_fraction"] == metrics["learner/loss"] == 0
    assert metrics["learner/tokens"] == sum(int(member.model_mask.sum()) for group in groups for member in group)
    assert metrics["learner/mismatch_k3"] > 0
    assert largest_difference(before, weights(trainer)) == 0


def test_a_loss_or_gradient_that_is_not_finite_stops_the_step_by_name_and_moves_nothing(tmp_path):
    trainer = make_trainer(make_run(make_model(tmp_path)))
    with torch.no_grad():
        dict(trainer.engine.gather_parameters())["model.norm.weight"].fill_(float("nan"))
    before = weights(trainer)
    with pytest.raises(DivergenceError, match="loss of step 7 must be finite, got nan"):
        trainer.step(make_groups(), learner_version=0, step=7)
    same = {name for name, tensor in weights(trainer).items() if tensor.equal(before[name])}
    assert set(before) - same == {"model.norm.weight"}  # nan is not equal to itself
    trainer = make_trainer(make_run(make_model(tmp_path)))
    trainer.engine.backward = lambda loss: (loss * float("inf")).backward()
    with pytest.raises(DivergenceError, match=r"step 7: the gradient norm must be finite, got (nan|inf)"):
        trainer.step(make_groups(), learner_version=0, step=7)


def test_updates_follow_the_schedule_and_the_effective_sample_size(tmp_path):
    optimizer = OptimizerConfig(schedule="linear", learning_rate=1e-3)
    learner = {"prompts_per_step": 4, "max_steps": 2, "optimizer": optimizer}
    run = make_run(make_model(tmp_path), learner=learner, algorithm=AlgorithmConfig(updates_per_step=2))
    trainer = make_trainer(run)
    first = trainer.step(make_groups(num_groups=4), learner_version=0, step=1)
    second = trainer.step(make_groups(num_groups=4, seed=1), learner_version=0, step=2)
    assert (first["learner/updates"], trainer.num_updates) == (2, 4)
    assert first["learner/learning_rate"] == pytest.approx(0.75e-3)
    assert second["learner/learning_rate"] == pytest.approx(0.25e-3)
    assert first["learner/ratio_max"] > 1.0
    path, optimizer, moved = make_model(tmp_path), OptimizerConfig(learning_rate=1e-3), []
    for ess_learning_rate in (False, True):
        algorithm = AlgorithmConfig(proximal="recompute", ess_learning_rate=ess_learning_rate)
        trainer = make_trainer(make_run(path, learner={"optimizer": optimizer}, algorithm=algorithm))
        before = weights(trainer)
        metrics = trainer.step(make_groups(), learner_version=0, step=1)
        moved.append(largest_difference(before, weights(trainer)))
    scale = metrics["learner/learning_rate_scale"]
    assert 0 < scale < 0.9
    assert moved[1] == pytest.approx(scale * moved[0], rel=0.01)


def test_recomputing_and_reusing_the_proximal_policy_agree(tmp_path):
    path, batches = make_model(tmp_path), [make_groups(seed=i) for i in range(2)]
    results = [train(make_run(path, algorithm=AlgorithmConfig(proximal=p)), batches) for p in ("recompute", "reuse")]
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) == 0


PROMPT = torch.tensor([[4, 8, 2, 9, 5, 6, 7, 3]])
RECOMPUTING = msgspec.structs.replace(zero(2), gradient_checkpointing=True)
TORCH = TorchEngineConfig()
ENGINES = {"torch": TORCH, "zero-2": RECOMPUTING, "zero-3": zero(3)}


def test_recomputing_and_reusing_the_proximal_policy_agree_and_the_reference_holds_the_learner_back(tmp_path):
    path, batches = make_model(tmp_path), [make_groups(seed=i) for i in range(2)]
    results = [train(make_run(path, algorithm=AlgorithmConfig(proximal=p)), batches) for p in ("recompute", "reuse")]
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) == 0
    path, batches = make_model(tmp_path), [make_groups(seed=0)] * 8
    learner, divergence = {"optimizer": OptimizerConfig(learning_rate=3e-3), "max_steps": 8}, {}
    for coefficient in (0.001, 3.0):
        algorithm = AlgorithmConfig(kl=KlConfig(coefficient))
        metrics, _ = train(make_run(path, learner=learner, algorithm=algorithm), batches)
        assert metrics[0]["learner/reference_kl"] == 0
        divergence[coefficient] = metrics[-1]["learner/reference_kl"]
    assert 0 <= divergence[3.0] < 0.5 * divergence[0.001]


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


@cases(
    "targets, words",
    (["q_proj", "w_proj"], "name layers of the model, got w_proj: this Qwen2ForCausalLM has down_proj, gate_proj,"),
    (["lm_head"], "name linear layers other than the head, embeddings, and experts, .* got lm_head"),
    (["embed_tokens"], ".* other than the head, embeddings, .* got embed_tokens"),
    (["roj"], "name layers of the model, got roj"),
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
