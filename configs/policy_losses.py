"""Ratio and advantage -> loss of a token: one record per surrogate of learner/objective/loss_registry.py, and masks beside them."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from slipstream.configs.base import Config

Positive = Annotated[float, Meta(gt=0)]
Below1 = Annotated[float, Meta(gt=0, lt=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


class PpoClipConfig(Config, tag="ppo_clip", tag_field="kind"):
    """Clipped surrogate around the proximal policy, `policy_losses.ppo_clip`."""

    clip_low: Below1 = 0.2
    """Lower clip distance."""
    clip_high: Positive = 0.2
    """Upper clip distance; larger than `clip_low` is DAPO's clip-higher."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Largest ratio that a negative advantage is multiplied by; 3 is usual. None = any."""


class ReinforceConfig(Config, tag="reinforce", tag_field="kind"):
    """Score-function gradient without a ratio, `policy_losses.reinforce`; GPG's loss."""


class UnclippedConfig(Config, tag="unclipped", tag_field="kind"):
    """Ratio times advantage, `policy_losses.unclipped`; needs another trust region, such as the m2po mask."""


class CispoConfig(Config, tag="cispo", tag_field="kind"):
    """Score function with a clipped ratio as weight, `policy_losses.cispo`."""

    clip_low: Share | None = None
    """Lower clip distance; None = none, as in MiniMax-M1."""
    clip_high: Positive = 5.0
    """Upper clip distance."""


class SapoConfig(Config, tag="sapo", tag_field="kind"):
    """Soft gate in place of the clip, `policy_losses.sapo`."""

    tau_positive: Positive = 1.0
    """Sharpness where the advantage is positive."""
    tau_negative: Positive = 1.05
    """Sharpness where it is negative."""


class DroConfig(Config, tag="dro", tag_field="kind"):
    """Score function with a quadratic pull back to the proximal policy, `policy_losses.dro`."""

    beta: Positive = 0.1
    """Strength of the pull."""


class AspoConfig(Config, tag="aspo", tag_field="kind"):
    """PPO-clip with the ratio turned over for positive advantages, `policy_losses.aspo`."""

    clip_low: Below1 = 0.2
    """Lower clip distance."""
    clip_high: Positive = 0.2
    """Upper clip distance."""
    cap: Annotated[float, Meta(gt=1)] = 3.0
    """Largest weight."""


class DppoConfig(Config, tag="dppo", tag_field="kind"):
    """Stops where a token's probability has moved too far, not its ratio, `policy_losses.dppo_tv`, `dppo_kl`."""

    divergence: Literal["tv", "kl"] = "tv"
    """What is measured."""
    low: Positive = 0.2
    """Bound for negative advantages."""
    high: Positive = 0.2
    """Bound for positive advantages."""
    ratio_cap: Positive = 20.0
    """Largest weight."""


class ToprConfig(Config, tag="topr", tag_field="kind"):
    """What is praised counts fully, what is blamed fades as it becomes unlikely, `sequence_losses.topr`."""

    level: Literal["sequence", "token"] = "sequence"
    """Whose ratio it fades with; the paper's is the sequence's."""


class GspoConfig(Config, tag="gspo", tag_field="kind"):
    """PPO-clip on the geometric mean of a sequence's ratios, `sequence_losses.gspo`."""

    clip_low: Below1 = 3e-4
    """Lower clip distance; the default is for one version's drift, lag needs more."""
    clip_high: Positive = 4e-4
    """Upper clip distance."""
    form: Literal["sequence", "token", "length_scaled"] = "sequence"
    """The paper's | each token's gradient through itself (GSPO-token) | times the length (LUSPO)."""


class GmpoConfig(Config, tag="gmpo", tag_field="kind"):
    """Geometric mean of ratios that are clipped one by one, `sequence_losses.gmpo`."""

    clip_low: Positive = 0.4
    """Lower clip distance of a token's log-ratio, nats."""
    clip_high: Positive = 0.4
    """Upper clip distance, nats."""


class VespoConfig(Config, tag="vespo", tag_field="kind"):
    """Score function with a soft weight of the sequence's whole ratio, `sequence_losses.vespo`."""

    power_positive: Positive = 2.0
    """Exponent of the ratio where the advantage is positive."""
    decay_positive: Positive = 3.0
    """Decay of large ratios there."""
    power_negative: Positive = 3.0
    """Exponent where it is negative."""
    decay_negative: Positive = 2.0
    """Decay there."""


class ClipCovConfig(Config, tag="clip_cov", tag_field="kind"):
    """PPO-clip without a few tokens of high covariance, `token_masks.clip_cov_mask`."""

    clip_low: Below1 = 0.2
    """Lower clip distance."""
    clip_high: Positive = 0.2
    """Upper clip distance."""
    share: Share = 2e-4
    """Tokens that are dropped, of all."""
    covariance_low: float = 1.0
    """Smallest covariance of a token that may be dropped."""
    covariance_high: float = 5.0
    """Largest."""


class KlCovConfig(Config, tag="kl_cov", tag_field="kind"):
    """Ratio times advantage, the tokens of highest covariance held back, `policy_losses.kl_cov`."""

    share: Share = 2e-4
    """Tokens that are held back, of all."""
    coefficient: Positive = 1.0
    """How much."""


class SppoConfig(Config, tag="sppo", tag_field="kind"):
    """Squared distance of a sequence's log-ratio from its win rate, `preference.sppo`."""

    eta: Positive = 1000.0
    """Win rate -> log-ratio."""


class CustomPolicyLossConfig(Config, tag="custom", tag_field="kind"):
    """A function of your own: docs/algorithms.md says what it gets and must give."""

    function: str
    """`package.module:function`."""
    arguments: dict[str, Any] = {}
    """Passed by keyword."""


PolicyLossConfig = (
    PpoClipConfig
    | ReinforceConfig
    | UnclippedConfig
    | CispoConfig
    | SapoConfig
    | DroConfig
    | AspoConfig
    | DppoConfig
    | ToprConfig
    | GspoConfig
    | GmpoConfig
    | VespoConfig
    | ClipCovConfig
    | KlCovConfig
    | SppoConfig
    | CustomPolicyLossConfig
)
WITHOUT_RATIO = (ReinforceConfig,)
"""Losses of log pi_learner alone."""
CHOOSING = (ClipCovConfig, KlCovConfig)
"""Losses that choose tokens among all of an optimizer update."""


class OpsmConfig(Config, tag="opsm", tag_field="kind"):
    """Blamed sequences that the learner has become unlikely to write leave, `token_masks.opsm_mask`."""

    delta: Positive = 0.5
    """Mean log(generator/learner) from which on they leave, nats."""


class M2poConfig(Config, tag="m2po", tag_field="kind"):
    """Tokens leave until the mean squared log(learner/generator) is small, `token_masks.m2po_mask`."""

    threshold: Positive = 0.04
    """Largest mean."""


MaskConfig = OpsmConfig | M2poConfig
