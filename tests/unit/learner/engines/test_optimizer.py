import numpy as np
import pytest
import torch

from slipstream.configs import learner
from slipstream.configs.base import ConfigError
from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.engines.optimizer import MuonWithAdamW, learning_rate, make_optimizer
from tests.tiny_model import make_tiny_module


def rates(*, updates_per_step: int = 1, **settings) -> list[float]:
    """Rates of a run of eight updates, and of two more."""
    config = OptimizerConfig(learning_rate=1.0, **settings)
    steps = {"num_steps": 8 // updates_per_step, "updates_per_step": updates_per_step}
    return [learning_rate(update, config=config, **steps) for update in range(10)]


def test_the_rate_warms_up_over_updates_and_stays_or_falls_to_zero_at_the_end():
    assert rates()[0] == 1.0
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, *[1.0] * 6]
    for schedule in ("constant", "linear"):
        assert rates(warmup_steps=2, updates_per_step=2, schedule=schedule) == rates(warmup_steps=4, schedule=schedule)
    assert rates(schedule="linear", warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0, 0])
    values = rates(schedule="cosine")
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.5)
    assert values[8:] == pytest.approx([0, 0])
    assert values == sorted(values, reverse=True)


def test_norms_and_biases_do_not_decay():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    optimizer = make_optimizer(module, OptimizerConfig(learning_rate=0.5, weight_decay=0.1))
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    for each in module.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    for name, each in module.named_parameters():
        factor = 1 - 0.5 * 0.1 if name == "0.weight" else 1.0
        assert each.detach().allclose(factor * before[name], rtol=2 * torch.finfo(each.dtype).eps, atol=0), name


def orthogonalized(matrix: np.ndarray) -> np.ndarray:
    """Newton-Schulz by another way, in float64: the polynomial applied to the singular values."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)])
def test_updates_of_muon_are_those_of_its_formula(shape):
    random, layer = np.random.default_rng(0), torch.nn.Linear(*shape[::-1], bias=False)
    module = torch.nn.Sequential(torch.nn.Embedding(5, shape[1]), layer)
    optimizer = make_optimizer(module, OptimizerConfig(name="muon", learning_rate=0.1, weight_decay=0.5))
    weight, momentum = layer.weight.detach().numpy().astype(np.float64), np.zeros(shape)
    # The second update depends on the momentum's decay and on its look-ahead.
    for gradient in random.normal(size=(2, *shape)):
        layer.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = 0.2 * np.sqrt(max(shape)) * orthogonalized(0.95 * momentum + 0.05 * gradient)
        before, weight = weight, weight - 0.1 * (update + 0.5 * weight)
        # torch iterates in bfloat16: 15 products, each rounded by at most 2^-8 of entries <= 1.2.
        bound = 0.1 * 0.2 * np.sqrt(max(shape)) * 15 * 2**-8 * 1.2
        assert np.abs(layer.weight.detach().numpy() - weight).max() < bound < np.abs(weight - before).max() / 2
        weight = layer.weight.detach().numpy().astype(np.float64)
        np.testing.assert_allclose(optimizer.state[layer.weight]["momentum_buffer"], momentum, rtol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True])
def test_muon_trains_the_matrices_of_hidden_layers_and_adamw_the_others(is_tied):
    module = make_tiny_module(seed=0, is_tied=is_tied)
    optimizer = make_optimizer(module, OptimizerConfig(name="muon", learning_rate=0.5))
    assert isinstance(optimizer, MuonWithAdamW)
    names = {id(each): name for name, each in module.named_parameters()}
    muon = {names[id(each)] for group in optimizer.param_groups if "momentum" in group for each in group["params"]}
    assert muon == {name for name in names.values() if name.endswith("_proj.weight")}
    grouped = [names[id(each)] for group in optimizer.param_groups for each in group["params"]]
    assert sorted(grouped) == sorted(names.values()), "every parameter once"
    assert isinstance(make_optimizer(torch.nn.Linear(2, 2, bias=False), OptimizerConfig(name="muon")), torch.optim.Muon)
    value_head = torch.nn.Linear(4, 1)
    assert isinstance(make_optimizer(value_head, OptimizerConfig(name="muon")), torch.optim.AdamW)


def test_adamw_in_8_bits_moves_as_adamw_with_a_byte_per_moment():
    pytest.importorskip("bitsandbytes")
    module, states, moves = torch.nn.Linear(64, 128), {}, {}
    initial, gradients = module.weight.detach().clone(), torch.randn(5, 128, 64)
    for name in ("adamw", "adamw_8bit"):
        with torch.no_grad():
            module.weight.copy_(initial)
        optimizer = make_optimizer(module, OptimizerConfig(name=name, learning_rate=0.01, betas=(0.5, 0.6)))
        for gradient in gradients:
            module.weight.grad = gradient.clone()
            optimizer.step()
        states[name], moves[name] = optimizer.state[module.weight], module.weight.detach() - initial
    assert states["adamw_8bit"]["state1"].dtype == states["adamw_8bit"]["state2"].dtype == torch.uint8
    # A code of 8 bits is within about 2 % of its moment near a block's largest, and coarser below.
    assert (moves["adamw"] - moves["adamw_8bit"]).norm() < 0.1 * moves["adamw"].norm()


def test_a_missing_library_is_reported_in_one_sentence(monkeypatch):
    monkeypatch.setattr(learner, "find_spec", lambda name: None)
    for name in ("adamw", "muon"):
        OptimizerConfig(name=name).check_installed("learner.optimizer")
    message = r"^learner\.optimizer\.name must be adamw or muon without bitsandbytes, got adamw_8bit: .* pip install"
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(name="adamw_8bit").check_installed("learner.optimizer")
