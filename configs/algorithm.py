"""What is optimised: advantage x correction x policy loss x KL x aggregation, each a variant of its own."""

from typing import Annotated, Literal

from msgspec import Meta

from configs.base import Config


class GrpoConfig(Config, tag="grpo", tag_field="kind"):
    """Group-normalised rewards, `learner.algorithms.advantages.grpo`."""

    epsilon: Annotated[float, Meta(gt=0)] = 1e-6
    """Added to the standard deviation."""


class DrGrpoConfig(Config, tag="dr_grpo", tag_field="kind"):
    """Rewards minus the group's mean, `learner.algorithms.advantages.dr_grpo`."""


class RlooConfig(Config, tag="rloo", tag_field="kind"):
    """Rewards minus the mean of the others, `learner.algorithms.advantages.rloo`."""


class PpoClipConfig(Config, tag="ppo_clip", tag_field="kind"):
    """Clipped surrogate around the proximal policy, `learner.algorithms.policy_losses.ppo_clip`."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Lower clip distance."""
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    """Upper clip distance; larger than `clip_low` is DAPO's clip-higher."""


class ReinforceConfig(Config, tag="reinforce", tag_field="kind"):
    """Score-function gradient, `learner.algorithms.policy_losses.reinforce`."""


class TokenTisConfig(Config, tag="token_tis", tag_field="kind"):
    """Per-token importance weights, truncated from above, `learner.algorithms.importance.token_tis`."""

    cap: Annotated[float, Meta(gt=0)] = 2.0
    """Largest weight."""


class TokenMaskConfig(Config, tag="token_mask", tag_field="kind"):
    """Per-token importance weights, zero outside two bounds (IcePop), `learner.algorithms.importance.token_mask`."""

    low: Annotated[float, Meta(gt=0)] = 0.5
    """Smallest weight kept."""
    high: Annotated[float, Meta(gt=0)] = 5.0
    """Largest weight kept."""


class NoCorrectionConfig(Config, tag="none", tag_field="kind"):
    """No importance weights: right only on policy."""


class AlgorithmConfig(Config):
    """One objective."""

    advantage: GrpoConfig | DrGrpoConfig | RlooConfig = GrpoConfig()
    """Rewards of a group -> one advantage per trajectory."""
    policy_loss: PpoClipConfig | ReinforceConfig = PpoClipConfig()
    """Ratio learner/proximal and advantage -> loss per token."""
    correction: TokenTisConfig | TokenMaskConfig | NoCorrectionConfig = TokenTisConfig()
    """Weight proximal/generator per token, without gradient."""
    proximal: Literal["recompute", "reuse"] = "recompute"
    """A forward pass at the start of the step | the first microbatch's own values (one optimizer update per step)."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    """How token losses become one number; denominators are global over microbatches and ranks."""
    kl_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the KL to the initial policy in the loss (estimator k3); 0 = no reference policy is kept."""
    entropy_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    updates_per_step: Annotated[int, Meta(ge=1)] = 1
    """Optimizer updates a claimed batch is split into."""
