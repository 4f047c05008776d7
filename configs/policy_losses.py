"""Ratio and advantage -> loss of a token: one record per policy loss and per token mask."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from slipstream.configs.base import Formula, union_of

Positive = Annotated[float, Meta(gt=0)]
Below1 = Annotated[float, Meta(gt=0, lt=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


class PolicyLossConfig(Formula):
    """Function of `LossInputs`: one loss per token."""

    module: ClassVar[str] = "policy_losses"

    has_ratio: ClassVar[bool] = True
    """Whether the loss depends on the policy that the ratio is taken around."""
    selector: ClassVar[str] = ""
    """Function of `MaskInputs` that fills `LossInputs.is_selected` from all tokens of an update; empty = none."""

    @property
    def needs_equal_advantages(self) -> bool:
        """Whether advantages must be equal within a sequence, whose ratio has one gradient for all of its tokens."""
        return False

    @property
    def counts_length(self) -> bool:
        """Whether each token carries its sequence's whole loss: a mean over tokens would count lengths twice."""
        return False


class PpoClipConfig(PolicyLossConfig, tag="ppo_clip"):
    """Clipped surrogate around the proximal policy."""

    clip_low: Below1 = 0.2
    """Distance of the lower clip bound below ratio 1."""
    clip_high: Positive = 0.2
    """Upper clip distance; larger than `clip_low` is DAPO's clip-higher."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Largest ratio that a negative advantage is multiplied by; 3 is usual. null = no bound."""


class ReinforceConfig(PolicyLossConfig, tag="reinforce"):
    """Score-function gradient without a ratio; also GPG's loss."""

    has_ratio: ClassVar[bool] = False


class UnclippedConfig(PolicyLossConfig, tag="unclipped"):
    """Ratio times advantage; needs another trust region, such as the m2po mask."""


class CispoConfig(PolicyLossConfig, tag="cispo"):
    """Score function with a clipped ratio as weight."""

    clip_low: Share | None = None
    """Lower clip distance; null = none, as in MiniMax-M1."""
    clip_high: Positive = 5.0
    """Distance of the upper clip bound above ratio 1."""


class SapoConfig(PolicyLossConfig, tag="sapo"):
    """Soft gate instead of the clip."""

    tau_positive: Positive = 1.0
    """Sharpness where the advantage is positive."""
    tau_negative: Positive = 1.05
    """Sharpness where it is negative."""


class DroConfig(PolicyLossConfig, tag="dro"):
    """Score function with a quadratic pull back to the proximal policy."""

    beta: Positive = 0.1
    """Strength of the quadratic pull to the proximal policy."""


class AspoConfig(PolicyLossConfig, tag="aspo"):
    """PPO-clip with the ratio inverted for positive advantages."""

    clip_low: Below1 = 0.2
    """Distance of the lower clip bound below ratio 1."""
    clip_high: Positive = 0.2
    """Distance of the upper clip bound above ratio 1."""
    cap: Annotated[float, Meta(gt=1)] = 3.0
    """Largest ratio that weighs a token."""


class DppoConfig(PolicyLossConfig, tag="dppo"):
    """Stops where a token's probability, not its ratio, has moved too far."""

    divergence: Literal["tv", "kl"] = "tv"
    """Binary divergence between the two policies: `tv` total variation, `kl` KL."""
    low: Positive = 0.2
    """Bound on the divergence where the advantage is negative."""
    high: Positive = 0.2
    """Bound on the divergence where the advantage is positive."""
    ratio_cap: Positive = 20.0
    """Largest ratio that weighs a token."""


class ToprConfig(PolicyLossConfig, tag="topr"):
    """Positive advantages count fully, negative ones fade as the answer becomes unlikely."""

    level: Literal["sequence", "token"] = "sequence"
    """Ratio that a negative advantage fades with; the paper's is the sequence's."""


