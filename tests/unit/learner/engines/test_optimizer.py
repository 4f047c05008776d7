import pytest
import torch

from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.engines.optimizer import learning_rate, make_optimizer


def rates(*, updates_per_step: int = 1, **settings) -> list[float]:
    """Rates of a run of eight updates, and of two more."""
    config = OptimizerConfig(learning_rate=1.0, **settings)
    steps = {"num_steps": 8 // updates_per_step, "updates_per_step": updates_per_step}
    return [learning_rate(update, config=config, **steps) for update in range(10)]


def test_a_constant_rate_warms_up_over_steps_of_several_updates_and_stays():
    assert rates()[0] == 1.0
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, *[1.0] * 6]
    for schedule in ("constant", "linear"):
        assert rates(warmup_steps=2, updates_per_step=2, schedule=schedule) == rates(warmup_steps=4, schedule=schedule)


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


def test_linear_and_cosine_fall_to_zero_at_the_end_and_stay_there():
    assert rates(schedule="linear", warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0, 0])
    values = rates(schedule="cosine")
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.5)
    assert values[8:] == pytest.approx([0, 0])
    assert values == sorted(values, reverse=True)
