import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.algorithm import AlgorithmConfig, KlConfig
from slipstream.configs.data import MoeConfig
from slipstream.configs.engines import HfEngineConfig
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Microbatch
from slipstream.learner.training.model import Policy
from slipstream.learner.training.step_metrics import describe_experts
from slipstream.learner.training.trainer import Trainer
from slipstream.runtime.routers import EXPERTS
from tests.families import make_family, make_family_module
from tests.metric_docs import EXPERTS as EXPERTS_TABLE
from tests.metric_docs import keys_under
from tests.tolerance import largest_difference
from tests.unit.learner import builders
from tests.unit.learner.builders import make_groups, make_run, make_samples, make_trainer, members_of, model_config

ROWS = Layout("shared_rows", 8192, 64)
LAYOUTS = [ROWS, Layout("shared_rows", 40, 32), Layout("one_row", 30, 30), Layout("one_per_row", 1)]
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "deepseek_v2", "glm4_moe", "deepseek_v3")


def make_policy(name: str = "qwen3_moe", *, seed: int = 0) -> Policy:
    return Policy(make_family_module(name, seed=seed).train())


def collated(groups: list[list[Trajectory]], layout: Layout) -> list[Microbatch]:
    return collate(make_samples(members_of(groups)), layout=layout)


def route(policy: Policy, groups: list[list[Trajectory]], *, shift: int = 0) -> list[list[Trajectory]]:
    """Add the policy's expert choices, as an engine would record them, shifted by `shift` tokens."""
    routed = []
    for group in groups:
        routed.append([])
        for member in group:
            with torch.no_grad():
                policy.routers.given = None
                policy.causal_lm(input_ids=torch.from_numpy(member.token_ids[None].astype(np.int64)), use_cache=False)
            experts = policy.routers.chosen().numpy()
            routed[-1].append(msgspec.structs.replace(member, arrays={EXPERTS: np.roll(experts, shift, axis=0)}))
    return routed


def moe_run(folder: Path, *, algorithm: Any = None, learner: Any = None, lora: Any = None, **moe: Any) -> Any:
    path = folder / "qwen3_moe"
    if not path.exists():
        make_family(folder, "qwen3_moe")
    config = model_config(path, lora=lora, moe=MoeConfig(**moe))
    return make_run(path, model=config, learner=learner, algorithm=algorithm or AlgorithmConfig())


def aux_loss(trainer: Trainer, microbatches: list[Microbatch], prices: Any = None) -> torch.Tensor:
    prices = prices or trainer.expert_prices(microbatches)
    return sum(trainer.engine.forward(microbatch, **prices)["aux_loss"] for microbatch in microbatches)


def gradients_of(policy: Policy, values: torch.Tensor) -> list[torch.Tensor]:
    policy.zero_grad()
    values.sum().backward()
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


def test_the_loss_and_the_load_of_experts_by_hand(tmp_path: Path):
    # Two experts of four for each of two tokens: f and P by hand, one router at a time.
    trainer = make_trainer(moe_run(tmp_path, router_aux_loss=2.0))
    routers = trainer.engine.model.routers
    experts = torch.tensor([[[0, 1], [0, 1]], [[0, 2], [0, 1]]])
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]]))
    routers._chosen, routers._logits = list(experts.unbind(1)), [logits, logits]
    copies = torch.tensor([1, 1])
    assert routers.load(copies).tolist() == [[2, 1, 1, 0], [2, 2, 0, 0]]
    # Mean probabilities .3 .25 .2 .25; tokens per expert over tokens: 1 .5 .5 0, and 1 1 0 0.
    first, second = 4 * (0.3 + 0.5 * 0.25 + 0.5 * 0.2), 4 * (0.3 + 0.25)
    trainer.engine.forward = lambda _: {"expert_load": routers.load(copies)}
    prices = trainer.expert_prices([None])["prices"]
    assert float((prices * routers.probabilities(copies)).sum()) == pytest.approx(2 * (first + second) / 2)
    found = describe_experts(torch.tensor([[4.0, 4, 4, 4], [12, 4, 0, 0]]), [1, 3])
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
    expected = {"violation_max": 2.0, "violation_mean": 1.0, "violation_min": 0.0, "idle_fraction": 0.25}
    expected = {f"learner/expert_{name}": value for name, value in expected.items()}
    expected |= {"learner/by_layer/1/expert_violation": 0.0, "learner/by_layer/3/expert_violation": 2.0}
    assert found == pytest.approx(expected | {"learner/expert_entropy": (1 + entropy) / 2})


