"""Rewards -> advantages: one record per advantage function."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from slipstream.configs.base import ConfigError, Formula, union_of

Epsilon = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class AdvantageConfig(Formula):
    """Function of `AdvantageInputs`: one advantage per trajectory; a group of one has 0 unless a trait differs."""

    module: ClassVar[str] = "advantages"

    has_own_baseline: ClassVar[bool] = False
    """Whether the baseline lies outside the group, so that a group of one has an advantage."""
    compares_groups: ClassVar[bool] = False
    """Whether trajectories are compared beyond their group, so that a group of equal rewards has advantages."""
    is_per_token: ClassVar[bool] = False
    """Whether the function returns one advantage per token."""
    needs_critic: ClassVar[bool] = False
    """Whether it takes a critic's values; it then returns (advantages, targets of the critic)."""
    needs_start_logprobs: ClassVar[bool] = False
    """Whether it takes the learner's log-probabilities at the start of the step."""
    needs_collisions: ClassVar[bool] = False
    """Whether it takes the chance that two draws of a token are equal."""
    unshaped: ClassVar[str] = ""
    """Quantity compared instead of the shaped reward, on which shaping has therefore no effect; empty = none."""


class GrpoConfig(AdvantageConfig, tag="grpo"):
    """Rewards normalised within their group."""

    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class DrGrpoConfig(AdvantageConfig, tag="dr_grpo"):
    """Rewards minus the group's mean."""


class RlooConfig(AdvantageConfig, tag="rloo"):
    """Rewards minus the mean of the other members."""


class LitePpoConfig(AdvantageConfig, tag="lite_ppo"):
    """Rewards minus the group's mean, divided by the batch's deviation."""

    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class OpoConfig(AdvantageConfig, tag="opo"):
    """Rewards minus the group's mean weighted by length."""


class GpgConfig(AdvantageConfig, tag="gpg"):
    """Rewards minus the group's mean, scaled up for groups without a signal."""

    normaliser: Annotated[float, Meta(gt=0)] = 1.0
    """Factor F_norm of the paper."""


class MaxRlConfig(AdvantageConfig, tag="maxrl"):
    """Rewards relative to the group's mean."""

    epsilon: Epsilon = 1e-6
    """Added to the group's mean."""


class RemaxConfig(AdvantageConfig, tag="remax"):
    """Rewards minus that of the greedy answer, which `generators.baseline=greedy` asks for."""

    has_own_baseline: ClassVar[bool] = True
    unshaped: ClassVar[str] = "rewards with that of a greedy answer, unshaped"


class ReinforcePlusPlusConfig(AdvantageConfig, tag="reinforce_plus_plus"):
    """Discounted rewards to come, whitened over all tokens."""

    module: ClassVar[str] = "token_advantages"
    has_own_baseline: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount of later rewards, per token."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class ReinforcePlusPlusBaselineConfig(AdvantageConfig, tag="reinforce_plus_plus_baseline"):
    """Rewards minus the group's mean, whitened over all tokens."""

    compares_groups: ClassVar[bool] = True

    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class PassAtKBestConfig(AdvantageConfig, tag="grpo_passk"):
    """Lead of the group's best member over the second; 0 for the others."""

    epsilon: Epsilon | None = None
    """Divides the lead by the group's standard deviation + epsilon; null = the lead itself."""


class PassAtKConfig(AdvantageConfig, tag="pass_at_k"):
    """Expected advantage of the best of k, from entirely right answers."""

    unshaped: ClassVar[str] = "right answers with wrong ones"

    k: Annotated[int, Meta(ge=1)] = 4
    """Answers of which one must be right."""


class GdpoConfig(AdvantageConfig, tag="gdpo"):
    """Each part of the reward normalised within its group, then summed and scaled over trajectories."""

    unshaped: ClassVar[str] = "the parts of rewards, unshaped"

    weights: dict[str, float] = {}
    """Part -> weight; empty = all parts, weight 1."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviations."""


class MovingBaselineConfig(AdvantageConfig, tag="moving_baseline"):
    """Rewards minus a moving average of earlier rewards; for groups of one."""

    has_own_baseline: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True

    decay: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    """Share of the old average that stays after a step."""


class OptimalTokenBaselineConfig(AdvantageConfig, tag="optimal_token_baseline"):
    """Rewards minus the baseline of least variance at each token."""

    module: ClassVar[str] = "token_advantages"
    is_per_token: ClassVar[bool] = True
    needs_start_logprobs: ClassVar[bool] = True
    needs_collisions: ClassVar[bool] = True

    per_turn: bool = False
    """Align members by turn and position in it, not by position in the whole answer: for tool agents."""
    epsilon: Epsilon = 1e-8
    """Added to the baseline's denominator."""


class WinRateConfig(AdvantageConfig, tag="win_rate"):
    """Share of the other members that a trajectory beats, minus one half; for `policy_loss=sppo`."""


class GaeConfig(AdvantageConfig, tag="gae"):
    """Generalised advantages of a critic."""

    module: ClassVar[str] = "token_advantages"
    has_own_baseline: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount of later rewards, per token."""
    lam: Share = 1.0
    """Lambda of the policy's advantages."""
    critic_lam: Share = 1.0
    """Lambda of the critic's targets."""
    length_adaptive: Annotated[float, Meta(gt=0)] | None = None
    """VAPO's alpha: the policy's lambda becomes 1 - 1 / (alpha x length); null = `lam`."""
    epsilon: Epsilon | None = 1e-6
    """Added to the standard deviation when advantages are whitened over all tokens; null = not whitened."""


class VtraceConfig(AdvantageConfig, tag="vtrace"):
    """Advantages of a critic, corrected for tokens that another policy sampled."""

    module: ClassVar[str] = "token_advantages"
    has_own_baseline: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = True
    needs_start_logprobs: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount of later rewards, per token."""
    lam: Share = 1.0
    """Decay of the trace, per token."""
    rho_bar: Annotated[float, Meta(gt=0)] = 1.0
    """Bound of the ratios that decide the fixed point."""
    c_bar: Annotated[float, Meta(gt=0)] = 1.0
    """Bound of the ratios that decide the speed; at most `rho_bar`."""

    def __post_init__(self) -> None:
        if self.c_bar > self.rho_bar:
            raise ConfigError(
                f"algorithm.advantage.c_bar must be <= rho_bar ({self.rho_bar:g}), got {self.c_bar:g}: the traces "
                "would be longer than the errors they carry are corrected."
            )


class CustomAdvantageConfig(AdvantageConfig, tag="custom"):
    """A function of the user's own, called like the built-in ones: docs/algorithms.md."""

    module: ClassVar[str] = ""
    has_own_baseline: ClassVar[bool] = True

    function: str
    """Import path, `package.module:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""


# msgspec decodes a union, not a base class: from here on the name stands for any of the records above.
AdvantageConfig = union_of(AdvantageConfig)
