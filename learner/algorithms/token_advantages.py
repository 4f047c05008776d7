"""Token advantages: token rewards and critic values -> one number per token, without gradient.

Only trained tokens are time steps, not tool output between them. The value after a trajectory's last token is 0. The
critic's targets are never whitened.
"""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from slipstream.learner.algorithms import advantages, importance, segments
from slipstream.learner.algorithms.advantages import EPSILON
from slipstream.learner.algorithms.inputs import AdvantageInputs, known

_ENERGY_EPSILON = 1e-8
"""Makes the baseline the plain mean where all weights are 0; far below other weights."""
_TRACE_BOUND = 1.0
"""Both bounds of IMPALA's experiments: rho_bar = 1 gives targets of a policy between both."""


def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float, epsilon: float = EPSILON) -> Float[Tensor, "N"]:
    """Discounted returns, whitened over all tokens of the batch.

    A_t = (G_t - mean(G)) / (std(G) + epsilon),  G_t = r_t + gamma * G_{t+1}

    Source: REINFORCE++, arXiv:2501.03262.
    """
    return segments.whiten(returns_to_go(inputs, gamma=gamma), epsilon=epsilon)


def returns_to_go(inputs: AdvantageInputs, *, gamma: float) -> Float[Tensor, "N"]:
    """Discounted sum of rewards from each token on.

    G_t = r_t + gamma * G_{t+1}
    """
    rows = segments.to_rows(inputs.token_rewards, inputs.sequences, num_sequences=inputs.num_sequences)
    # Each iteration doubles the rewards per sum.
    shift = 1
    while shift < rows.shape[1]:
        rows[:, :-shift] += gamma**shift * rows[:, shift:]
        shift *= 2
    return segments.from_rows(rows, inputs.sequences)


def optimal_token_baseline(
    inputs: AdvantageInputs, *, per_turn: bool, epsilon: float = _ENERGY_EPSILON
) -> Float[Tensor, "N"]:
    """Returns minus the minimum-variance baseline per group and position, over members that reach the position.

    norm_t = 1 - 2 * pi_t + sum_v pi_v^2, the squared norm of a token's gradient with respect to its logits
    W_{i,t} = sum_{s<=t} norm_{i,s} * w_{i,s}^2, w = importance weights if known, else 1
    B_t = sum_i (W_{i,t} + epsilon) * G_{i,t} / sum_i (W_{i,t} + epsilon),  A_{i,t} = G_{i,t} - B_t

    Positions count model-written tokens of the trajectory, or of the turn with `per_turn`. At positions that no other
    member reaches, advantages are 0.

    Source: Optimal Token Baseline, arXiv:2602.07078, with the logit-gradient proxy and the squared weights of its
    off-policy form.
    Differs: adds epsilon to each W, not to their sum, so that B is the mean if all W are 0. `per_turn` is our addition.
    """
    returns = returns_to_go(inputs, gamma=1.0)
    norms = score_norms(known(inputs.learner_logprobs), known(inputs.collisions))
    if inputs.correction_weights is not None:
        norms = norms * inputs.correction_weights.square()
    rows = segments.to_rows(norms, inputs.sequences, num_sequences=inputs.num_sequences)
    energy = segments.from_rows(rows.cumsum(1), inputs.sequences) + epsilon
    # A group's tokens at one position share a cell.
    turns = inputs.turns if per_turn else torch.zeros_like(inputs.turns)
    positions = inputs.positions_in_turn if per_turn else inputs.positions
    rows_of_group = inputs.groups[inputs.sequences] * segments.count(turns) + turns
    cells = torch.unique(rows_of_group * segments.count(positions) + positions, return_inverse=True)[1]
    num_cells = segments.count(cells)
    # Subtract the lowest return first, so that equal returns give exactly 0.
    lowest = segments.minima(returns, cells, num_segments=num_cells)
    weighted = segments.sums(energy * (returns - lowest[cells]), cells, num_segments=num_cells)
    baseline = (lowest + weighted / segments.sums(energy, cells, num_segments=num_cells))[cells]
    return returns - torch.where(segments.own_sizes(cells) == 1, returns, baseline)


