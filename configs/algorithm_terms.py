"""Advantages, policy losses, and token masks: one settings record per function."""

from typing import Annotated, Any, ClassVar, Literal

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


# msgspec decodes unions, not base classes. From here on, the name means any of its records.
AdvantageConfig = union_of(AdvantageConfig)


Below1 = Annotated[float, Meta(gt=0, lt=1)]


class PolicyLossConfig(Formula):
    """Function of `LossInputs` that returns one loss per token."""

    module: ClassVar[str] = "policy_losses"

    has_ratio: ClassVar[bool] = True
    """Whether the loss depends on the proximal policy."""
    selector: ClassVar[str] = ""
    """Function of `MaskInputs` that computes `LossInputs.is_selected` over a whole update; empty = none."""

    @property
    def needs_equal_advantages(self) -> bool:
        """Whether the tokens of a sequence share a ratio, and need equal advantages."""
        return False

    @property
    def counts_length(self) -> bool:
        """Whether tokens carry the loss of their sequence: a mean over tokens would count lengths twice."""
        return False


class PpoClipConfig(PolicyLossConfig, tag="ppo_clip"):
    """Clipped surrogate around the proximal policy."""

    clip_low: Below1 = 0.2
    """Distance of the lower clip bound below ratio 1."""
    clip_high: Positive = 0.2
    """Upper clip distance; larger than `clip_low` is DAPO's clip-higher."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Largest ratio applied to negative advantages, typically 3; null = unbounded."""


class ReinforceConfig(PolicyLossConfig, tag="reinforce"):
    """Score-function gradient without a ratio; also the loss of GPG."""

    has_ratio: ClassVar[bool] = False


class UnclippedConfig(PolicyLossConfig, tag="unclipped"):
    """Ratio times advantage; needs another trust region, such as the `m2po` mask."""


class CispoConfig(PolicyLossConfig, tag="cispo"):
    """Score function weighted by a clipped ratio."""

    clip_low: Share | None = None
    """Lower clip distance; null = none, as in MiniMax-M1."""
    clip_high: Positive = 5.0
    """Distance of the upper clip bound above ratio 1."""


class SapoConfig(PolicyLossConfig, tag="sapo"):
    """Soft gate instead of a clip."""

    tau_positive: Positive = 1.0
    """Sharpness of the gate for positive advantages."""
    tau_negative: Positive = 1.05
    """Sharpness of the gate for negative advantages."""


class DroConfig(PolicyLossConfig, tag="dro"):
    """Score function with a quadratic pull toward the proximal policy."""

    beta: Positive = 0.1
    """Strength of the quadratic pull."""


class AspoConfig(PolicyLossConfig, tag="aspo"):
    """PPO-clip with the ratio inverted for positive advantages."""

    clip_low: Below1 = 0.2
    """Distance of the lower clip bound below ratio 1."""
    clip_high: Positive = 0.2
    """Distance of the upper clip bound above ratio 1."""


class DppoConfig(PolicyLossConfig, tag="dppo"):
    """Trust region on the change of a token's probability instead of its ratio."""

    divergence: Literal["tv", "kl"] = "tv"
    """Binary divergence between the two policies: `tv` = total variation, `kl` = KL."""
    clip_low: Positive = 0.2
    """Bound of the divergence for negative advantages."""
    clip_high: Positive = 0.2
    """Bound of the divergence for positive advantages."""


class ToprConfig(PolicyLossConfig, tag="topr"):
    """Positive advantages count fully; negative ones fade as the answer becomes unlikely."""


class GspoConfig(PolicyLossConfig, tag="gspo"):
    """PPO-clip on the geometric mean of the ratios of a sequence."""

    clip_low: Below1 = 3e-4
    """Lower clip distance. The default fits the drift of one version; larger lag needs more."""
    clip_high: Positive = 4e-4
    """Distance of the upper clip bound above ratio 1."""
    form: Literal["sequence", "token", "length_scaled"] = "sequence"
    """`sequence`: as in the paper. `token`: each token has its own gradient (GSPO-token). `length_scaled`: multiplied
    by the length (LUSPO)."""

    @property
    def needs_equal_advantages(self) -> bool:
        return self.form != "token"

    @property
    def counts_length(self) -> bool:
        return self.form == "length_scaled"


class GmpoConfig(PolicyLossConfig, tag="gmpo"):
    """Geometric mean of individually clipped ratios."""

    clip_low: Positive = 0.4
    """Lower clip distance of a token's log-ratio, nats."""
    clip_high: Positive = 0.4
    """Upper clip distance of a token's log-ratio, nats."""

    @property
    def needs_equal_advantages(self) -> bool:
        return True


class VespoConfig(PolicyLossConfig, tag="vespo"):
    """Score function softly weighted by the ratio of the whole sequence."""


class ClipCovConfig(PolicyLossConfig, tag="clip_cov"):
    """PPO-clip that drops a few random tokens of high covariance."""

    selector: ClassVar[str] = "policy_losses.clip_cov_mask"

    clip_low: Below1 = 0.2
    """Distance of the lower clip bound below ratio 1."""
    clip_high: Positive = 0.2
    """Distance of the upper clip bound above ratio 1."""
    fraction: Share = 2e-4
    """Fraction of all tokens to drop, at least one token; 0 = none."""
    covariance_low: float = 1.0
    """Smallest covariance of a token that can be dropped."""
    covariance_high: float = 5.0
    """Largest covariance of a token that can be dropped."""


class KlCovConfig(PolicyLossConfig, tag="kl_cov"):
    """Ratio times advantage, with a penalty on the tokens of highest covariance."""

    selector: ClassVar[str] = "policy_losses.kl_cov_mask"

    fraction: Share = 2e-4
    """Fraction of all tokens to penalize, at least one token; 0 = none."""
    beta: Positive = 1.0
    """Weight of the KL penalty on the selected tokens."""


class SppoConfig(PolicyLossConfig, tag="sppo"):
    """Squared distance between the log-ratio of a sequence and its win rate; for `advantage=win_rate`."""

    eta: Positive = 1000.0
    """Scale from win rate to log-ratio."""

    @property
    def needs_equal_advantages(self) -> bool:
        return True

    @property
    def counts_length(self) -> bool:
        return True


class CustomPolicyLossConfig(PolicyLossConfig, tag="custom"):
    """User-defined function with the signature in docs/algorithms.md."""

    module: ClassVar[str] = ""

    function: str
    """Import path, `package.module:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""


class MaskConfig(Formula):
    """Function of `MaskInputs` that selects the tokens of the policy loss."""

    module: ClassVar[str] = "policy_losses"

    is_local: ClassVar[bool] = False
    """Whether a mask depends only on its sequence. Others need a forward pass over the update first."""


class OpsmConfig(MaskConfig, tag="opsm"):
    """Drops sequences with negative advantage that have become unlikely under the learner."""

    is_local: ClassVar[bool] = True

    delta: Positive = 0.5
    """Mean log(generator/learner) above which a sequence is dropped, nats."""


class M2poConfig(MaskConfig, tag="m2po"):
    """Drops tokens until the mean squared log(learner/generator) is small."""

    threshold: Positive = 0.04
    """Largest mean of the squared log-ratios of the remaining tokens."""


# msgspec decodes unions, not base classes. From here on, each name means any of its records.
PolicyLossConfig = union_of(PolicyLossConfig)
MaskConfig = union_of(MaskConfig)
