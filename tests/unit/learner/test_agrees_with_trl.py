"""The same batches through TRL 1.16.0's trainers (recorded by tests/golden/rewrite_trl.py) and through ours.

TRL divides variances by n - 1 and adds 1e-4 to deviations; we divide by n. Most losses are compared with advantages
that divide by no deviation.
"""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs import algorithm_terms as losses
from slipstream.configs.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig, RewardShapingConfig
from slipstream.configs.algorithm_terms import CustomAdvantageConfig, DrGrpoConfig, RlooConfig
from slipstream.learner.algorithms import distillation, kl
from slipstream.learner.training.objective import Objective
from slipstream.learner.training.step_metrics import StepMetrics
from tests.builders import make_trajectory
from tests.unit.learner import builders

TRL = json.loads((Path(__file__).parents[2] / "golden" / "trl_1_16.json").read_text(encoding="utf-8"))
BATCH, LENGTHS = TRL["batch"], TRL["batch"]["lengths"]
SIZE, NUM_SEQUENCES = BATCH["group_size"], len(LENGTHS)
SEQUENCES = torch.arange(NUM_SEQUENCES).repeat_interleave(torch.tensor(LENGTHS))
TRUNCATED = (1, 5)
CLIP = losses.PpoClipConfig(clip_low=0.2, clip_high=0.28)
SEQUENCE_CLIP = {"clip_low": 0.05, "clip_high": 0.1}
VESPO = losses.VespoConfig()
NONE = CorrectionConfig(level="none", max_weight=None)
UNBOUNDED = CorrectionConfig(level="token", max_weight=None)
CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def make_config(**settings):
    plain = {"advantage": DrGrpoConfig(), "policy_loss": CLIP, "correction": NONE}
    composed = {"loss_aggregation": "seq_mean_token_mean", "proximal": "recompute"}
    return AlgorithmConfig(**(plain | composed | settings))


def make_correction(mode):
    level, _, bound = mode.partition("_")
    return CorrectionConfig(level=level, outside=bound, min_weight=0.8, max_weight=1.25)