def score_norms(logprobs: Float[Tensor, "N"], collisions: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Squared norm of each token's gradient with respect to its logits."""
    return (1 - 2 * logprobs.exp() + collisions).clamp(min=0)


def gae(
    inputs: AdvantageInputs,
    *,
    gamma: float,
    lam: float,
    critic_lam: float,
    length_adaptive_alpha: float | None,
    epsilon: float | None = EPSILON,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """Generalized advantages with `lam`, whitened unless `epsilon` is None, and returns with `critic_lam`.

    delta_t = r_t + gamma * V_{t+1} - V_t,  A_t = delta_t + gamma * lambda * A_{t+1},  return_t = A_t + V_t

    Source: GAE, arXiv:1506.02438, eq. 16. The two lambdas are VAPO's decoupled GAE, arXiv:2504.05118, and
    `length_adaptive_alpha` is its alpha, section 4.2.
    """
    policy_lam: float | Tensor = lam
    if length_adaptive_alpha is not None:
        policy_lam = length_adaptive_lambda(inputs.num_trained, alpha=length_adaptive_alpha)
    advantages = generalized_advantages(inputs, gamma=gamma, lam=policy_lam)
    returns = generalized_advantages(inputs, gamma=gamma, lam=critic_lam) + known(inputs.values)
    return advantages if epsilon is None else segments.whiten(advantages, epsilon=epsilon), returns


def generalized_advantages(
    inputs: AdvantageInputs, *, gamma: float, lam: float | Float[Tensor, "B"]
) -> Float[Tensor, "N"]:
    """Compute A_t of `gae`."""
    sequences, num_sequences = inputs.sequences, inputs.num_sequences
    rewards = segments.to_rows(inputs.token_rewards, sequences, num_sequences=num_sequences)
    expected = segments.to_rows(known(inputs.values), sequences, num_sequences=num_sequences)
    errors = rewards + gamma * _following(expected) - expected
    decay = gamma * torch.as_tensor(lam, dtype=errors.dtype, device=errors.device).reshape(-1, 1)
    return segments.from_rows(_sums_to_go(errors, decay.expand_as(errors)), sequences)


def length_adaptive_lambda(lengths: Int[Tensor, "B"], *, alpha: float) -> Float[Tensor, "B"]:
    """Lambda with weights lambda^k that add up to alpha times the length.

    lambda = max(0, 1 - 1 / (alpha * length))

    Source: VAPO, arXiv:2504.05118, section 4.2.
    """
    return (1 - 1 / (alpha * lengths)).clamp(0, 1)


def vtrace(
    inputs: AdvantageInputs, *, gamma: float, lam: float, rho_bar: float = _TRACE_BOUND, c_bar: float = _TRACE_BOUND
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """Off-policy advantages and value targets, ratio = pi_learner / pi_generator.

    rho_t = min(rho_bar, ratio_t),  c_t = lam * min(c_bar, ratio_t),  delta_t = rho_t * (r_t + gamma * V_{t+1} - V_t)
    v_t = V_t + delta_t + gamma * c_t * (v_{t+1} - V_{t+1}),  A_t = rho_t * (r_t + gamma * v_{t+1} - V_t)

    rho_bar >= c_bar determines the evaluated policy, c_bar the speed of convergence. A includes the importance weight,
    which the policy loss must not apply again.

    Source: IMPALA, arXiv:1802.01561, eq. 1 and section 4.2; lam as in remark 2.
    """
    log_ratio = importance.token_log_ratio(known(inputs.learner_logprobs), inputs.generator_logprobs)
    to_rows = partial(segments.to_rows, sequences=inputs.sequences, num_sequences=inputs.num_sequences)
    rewards, expected, ratio = map(to_rows, (inputs.token_rewards, known(inputs.values), log_ratio.exp()))
    rho, trace = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    errors = rho * (rewards + gamma * _following(expected) - expected)
    targets = expected + _sums_to_go(errors, gamma * trace)
    advantages = rho * (rewards + gamma * _following(targets) - expected)
    return segments.from_rows(advantages, inputs.sequences), segments.from_rows(targets, inputs.sequences)


def _following(rows: Float[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    following = torch.zeros_like(rows)
    following[:, :-1] = rows[:, 1:]
    return following


def _sums_to_go(rows: Float[Tensor, "B L"], decay: Float[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """s_t = x_t + decay_t * s_{t+1}. Zero padding on the right stays zero."""
    sums, running = torch.empty_like(rows), rows.new_zeros(len(rows))
    for index in range(rows.shape[1] - 1, -1, -1):
        running = rows[:, index] + decay[:, index] * running
        sums[:, index] = running
    return sums


def turn_returns(
    inputs: AdvantageInputs, *, gamma: float, over: str = "index", normalize: bool = True, epsilon: float = EPSILON
) -> Float[Tensor, "N"]:
    """Discounted returns of turns, normalized within the group, per turn index or over all turns. Equal within a turn.

    A_k = (G_k - mean(G)) / (std(G) + epsilon),  G_k = r_k + gamma * G_{k+1},  r_k = the rewards of turn k's tokens

    Turns without a trained token don't count.

    Source: ours; for one turn GRPO, arXiv:2402.03300, section 4.1.2.
    """
    turns, firsts, returns = _turns(inputs, gamma=gamma)
    groups, indices = inputs.groups[inputs.sequences[firsts]], inputs.turns[firsts]
    cells = groups if over == "group" else groups * segments.count(indices) + indices
    normalized = partial(segments.standardized, epsilon=epsilon) if normalize else segments.centered
    return normalized(returns, cells)[turns]


def gigpo(
    inputs: AdvantageInputs, *, gamma: float, step_weight: float, normalize: bool = True, epsilon: float = EPSILON
) -> Float[Tensor, "N"]:
    """Normalized reward of the trajectory plus normalized return of the turn among turns at the same anchor state.

    A_k = A^E + step_weight * A^S_k                                    eq. 8
    A^E = (R - mean_group(R)) / (std_group(R) + epsilon)               eq. 3
    G_k = r_k + gamma * G_{k+1}                                        eq. 5
    A^S_k = (G_k - mean_anchor(G)) / (std_anchor(G) + epsilon)         eq. 7, over the step group of eq. 6

    An anchor state is an observation: the tokens between a turn and the previous one, or the prompt. A group's turns
    with equal observations, also of one trajectory, form a step group. A turn alone in one has A^S = 0.

    Source: GiGPO, arXiv:2505.10978.
    """
    turns, firsts, returns = _turns(inputs, gamma=gamma)
    sequences = inputs.sequences[firsts]
    states = torch.stack([inputs.groups[sequences], known(inputs.observations)[firsts]])
    anchors = torch.unique(states, dim=1, return_inverse=True)[1]
    normalized = partial(segments.standardized, epsilon=epsilon) if normalize else segments.centered
    episodes = normalized(inputs.rewards, inputs.groups)[sequences]
    return (episodes + step_weight * normalized(returns, anchors))[turns]


def _turns(inputs: AdvantageInputs, *, gamma: float) -> tuple[Int[Tensor, "N"], Int[Tensor, "K"], Float[Tensor, "K"]]:
    """Each token's turn, and each turn's first token and discounted return."""
    keys = inputs.sequences * segments.count(inputs.turns) + inputs.turns
    turns = torch.unique_consecutive(keys, return_inverse=True)[1]
    num_turns = segments.count(turns)
    firsts = torch.searchsorted(turns, torch.arange(num_turns, device=turns.device))
    rewards = segments.sums(inputs.token_rewards, turns, num_segments=num_turns)
    rows = segments.to_rows(rewards, inputs.sequences[firsts], num_sequences=inputs.num_sequences)
    return turns, firsts, segments.from_rows(_sums_to_go(rows, torch.full_like(rows, gamma)), inputs.sequences[firsts])


def prime(inputs: AdvantageInputs, *, gamma: float) -> Float[Tensor, "N"]:
    """Leave-one-out advantage of the outcome, plus discounted returns of centered process rewards.

    A_t = R_i - mean_{j != i}(R_j) + sum_{s >= t} gamma^(s - t) * (q_s - mean_{j != i}(Q_j))

    q = process rewards, Q_j = mean of q over the tokens of trajectory j, over the other members of the group. 0 in a
    group of one.

    Source: PRIME, arXiv:2502.01456, eq. 5.
    Differs: verl multiplies q_s by n / (n - 1), which adds (q_s - Q_i) / (n - 1), scales both parts by 5 and process
    rewards by their largest return, and whitens the sum.
    """
    rewards, sequences = known(inputs.process_rewards).to(inputs.rewards.dtype), inputs.sequences
    means = segments.means(rewards, sequences, num_segments=inputs.num_sequences)
    others = means - advantages.rloo(replace(inputs, rewards=means))
    futures = returns_to_go(replace(inputs, token_rewards=rewards - others[sequences]), gamma=gamma)
    return (advantages.rloo(inputs)[sequences] + futures) * (segments.own_sizes(inputs.groups) > 1)[sequences]


def implicit_rewards(
    logprobs: Float[Tensor, "N"], reference_logprobs: Float[Tensor, "N"], *, beta: float
) -> Float[Tensor, "N"]:
    """q_t = beta * log(pi(a_t | s_t) / pi_reference(a_t | s_t)), bounded like `importance.token_log_ratio`.

    Source: PRIME, arXiv:2502.01456, eq. 3.
    """
    return beta * importance.token_log_ratio(logprobs, reference_logprobs)


def outcome_cross_entropy(
    scores: Float[Tensor, "B"], is_correct: Bool[Tensor, "B"], *, weights: Float[Tensor, "B"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "B"]]:
    """Cross-entropy of sigmoid(score) with the outcome, and its gradient with respect to the scores.

    loss = -sum_i w_i * (r_i * log sigmoid(s_i) + (1 - r_i) * log(1 - sigmoid(s_i)))
    slope_i = w_i * (sigmoid(s_i) - r_i)

    Source: PRIME, arXiv:2502.01456, the loss of the implicit process reward model.
    """
    outcomes = is_correct.to(scores.dtype)
    loss = binary_cross_entropy_with_logits(scores, outcomes, weight=weights, reduction="sum")
    return loss, weights * (scores.sigmoid() - outcomes)


def clipped_value_loss(
    values: Float[Tensor, "N"], returns: Float[Tensor, "N"], values_before: Float[Tensor, "N"], *, clip: float | None
) -> tuple[Float[Tensor, "N"], Bool[Tensor, "N"]]:
    """Clipped value loss, and the tokens that the clip leaves without gradient.

    loss = 1/2 * max((V - R)^2, (clip(V, V_before - clip, V_before + clip) - R)^2); without clip 1/2 * (V - R)^2

    V_before: values used for the advantages.

    Source: OpenAI baselines' PPO; without clip, PPO, arXiv:1707.06347, eq. 9.
    """
    targets = returns.detach()
    plain = (values - targets).square()
    if clip is None:
        return plain / 2, torch.zeros_like(values, dtype=torch.bool)
    before = values_before.detach()
    clipped = (values.clamp(before - clip, before + clip) - targets).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain


def explained_variance(values: Float[Tensor, "N"], returns: Float[Tensor, "N"]) -> Float[Tensor, ""]:
    """1 - Var(R - V) / Var(R), 0 for constant returns. A critic that predicts the mean has 0."""
    if not values.numel():
        return values.new_zeros(())
    total, left = _variance(returns), _variance(returns - values.detach())
    return torch.where(total > 0, 1 - left / total, torch.zeros_like(total))


def _variance(values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
    """Population variance, exactly 0 for equal values."""
    return (values - values.min()).var(correction=0)
