"""Token baselines: what to expect from here on, from the other trajectories of the group at the same position.

A position is the k-th token the model wrote: what tools said is not counted, so a slow tool does not push the tokens
after it out of line. With `turns`, a position is the k-th token of the j-th turn: a long first turn does not either.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from learner.algorithms import segments


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
    return segments.places_in_rows(sequences * num_turns + turns, num_sequences=num_sequences * num_turns)


def _cells(groups: Int[Tensor, "N"], turns: Int[Tensor, "N"], positions: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Tokens at the same position of trajectories of the same group share a cell; cells are counted without gaps."""
    cells = (groups * segments.count(turns) + turns) * segments.count(positions) + positions
    return torch.unique(cells, return_inverse=True)[1]
