"""Token advantages: rewards of single tokens, and a critic's values -> one number per token, without gradient.

Tokens are flat, those of a trajectory contiguous and in order, and only those the model wrote: what a tool said lies
between two of them, takes no time and breaks no sum. After the last token of a trajectory every value is 0.
Whitening is done elsewhere, on the whole batch; the targets of the critic are never whitened.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.learner.algorithms import segments


# @@ Token baselines: what to expect from here on, from the other trajectories of the group at the same position.
#
# A position is the k-th token the model wrote: what tools said is not counted, so a slow tool does not push the tokens
# after it out of line. With `turns`, a position is the k-th token of the j-th turn: a long first turn does not either.
def score_norms(logprobs: Float[Tensor, "N"], squared_probs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Squared norm of a token's gradient with respect to its logits, never negative.

    norm_t = 1 - 2 * pi_t + sum_v pi_v^2, `squared_probs` is the sum

    Source: Optimal Token Baseline, arXiv:2602.07078, the logit-gradient proxy.
    """
    return (1 - 2 * logprobs.detach().exp() + squared_probs.detach()).clamp(min=0)


def optimal_token_baseline(
    returns: Float[Tensor, "N"],
    score_norms: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    groups: Int[Tensor, "B"],
    *,
    num_sequences: int,
    epsilon: float,
    weights: Float[Tensor, "N"] | None = None,
    positions: Int[Tensor, "N"] | None = None,
    turns: Int[Tensor, "N"] | None = None,
    lone_learns: bool = True,
) -> Float[Tensor, "N"]:
    """The baseline with least variance, per group and position, over the members that have a token there.

    W_{i,t} = sum_{s<=t} norm_{i,s} * weight_{i,s}^2
    B_t = sum_i (W_{i,t} + epsilon) * G_{i,t} / sum_i (W_{i,t} + epsilon),  A_{i,t} = G_{i,t} - B_t

    `returns` are G, the rewards from each token on; `weights` are importance weights; `turns` count from 0 within each
    trajectory; `positions` say which token of its trajectory, or turn, each is, where some are missing. A token without
    company, in a group of one or where only one member is left, has baseline 0, or, unless `lone_learns`, its own
    return: advantage 0.

    Source: Optimal Token Baseline, arXiv:2602.07078; squared weights as its off-policy form.
    Differs: epsilon is added to each W, not to their sum, so that where no member could have done otherwise (W = 0) B
    is the mean, and equal returns give advantage 0. The form for agents is aligned by turn; the authors' is the
    default, without `turns`.
    """
    energy = _energy(score_norms, weights, sequences, num_sequences=num_sequences) + epsilon
    turns = torch.zeros_like(sequences) if turns is None else turns
    if positions is None:
        positions = _positions(sequences, turns, num_sequences=num_sequences)
    cells = _cells(groups[sequences], turns, positions)
    num_cells = segments.count(cells)
    lowest = segments.minima(returns, cells, num_segments=num_cells)
    weighted = segments.sums(energy * (returns - lowest[cells]), cells, num_segments=num_cells)
    baseline = (lowest + weighted / segments.sums(energy, cells, num_segments=num_cells))[cells]
    alone = segments.sizes(cells, num_segments=num_cells)[cells] == 1
    return torch.where(alone, torch.zeros_like(returns) if lone_learns else returns, baseline)


def _energy(
    norms: Float[Tensor, "N"], weights: Float[Tensor, "N"] | None, sequences: Int[Tensor, "N"], *, num_sequences: int
) -> Float[Tensor, "N"]:
    weighted = norms if weights is None else norms * weights.detach().square()
    return segments.from_rows(segments.to_rows(weighted, sequences, num_sequences=num_sequences).cumsum(1), sequences)


def _positions(sequences: Int[Tensor, "N"], turns: Int[Tensor, "N"], *, num_sequences: int) -> Int[Tensor, "N"]:
    """Of each token among those of its turn."""
    num_turns = segments.count(turns)
    return segments.indices_in_rows(sequences * num_turns + turns, num_sequences=num_sequences * num_turns)


