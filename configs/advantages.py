"""Advantage functions: one settings record per function."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from slipstream.configs.base import Formula, Positive, Share, union_of


class AdvantageConfig(Formula):
    """Function of `AdvantageInputs` that returns one advantage per trajectory, 0 in a group of one by default."""

    module: ClassVar[str] = "advantages"

    has_own_baseline: ClassVar[bool] = False
    """Whether the baseline is from outside the group, so that a group of one has an advantage."""
    compares_groups: ClassVar[bool] = False
    """Whether groups are compared, so that equal rewards in one still give advantages."""
    is_per_token: ClassVar[bool] = False
    """Whether it returns one advantage per token."""
    needs_critic: ClassVar[bool] = False
    """Whether it takes critic values; it then returns (advantages, critic targets)."""
    needs_process_rewards: ClassVar[bool] = False
    """Whether it takes token rewards of a process reward model."""
    needs_start_logprobs: ClassVar[bool] = False
    """Whether it takes the learner's log-probabilities from the start of the step."""
    needs_collisions: ClassVar[bool] = False
    """Whether it takes the probability that two draws of a token are equal."""
    needs_observations: ClassVar[bool] = False
    """Whether it compares turns that answer the same tokens."""
    unshaped: ClassVar[str] = ""
    """Quantity compared instead of shaped rewards; empty = none."""


class GrpoConfig(AdvantageConfig, tag="grpo"):
    """Rewards normalized within their group."""


class DrGrpoConfig(AdvantageConfig, tag="dr_grpo"):
    """Rewards minus the group mean."""


class RlooConfig(AdvantageConfig, tag="rloo"):
    """Rewards minus the mean of the other members."""


class LitePpoConfig(AdvantageConfig, tag="lite_ppo"):
    """Rewards minus the group mean, divided by the standard deviation of the batch."""


class OpoConfig(AdvantageConfig, tag="opo"):
    """Rewards minus the length-weighted group mean."""


class GpgConfig(AdvantageConfig, tag="gpg"):
    """Rewards minus the group mean, scaled up for groups without a signal."""


class MaxRlConfig(AdvantageConfig, tag="maxrl"):
    """Rewards relative to the group mean."""


class RemaxConfig(AdvantageConfig, tag="remax"):
    """Rewards minus that of a greedy answer, generated in addition for each training prompt."""

    has_own_baseline: ClassVar[bool] = True
    unshaped: ClassVar[str] = "rewards with that of a greedy answer, unshaped"


class ReinforcePlusPlusConfig(AdvantageConfig, tag="reinforce_plus_plus"):
    """Discounted future rewards, whitened over all tokens."""

    module: ClassVar[str] = "token_advantages"
    has_own_baseline: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount of future rewards, per token."""


class ReinforcePlusPlusBaselineConfig(AdvantageConfig, tag="reinforce_plus_plus_baseline"):
    """Rewards minus the group mean, whitened over all tokens."""

    compares_groups: ClassVar[bool] = True


class PassAtKBestConfig(AdvantageConfig, tag="grpo_passk"):
    """Lead of the best member of a group over the second best; 0 for all other members."""

    normalize: bool = False
    """Divide the lead by the standard deviation of the group."""


class PassAtKConfig(AdvantageConfig, tag="pass_at_k"):
    """Expected advantage of the best of k answers, computed from correct answers."""

    unshaped: ClassVar[str] = "right answers with wrong ones"

    k: Annotated[int, Meta(ge=1)] = 4
    """Number of answers of which one must be correct."""


class GdpoConfig(AdvantageConfig, tag="gdpo"):
    """Each reward part normalized within its group, then summed and scaled over trajectories."""

    unshaped: ClassVar[str] = "the parts of rewards, unshaped"

    weights: dict[str, float] = {}
    """Part -> weight; empty = all parts with weight 1."""


class MovingBaselineConfig(AdvantageConfig, tag="moving_baseline"):
    """Rewards minus a moving average of earlier rewards; for groups of one."""

    has_own_baseline: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True


class OptimalTokenBaselineConfig(AdvantageConfig, tag="optimal_token_baseline"):
    """Rewards minus the minimum-variance baseline of each token."""

    module: ClassVar[str] = "token_advantages"
    is_per_token: ClassVar[bool] = True
    needs_start_logprobs: ClassVar[bool] = True
    needs_collisions: ClassVar[bool] = True

    per_turn: bool = False
    """Align members of tool agents by turn and position in it, instead of position in the answer."""


class TurnReturnsConfig(AdvantageConfig, tag="turn_returns"):
    """Future rewards of each turn, normalized over turns of the group."""

    module: ClassVar[str] = "token_advantages"
    compares_groups: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount of future rewards, per turn."""
    normalize: bool = True
    """Divide by the standard deviation, after the mean is subtracted."""


class GigpoConfig(AdvantageConfig, tag="gigpo"):
    """Rewards normalized within their group, plus future rewards of each turn normalized over turns of the group that
    answer the same observation."""

    module: ClassVar[str] = "token_advantages"
    compares_groups: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True
    needs_observations: ClassVar[bool] = True

    gamma: Share = 0.95
    """Discount of future rewards, per turn."""
    step_weight: Annotated[float, Meta(ge=0)] = 1.0
    """Weight of the second term, the paper's omega."""
    normalize: bool = True
    """Divide by the standard deviations, after the means are subtracted; false = the paper's F_norm = 1."""


class WinRateConfig(AdvantageConfig, tag="win_rate"):
    """Fraction of the other group members that a trajectory beats, minus one half; for `policy_loss=sppo`."""


class GaeConfig(AdvantageConfig, tag="gae"):
    """Generalized advantage estimation with a critic."""

    module: ClassVar[str] = "token_advantages"
    has_own_baseline: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount of future rewards, per token."""
    lam: Share = 1.0
    """Lambda of the policy advantages."""
    critic_lam: Share = 1.0
    """Lambda of the critic targets."""
    length_adaptive_alpha: Positive | None = None
    """Alpha of VAPO: the lambda of the policy is 1 - 1 / (alpha x length); null = `lam`."""


class VtraceConfig(AdvantageConfig, tag="vtrace"):
    """V-trace: critic advantages corrected for tokens sampled by another policy."""

    module: ClassVar[str] = "token_advantages"
    has_own_baseline: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = True
    needs_start_logprobs: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount of future rewards, per token."""
    lam: Share = 1.0
    """Decay of the trace, per token."""


class PrimeConfig(AdvantageConfig, tag="prime"):
    """Rewards minus the mean of the other members, plus future rewards of a process reward model minus theirs."""

    module: ClassVar[str] = "token_advantages"
    is_per_token: ClassVar[bool] = True
    needs_process_rewards: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount of future process rewards, per token."""


class CustomAdvantageConfig(AdvantageConfig, tag="custom"):
    """User-defined function with the signature in docs/algorithms.md."""

    module: ClassVar[str] = ""
    has_own_baseline: ClassVar[bool] = True

    function: str
    """Import path, `package.module:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""


# msgspec decodes unions, not base classes. From here on, the name means any record above.
AdvantageConfig = union_of(AdvantageConfig)