def test_the_loss_is_that_of_transformers_and_its_gradient_that_of_finite_differences(tmp_path: Path):
    trainer = make_trainer(moe_run(tmp_path, router_aux_loss=1.0))
    policy, microbatches = trainer.engine.model, collated(make_groups(), LAYOUTS[-1])
    found = aux_loss(trainer, microbatches)
    rows = [[], []]
    for microbatch in microbatches:
        with torch.no_grad():
            output = policy.causal_lm(input_ids=microbatch.token_ids, output_router_logits=True, use_cache=False)
        for own, logits in zip(rows, output.router_logits, strict=True):
            own.append(logits)
    expected = [load_balancing_loss_func((torch.cat(own),), 4, 2) for own in rows]
    assert found.item() == pytest.approx(float(sum(expected)) / 2, rel=1e-5)
    trainer = make_trainer(moe_run(tmp_path, router_aux_loss=1.0))
    microbatches = collated(make_groups(), LAYOUTS[0])
    weight = trainer.engine.model.causal_lm.model.layers[1].mlp.gate.weight
    prices = trainer.expert_prices(microbatches)
    aux_loss(trainer, microbatches, prices).backward()
    direction = weight.grad / weight.grad.norm()
    values = []
    for step in (-1e-3, 1e-3):
        with torch.no_grad():
            weight += step * direction
            values.append(float(aux_loss(trainer, microbatches, prices)))
            weight -= step * direction
    assert (values[1] - values[0]) / 2e-3 == pytest.approx(float(weight.grad.norm()), rel=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_no_packing_changes_the_loss_or_the_load(tmp_path: Path, layout: Layout):
    trainer = make_trainer(moe_run(tmp_path, router_aux_loss=1.0))
    groups = make_groups()
    one, other = (collated(groups, each) for each in (LAYOUTS[0], layout))
    assert len(other) > len(one) == 1
    assert float(aux_loss(trainer, other)) == pytest.approx(float(aux_loss(trainer, one)), rel=1e-5)
    loads = [sum(trainer.engine.forward(m)["expert_load"] for m in each) for each in (one, other)]
    assert torch.equal(*loads)
    samples = make_samples(members_of(groups))
    assert loads[0].sum(1).tolist() == [2 * sum(sample.num_inputs for sample in samples)] * 2


@pytest.mark.parametrize("learner", [{"tokens_per_microbatch": 64}, {"engine": builders.zero(0)}])
def test_microbatches_and_engines_do_not_change_the_step(tmp_path: Path, learner: dict):
    found = []
    for settings in ({}, learner):
        trainer = make_trainer(moe_run(tmp_path, learner=settings, router_aux_loss=0.5))
        metrics = trainer.step(make_groups(longest=20), learner_version=0, step=1)
        found.append((builders.weights(trainer), metrics))
    (one, measured), (other, again) = found
    assert largest_difference(one, other) < 2e-5
    keys = [key for key in measured if "expert" in key or "aux" in key]
    of_first_layer = {key.replace("layer/0", "layer/<layer>") for key in keys if "layer/1" not in key}
    assert of_first_layer == keys_under(EXPERTS_TABLE)
    assert {key: again[key] for key in keys} == pytest.approx({key: measured[key] for key in keys}, rel=1e-4)


def test_the_checkpoints_own_coefficient_is_used_if_asked(tmp_path: Path):
    trainer = make_trainer(moe_run(tmp_path, router_aux_loss="checkpoint"))
    assert trainer._aux_loss_coefficient == trainer.engine.model.causal_lm.config.router_aux_loss_coef == 0.001


def test_the_loss_evens_the_experts_out_with_the_checkpoints_own_coefficient_if_asked(tmp_path: Path):
    trainer = make_trainer(moe_run(tmp_path, router_aux_loss="checkpoint"))
    assert trainer._aux_loss_coefficient == trainer.engine.model.causal_lm.config.router_aux_loss_coef == 0.001
    learner = {"optimizer": msgspec.convert({"learning_rate": 3e-3}, type(make_run("x").learner.optimizer))}
    trainer = make_trainer(moe_run(tmp_path, learner=learner, router_aux_loss=10.0))
    first, *_, last = (trainer.step(make_groups(), learner_version=0, step=step) for step in range(1, 13))
    assert last["learner/expert_entropy"] > first["learner/expert_entropy"] + 0.02


def logprobs(policy: Policy, groups: list[list[Trajectory]], layout: Layout, *, is_replayed: bool) -> torch.Tensor:
    members = members_of(groups)
    samples = make_samples(members)
    if is_replayed:
        pairs = zip(samples, members, strict=True)
        samples = [dataclasses.replace(sample, experts=member.arrays[EXPERTS]) for sample, member in pairs]
    return builders.measure(policy, samples, layout)


@pytest.mark.parametrize("name", MIXTURES)
def test_replay_of_the_own_choice_changes_no_bit(name: str):
    policy = make_policy(name)
    groups = route(policy, make_groups())
    for layout in LAYOUTS if name == "qwen3_moe" else LAYOUTS[:1]:
        own, replayed = (logprobs(policy, groups, layout, is_replayed=each) for each in (False, True))
        assert torch.equal(own, replayed), layout
        assert all(map(torch.equal, gradients_of(policy, own), gradients_of(policy, replayed))), layout


def test_experts_of_another_token_are_noticed_and_weights_of_replayed_experts_are_the_routers_own():
    policy = make_policy()
    own = logprobs(policy, make_groups(), LAYOUTS[0], is_replayed=False)
    shifted = logprobs(policy, route(policy, make_groups(), shift=1), LAYOUTS[0], is_replayed=True)
    assert float((own - shifted).abs().mean()) > 0.1
    policy, groups = make_policy(), route(make_policy(seed=1), make_groups())
    plain = gradients_of(policy, logprobs(policy, groups, LAYOUTS[0], is_replayed=True))
    policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed = gradients_of(policy, logprobs(policy, groups, LAYOUTS[0], is_replayed=True))
    assert all(map(torch.equal, plain, recomputed))
    # transformers' gate uses the given experts of another model with this model's weights.
    policy, other = make_policy(), make_policy(seed=1)
    member = route(other, make_groups())[0][0]
    gate, ours = policy.causal_lm.model.layers[0].mlp.gate, torch.randn(len(member.token_ids), 64)
    policy.routers.given = torch.from_numpy(member.arrays[EXPERTS])
    _, scores, experts = gate(ours)
    assert torch.equal(experts, policy.routers.given[:, 0].long())
    chosen = torch.softmax(ours @ gate.weight.T, -1).gather(-1, experts)
    assert torch.allclose(scores, chosen, atol=1e-6)


def test_a_step_replays_in_every_pass_of_the_policy_and_in_none_of_the_reference(tmp_path: Path):
    """With recorded experts, proximal and learner log-probs agree, and the reference routes on its own."""
    algorithm = AlgorithmConfig(proximal="recompute", kl=KlConfig(coef=0.1))
    groups, found = route(make_policy(seed=1), make_groups()), []
    for replay in (False, True):
        trainer = make_trainer(moe_run(tmp_path, algorithm=algorithm, router_replay=replay))
        found.append(trainer.step(groups, learner_version=0, step=1))
    own, replayed = found
    assert replayed["learner/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert abs(own["learner/reference_kl"]) < 1e-6 < 0.01 < abs(replayed["learner/reference_kl"])
    assert replayed["learner/mismatch_mean"] != pytest.approx(own["learner/mismatch_mean"], rel=1e-3)


def test_recorded_experts_are_counted_without_a_pass_of_their_own(tmp_path: Path):
    trainer = make_trainer(moe_run(tmp_path, router_replay=True, router_aux_loss=1.0))
    groups = route(trainer.engine.model, make_groups())
    built = trainer._build(groups, learner_version=0)
    microbatches = trainer.collate(built.updates[0])
    passes = trainer.expert_prices(microbatches)["prices"]
    plain = [dataclasses.replace(microbatch, experts=None) for microbatch in microbatches]
    trainer._run = msgspec.structs.replace(trainer._run, model=moe_run(tmp_path, router_aux_loss=1.0).model)
    assert torch.equal(passes, trainer.expert_prices(plain)["prices"])


def test_an_engine_records_what_the_learner_would_choose(tmp_path: Path):
    from slipstream.buffer.trajectory import Sampling
    from slipstream.generators.engines.hf_engine import HfEngine

    path = make_family(tmp_path, "qwen3_moe")
    policy = builders.load(path)
    prompts = [[6, 10, 4], [3, 5, 12, 7, 8, 2, 20], [9]]
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=9, seed=3)

    async def generate() -> list:
        engine = HfEngine(model_config(path, moe=MoeConfig(router_replay=True)), HfEngineConfig())
        await engine.start()
        answers = [engine.generate(prompt, sampling, request_id=str(i)) for i, prompt in enumerate(prompts)]
        found = await asyncio.gather(*answers)
        await engine.stop()
        return found

    for prompt, answer in zip(prompts, asyncio.run(generate()), strict=True):
        with torch.no_grad():
            policy.causal_lm(input_ids=torch.tensor([prompt + answer.token_ids[:-1]]), use_cache=False)
        assert answer.experts.dtype == np.uint8
        assert np.array_equal(answer.experts, policy.routers.chosen().numpy())
