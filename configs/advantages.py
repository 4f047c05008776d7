"""How rewards become advantages: one record per estimator of learner/objective/advantage_registry.py.

Where nothing else is said, a group of one has advantage 0: it has no baseline.
"""

from typing import Annotated, Any

from msgspec import Meta

from slipstream.configs.base import Config, ConfigError

Epsilon = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class GrpoConfig(Config, tag="grpo", tag_field="kind"):
    """Group-normalised rewards, `advantages.grpo`."""

    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class DrGrpoConfig(Config, tag="dr_grpo", tag_field="kind"):
    """Rewards minus the group's mean, `advantages.dr_grpo`."""


class RlooConfig(Config, tag="rloo", tag_field="kind"):
    """Rewards minus the mean of the others, `advantages.rloo`."""


class LitePpoConfig(Config, tag="lite_ppo", tag_field="kind"):
    """Group's mean, batch's deviation, `advantages.lite_ppo`."""

    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class OpoConfig(Config, tag="opo", tag_field="kind"):
    """Rewards minus the group's mean weighted by length, `advantages.opo`."""


class GpgConfig(Config, tag="gpg", tag_field="kind"):
    """Rewards minus the group's mean, scaled up for groups without a signal, `advantages.gpg`."""

    normaliser: Annotated[float, Meta(gt=0)] = 1.0
    """F_norm of the paper."""


class MaxRlConfig(Config, tag="maxrl", tag_field="kind"):
    """Rewards relative to the group's mean, `advantages.maxrl`."""

    epsilon: Epsilon = 1e-6
    """Added to the mean."""


class RemaxConfig(Config, tag="remax", tag_field="kind"):
    """Rewards minus that of the greedy answer, `advantages.remax`; a group of one has an advantage."""


class ReinforcePlusPlusConfig(Config, tag="reinforce_plus_plus", tag_field="kind"):
    """Rewards to come, whitened over all tokens, `reward_shaping.returns_to_go`; a group of one has an advantage."""

    gamma: Share = 1.0
    """Discount per token."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class ReinforcePlusPlusBaselineConfig(Config, tag="reinforce_plus_plus_baseline", tag_field="kind"):
    """Rewards minus the group's mean, whitened over all tokens, `advantages.reinforce_plus_plus_baseline`."""

    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class PassAtKBestConfig(Config, tag="grpo_passk", tag_field="kind"):
    """Only the best of a group learns, by how far it is ahead of the second, `pass_at_k.pass_at_k_best`."""

    epsilon: Epsilon | None = None
    """With it divided by the group's standard deviation + epsilon."""


class PassAtKConfig(Config, tag="pass_at_k", tag_field="kind"):
    """Expected advantage of the best of k, from entirely right answers, `pass_at_k.pass_at_k_analytic`."""

    k: Annotated[int, Meta(ge=1)] = 4
    """Answers of which one must be right."""


class GdpoConfig(Config, tag="gdpo", tag_field="kind"):
    """Each part of the reward group-normalised, then added and whitened over trajectories, `advantages.gdpo`."""

    weights: dict[str, float] = {}
    """Part -> weight; empty = all parts, weight 1."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviations."""


class MovingBaselineConfig(Config, tag="moving_baseline", tag_field="kind"):
    """Rewards minus a moving average of all rewards before, `advantages.above_baseline`; for groups of one."""

    decay: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    """Share of the old average that stays after a step."""


class OptimalTokenBaselineConfig(Config, tag="optimal_token_baseline", tag_field="kind"):
    """Rewards minus the baseline of least variance at each token, `token_baselines.optimal_token_baseline`."""

    per_turn: bool = False
    """Align members by turn and place in it, not by place in the whole answer: for tool agents."""
    epsilon: Epsilon = 1e-8
    """Added to the baseline's denominator."""


class WinRateConfig(Config, tag="win_rate", tag_field="kind"):
    """Share of the others in its group that a trajectory beats, minus a half, `advantages.win_rate`; for SPPO."""


class GaeConfig(Config, tag="gae", tag_field="kind"):
    """Generalised advantages of a critic, `token_advantages.gae`."""

    gamma: Share = 1.0
    """Discount per token."""
    lam: Share = 1.0
    """Of the policy's advantages."""
    critic_lam: Share = 1.0
    """Of the returns that the critic learns."""
    length_adaptive: Annotated[float, Meta(gt=0)] | None = None
    """VAPO's alpha: the policy's lam is 1 - 1 / (alpha x length) then."""
    epsilon: Epsilon | None = 1e-6
    """Added to the standard deviation when advantages are whitened over all tokens; None = they are not."""


class VtraceConfig(Config, tag="vtrace", tag_field="kind"):
    """Advantages of a critic, corrected for what another policy sampled, `token_advantages.vtrace`."""

    gamma: Share = 1.0
    """Discount per token."""
    lam: Share = 1.0
    """Trace decay."""
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


class CustomAdvantageConfig(Config, tag="custom", tag_field="kind"):
    """A function of your own: docs/algorithms.md says what it gets and must give."""

    function: str
    """`package.module:function`."""
    arguments: dict[str, Any] = {}
    """Passed by keyword."""


AdvantageConfig = (
    GrpoConfig
    | DrGrpoConfig
    | RlooConfig
    | LitePpoConfig
    | OpoConfig
    | GpgConfig
    | MaxRlConfig
    | RemaxConfig
    | ReinforcePlusPlusConfig
    | ReinforcePlusPlusBaselineConfig
    | PassAtKBestConfig
    | PassAtKConfig
    | GdpoConfig
    | MovingBaselineConfig
    | OptimalTokenBaselineConfig
    | WinRateConfig
    | GaeConfig
    | VtraceConfig
    | CustomAdvantageConfig
)
WITH_OWN_BASELINE = (
    RemaxConfig,
    ReinforcePlusPlusConfig,
    MovingBaselineConfig,
    GaeConfig,
    VtraceConfig,
    CustomAdvantageConfig,
)
"""Estimators whose baseline does not come from the group: a group of one learns."""
WITH_CRITIC = (GaeConfig, VtraceConfig)
"""Estimators that need values."""
OUTSIDE_GROUP = (ReinforcePlusPlusConfig, ReinforcePlusPlusBaselineConfig, MovingBaselineConfig, *WITH_CRITIC)
"""Estimators that compare with more than the group: one of equal rewards learns."""
