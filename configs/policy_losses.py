"""Policy losses and token masks: one settings record per function."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from slipstream.configs.base import Formula, Positive, Share, union_of

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


# msgspec decodes unions, not base classes. From here on, the names mean any record above.
PolicyLossConfig = union_of(PolicyLossConfig)
MaskConfig = union_of(MaskConfig)