def column(values):
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def make_member(index, reward, logprobs):
    return make_trajectory(
        str(index // SIZE),
        index,
        token_ids=np.full(1 + len(logprobs), 5, dtype=np.int32),
        model_mask=np.arange(1 + len(logprobs)) > 0,
        generator_logprobs=np.array([0.0, *logprobs], dtype=np.float32),
        version_spans=[VersionSpan(1, 0)],
        reward=Reward(0.0, status="error") if reward is None else Reward(reward),
        stop_reason="length" if index in TRUNCATED else "stop",
    )


def make_batch(config, *, rewards=BATCH["rewards"], **columns):
    """The learner's batch, without columns that the settings do not need."""
    known = {name: column(values) for name, values in (BATCH | columns).items() if name.endswith("logprobs")}
    logprobs = known["generator_logprobs"].split(LENGTHS)
    members = [make_member(index, rewards[index], logprobs[index].tolist()) for index in range(NUM_SEQUENCES)]
    groups = [members[start : start + SIZE] for start in range(0, NUM_SEQUENCES, SIZE)]
    batch = builders.make_batch(groups, masks_truncated=config.reward.mask_truncated).batch
    is_in = (batch.trajectories.num_trained > 0)[SEQUENCES]
    return is_in, batch.with_tokens(
        start_logprobs=known["start_logprobs"][is_in] if config.needs_start_logprobs else None,
        current_logprobs=known["learner_logprobs"][is_in] if config.needs_current_logprobs else None,
        reference_logprobs=known["reference_logprobs"][is_in] if config.kl.coef else None,
    )


def ours(config, **columns):
    is_in, batch = make_batch(config, **columns)
    objective = Objective(config, max_tokens=BATCH["longest"])
    batch = objective.prepare(batch)
    if config.needs_current_logprobs:
        batch = objective.select_tokens(batch, update=0, seed=0)
    learner = column((BATCH | columns)["learner_logprobs"]).requires_grad_()
    entropies = column(BATCH["entropies"]).requires_grad_()
    measured = {"logprobs": learner[is_in], "entropies": entropies[is_in]}
    loss = objective.loss(batch.tokens, measured, metrics=StepMetrics())
    return loss, *torch.autograd.grad(loss, [learner, entropies])


def assert_same(found, expected, *, factor=1.0, has_value=True):
    loss, gradient, by_entropy = found
    if "entropy_gradient" in expected:
        torch.testing.assert_close(by_entropy, column(expected["entropy_gradient"]), **CLOSE)
    if has_value:
        torch.testing.assert_close(loss, factor * column([expected["loss"]])[0], **CLOSE)
    torch.testing.assert_close(gradient, factor * column(expected["gradient"]), **CLOSE)


SAME = {
    "grpo": make_config(),
    # TRL's bnpo takes the mean over the tokens of a microbatch, which is the whole batch here.
    "bnpo": make_config(loss_aggregation="token_mean"),
    "dapo": make_config(loss_aggregation="token_mean"),
    "dr_grpo": make_config(loss_aggregation="seq_mean_token_sum_norm"),
    "two_sided": make_config(policy_loss=losses.PpoClipConfig(clip_low=0.2, clip_high=0.28, dual_clip=1.4)),
    "sapo": make_config(policy_loss=losses.SapoConfig(tau_positive=1.0, tau_negative=1.5)),
    "gspo": make_config(policy_loss=losses.GspoConfig(**SEQUENCE_CLIP)),
    "luspo": make_config(policy_loss=losses.GspoConfig(form="length_scaled", **SEQUENCE_CLIP)),
    "gmpo": make_config(policy_loss=losses.GmpoConfig(clip_low=0.3, clip_high=0.25)),
    **{
        mode: make_config(correction=make_correction(mode))
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "off_policy_mask": make_config(correction=UNBOUNDED, masks=[losses.OpsmConfig(delta=0.29)]),
    "kl": make_config(kl=KlConfig(0.1)),
    # TRL's bonus is always a mean over tokens; ours is aggregated like the losses.
    "entropy": make_config(loss_aggregation="token_mean", entropy_coef=0.05),
    "together": make_config(
        policy_loss=losses.GspoConfig(**SEQUENCE_CLIP),
        correction=make_correction("token_truncate"),
        loss_aggregation="token_mean",
        kl=KlConfig(0.1),
        entropy_coef=0.05,
    ),
    "dapo_truncated": make_config(loss_aggregation="token_mean", reward=RewardShapingConfig(mask_truncated=True)),
    # What the mask drops keeps its KL.
    "kl_masked": make_config(correction=UNBOUNDED, masks=[losses.OpsmConfig(delta=0.29)], kl=KlConfig(0.1)),
}


@pytest.mark.parametrize("name", SAME)
def test_the_whole_objective_is_that_of_trl(name):
    assert_same(ours(SAME[name]), TRL["losses"][name])


BESSEL = math.sqrt(SIZE / (SIZE - 1))
GRPO = CustomAdvantageConfig("slipstream.learner.algorithms.advantages:grpo", {"epsilon": 1e-4 / BESSEL})
UNKNOWN = [None if index % 5 == 0 else value for index, value in enumerate(BATCH["generator_logprobs"])]
UNSCORED = [None if index == 4 else reward for index, reward in enumerate(BATCH["rewards"])]
START = BATCH["start_logprobs"]
MEAN = {"loss_aggregation": "token_mean"}
RLOO = {"advantage": RlooConfig(), "loss_aggregation": "seq_mean_token_sum"}
KL_IN_REWARD = KlConfig(0.1, estimator="k1", apply_to="reward")
GRADIENT_ALONE = {"has_value": False}
DIFFERENT = {
    # Scaled by the deviation of a group, it is larger by Bessel's factor.
    "grpo_scaled": ({"advantage": GRPO}, {}, {"factor": BESSEL}),
    # TRL uses sg(weight) * log pi, we use sg(weight) * log ratio: different values, equal gradients.
    "cispo": ({"policy_loss": losses.CispoConfig(clip_high=0.3), **MEAN}, {}, GRADIENT_ALONE),
    "vespo": ({"policy_loss": VESPO, **MEAN}, {}, GRADIENT_ALONE),
    # TRL multiplies the drift before the step into the weight; we use one ratio for both.
    "vespo_around_generator": ({"policy_loss": VESPO, "proximal": "generator", **MEAN}, {}, GRADIENT_ALONE),
    # A log-probability that the generator did not report counts as no drift.
    "unknown_logprobs": ({"correction": make_correction("sequence_truncate")}, {"generator_logprobs": UNKNOWN}, {}),
    # TRL's ratio is learner/proximal even if another engine sampled; ours is learner/generator, as in the paper.
    "kl_bias_corrected": ({"kl": KlConfig(0.1, estimator="k3_off_policy")}, {"generator_logprobs": START}, {}),
    # A sequence that is out of the loss is no sequence here and one in TRL.
    "grpo_truncated": (
        {"reward": RewardShapingConfig(mask_truncated=True)},
        {},
        {"factor": NUM_SEQUENCES / (NUM_SEQUENCES - 2)},
    ),
    "grpo_unscored": ({}, {"rewards": UNSCORED}, {"factor": NUM_SEQUENCES / (NUM_SEQUENCES - 1)}),
    # TRL clips the product of a sequence's ratios, which none of our losses does. At ratio 1, it is REINFORCE.
    "rloo": (RLOO, {"learner_logprobs": START}, GRADIENT_ALONE),
    "rloo_kl": (RLOO | {"kl": KL_IN_REWARD}, {"learner_logprobs": START}, GRADIENT_ALONE),
}
"""Name -> our settings, other inputs, and how the result differs."""


@pytest.mark.parametrize("name", DIFFERENT)
def test_where_definitions_differ_the_objective_is_that_of_trl_up_to_a_known_factor_or_constant(name):
    settings, columns, difference = DIFFERENT[name]
    assert_same(ours(make_config(**settings), **columns), TRL["losses"][name], **difference)


FORWARD, JSD = distillation.forward_kl_topk, partial(distillation.generalized_jsd, beta=0.3)
DIVERGENCES = {
    "beta_0.0": (FORWARD, 6, True),
    "beta_0.3": (JSD, 6, True),
    "beta_1.0": (lambda student, teacher, renormalize: kl.exact(student, teacher), 6, True),
    **{f"top_3_0.0_{has_rest}": (FORWARD, 3, not has_rest) for has_rest in (False, True)},
    **{f"top_3_0.3_{has_rest}": (JSD, 3, not has_rest) for has_rest in (False, True)},
}
"""Name -> divergence, number of the student's most likely tokens (of 6), and whether their shares are renormalized."""


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_distance_from_a_teacher_is_that_of_trl(name):
    expected = TRL["divergences"]
    divergence, count, renormalize = DIVERGENCES[name]
    logits = torch.tensor(expected["student"], dtype=torch.float64, requires_grad=True)
    student = logits.log_softmax(-1)
    teacher = torch.tensor(expected["teacher"], dtype=torch.float64).log_softmax(-1)
    ids = student.topk(count).indices if count < 6 else torch.arange(6).expand_as(student)
    loss = divergence(student.gather(1, ids), teacher.gather(1, ids), renormalize=renormalize).mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss.item(), expected[name]["loss"], **CLOSE)
    torch.testing.assert_close(gradient, torch.tensor(expected[name]["gradient"], dtype=torch.float64), **CLOSE)
