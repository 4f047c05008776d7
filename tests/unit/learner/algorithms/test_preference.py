import torch
from beartype import beartype
from jaxtyping import jaxtyped

from slipstream.learner.algorithms import sequence_losses

sppo = jaxtyped(sequence_losses.sppo, typechecker=beartype)

NONE = torch.zeros(0, dtype=torch.int64)


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sppo_by_hand():
    assert sppo(wide(0, 1, -2), wide(0.5, 1, 0.25), eta=4.0).tolist() == [0, 1, 1]


def test_at_the_policy_that_wrote_it_the_gradient_is_that_of_reinforce_with_the_win_rate():
    log_ratio, win_rates = torch.zeros(4, dtype=torch.float64, requires_grad=True), wide(0, 0.5, 0.75, 1)
    (gradient,) = torch.autograd.grad(sppo(log_ratio, win_rates, eta=3.0).sum(), log_ratio)
    assert gradient.tolist() == (-2 * 3.0 * (win_rates - 0.5)).tolist()


def test_the_least_loss_is_the_exponential_of_the_win_rate():
    win_rates = wide(0.1, 0.9)
    log_ratio = (2.0 * (win_rates - 0.5)).requires_grad_()
    loss = sppo(log_ratio, win_rates, eta=2.0)
    assert loss.tolist() == [0, 0]
    assert torch.autograd.grad(loss.sum(), log_ratio)[0].tolist() == [0, 0]


def test_the_hard_form_pulls_chosen_and_rejected_to_either_side():
    beta, log_ratio = 0.1, wide(0.7, -0.3)
    hard = (log_ratio - torch.tensor([0.5, -0.5]) / beta).square()
    assert torch.allclose(sppo(log_ratio, wide(1, 0), eta=1 / beta), hard)


def test_the_gradient_is_that_of_the_formula():
    torch.manual_seed(0)
    log_ratio, win_rates = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.rand(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: sppo(x, win_rates, eta=2.0), log_ratio)


def test_win_rates_do_not_learn():
    log_ratio, win_rates = (torch.ones(2, requires_grad=True) for _ in range(2))
    sppo(log_ratio * 2, win_rates * 3, eta=1.0).sum().backward()
    assert log_ratio.grad is not None
    assert win_rates.grad is None