def _cells(groups: Int[Tensor, "N"], turns: Int[Tensor, "N"], positions: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Tokens at the same position of trajectories of the same group share a cell; cells are counted without gaps."""
    cells = (groups * segments.count(turns) + turns) * segments.count(positions) + positions
    return torch.unique(cells, return_inverse=True)[1]


def gae(
    token_rewards: Float[Tensor, "N"],
    values: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    num_sequences: int,
    gamma: float,
    lam: float | Float[Tensor, "B"],
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """Generalised advantages, and the returns a critic is to predict; `lam` may differ between trajectories.

    delta_t = r_t + gamma * V_{t+1} - V_t,  A_t = delta_t + gamma * lam * A_{t+1},  return_t = A_t + V_t

    Source: GAE, arXiv:1506.02438, eq. 16; two calls with two lam are the decoupled GAE of VAPO, arXiv:2504.05118.
    """
    rewards = segments.to_rows(token_rewards, sequences, num_sequences=num_sequences)
    expected = segments.to_rows(values.detach(), sequences, num_sequences=num_sequences)
    errors = rewards + gamma * _following(expected) - expected
    decay = gamma * torch.as_tensor(lam, dtype=errors.dtype, device=errors.device).reshape(-1, 1)
    advantages = segments.from_rows(_sums_to_go(errors, decay.expand_as(errors)), sequences)
    return advantages, advantages + values.detach()


def length_adaptive_lambda(lengths: Int[Tensor, "B"], *, alpha: float) -> Float[Tensor, "B"]:
    """GAE's lam for the policy, such that the weights lam^k of the errors add up to alpha times the length in tokens.

    lam = 1 - 1 / (alpha * length), no less than 0

    Source: VAPO, arXiv:2504.05118, section 4.2.
    """
    return (1 - 1 / (alpha * lengths)).clamp(0, 1)


def vtrace(
    token_rewards: Float[Tensor, "N"],
    values: Float[Tensor, "N"],
    log_ratio: Float[Tensor, "N"],
    sequences: Int[Tensor, "N"],
    *,
    num_sequences: int,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """Advantages and value targets corrected for tokens another policy sampled; `log_ratio` is that to its own.

    rho_t = min(rho_bar, ratio_t),  c_t = lam * min(c_bar, ratio_t),  delta_t = rho_t * (r_t + gamma * V_{t+1} - V_t)
    v_t = V_t + delta_t + gamma * c_t * (v_{t+1} - V_{t+1}),  A_t = rho_t * (r_t + gamma * v_{t+1} - V_t)

    rho_bar decides which policy is evaluated, c_bar only how fast. A has the importance weight in it: a policy loss
    that weights tokens by the same ratio once more would count it twice.

    Source: IMPALA, arXiv:1802.01561, eq. 1 and section 4.2; lam is that of its remark 2.

    Raises:
        ValueError: rho_bar < c_bar.
    """
    if rho_bar < c_bar:
        raise ValueError(f"rho_bar must be >= c_bar ({c_bar}), got {rho_bar}: the targets would not contract")
    columns = (token_rewards, values.detach(), log_ratio.detach().exp())
    rewards, expected, ratio = (segments.to_rows(column, sequences, num_sequences=num_sequences) for column in columns)
    rho, trace = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    errors = rho * (rewards + gamma * _following(expected) - expected)
    targets = expected + _sums_to_go(errors, gamma * trace)
    advantages = rho * (rewards + gamma * _following(targets) - expected)
    return segments.from_rows(advantages, sequences), segments.from_rows(targets, sequences)


def _following(rows: Float[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """What stands one to the right, 0 after the last."""
    following = torch.zeros_like(rows)
    following[:, :-1] = rows[:, 1:]
    return following


def _sums_to_go(rows: Float[Tensor, "B L"], decay: Float[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """s_t = x_t + decay_t * s_{t+1} from the right, so that the zeros after a short row stay zeros."""
    sums, running = torch.empty_like(rows), rows.new_zeros(len(rows))
    for index in range(rows.shape[1] - 1, -1, -1):
        running = rows[:, index] + decay[:, index] * running
        sums[:, index] = running
    return sums