class GspoConfig(PolicyLossConfig, tag="gspo"):
    """PPO-clip on the geometric mean of a sequence's ratios."""

    clip_low: Below1 = 3e-4
    """Lower clip distance; the default is for one version's drift, lag needs more."""
    clip_high: Positive = 4e-4
    """Distance of the upper clip bound above ratio 1."""
    form: Literal["sequence", "token", "length_scaled"] = "sequence"
    """`sequence`: the paper's. `token`: each token's gradient through itself (GSPO-token). `length_scaled`: times the
    length (LUSPO)."""

    @property
    def needs_equal_advantages(self) -> bool:
        return self.form != "token"

    @property
    def counts_length(self) -> bool:
        return self.form == "length_scaled"


class GmpoConfig(PolicyLossConfig, tag="gmpo"):
    """Geometric mean of ratios that are clipped one by one."""

    clip_low: Positive = 0.4
    """Lower clip distance of a token's log-ratio, nats."""
    clip_high: Positive = 0.4
    """Upper clip distance of a token's log-ratio, nats."""

    @property
    def needs_equal_advantages(self) -> bool:
        return True


class VespoConfig(PolicyLossConfig, tag="vespo"):
    """Score function with a soft weight of the sequence's whole ratio."""

    power_positive: Positive = 2.0
    """Exponent of the ratio where the advantage is positive."""
    decay_positive: Positive = 3.0
    """Decay of large ratios there."""
    power_negative: Positive = 3.0
    """Exponent where it is negative."""
    decay_negative: Positive = 2.0
    """Decay of large ratios where the advantage is negative."""


class ClipCovConfig(PolicyLossConfig, tag="clip_cov"):
    """PPO-clip without a few random tokens of high covariance."""

    selector: ClassVar[str] = "token_masks.clip_cov_mask"

    clip_low: Below1 = 0.2
    """Distance of the lower clip bound below ratio 1."""
    clip_high: Positive = 0.2
    """Distance of the upper clip bound above ratio 1."""
    share: Share = 2e-4
    """Share of all tokens that is dropped, at least one token; 0 = none."""
    covariance_low: float = 1.0
    """Smallest covariance of a token that may be dropped."""
    covariance_high: float = 5.0
    """Largest covariance of a token that may be dropped."""


class KlCovConfig(PolicyLossConfig, tag="kl_cov"):
    """Ratio times advantage, with a penalty on the tokens of highest covariance."""

    selector: ClassVar[str] = "token_masks.kl_cov_mask"

    share: Share = 2e-4
    """Share of all tokens that is penalised, at least one token; 0 = none."""
    coefficient: Positive = 1.0
    """Weight of the KL penalty on the selected tokens."""


class SppoConfig(PolicyLossConfig, tag="sppo"):
    """Squared distance of a sequence's log-ratio from its win rate; for `advantage=win_rate`."""

    eta: Positive = 1000.0
    """Factor from win rate to log-ratio."""

    @property
    def needs_equal_advantages(self) -> bool:
        return True

    @property
    def counts_length(self) -> bool:
        return True


class CustomPolicyLossConfig(PolicyLossConfig, tag="custom"):
    """A function of the user's own, called like the built-in ones: docs/algorithms.md."""

    module: ClassVar[str] = ""

    function: str
    """Import path, `package.module:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""


class MaskConfig(Formula):
    """Function of `MaskInputs`: the tokens of an update that stay in the policy loss."""

    module: ClassVar[str] = "token_masks"

    is_local: ClassVar[bool] = False
    """Whether a token's entry depends on its own sequence alone, so that the loss can mask each microbatch by itself;
    any other mask takes a forward pass over the whole update first."""


class OpsmConfig(MaskConfig, tag="opsm"):
    """Drops sequences of negative advantage that the learner has become unlikely to write."""

    is_local: ClassVar[bool] = True

    delta: Positive = 0.5
    """Mean log(generator/learner) above which they leave, nats."""


class M2poConfig(MaskConfig, tag="m2po"):
    """Drops tokens until the mean squared log(learner/generator) is small."""

    threshold: Positive = 0.04
    """Largest mean of the squared log-ratios of the tokens kept."""


# msgspec decodes unions, not base classes: from here on the names stand for any of the records above.
PolicyLossConfig = union_of(PolicyLossConfig)
MaskConfig = union_of(MaskConfig)
