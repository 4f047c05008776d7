"""Every advantage, policy loss, correction and mask through the real trainer, two steps each."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from slipstream.buffer.trajectory import Reward
from slipstream.configs import advantages, policy_losses
from slipstream.configs.algorithm import (
    AdaptiveKlConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    CriticOptimizerConfig,
    DistillationConfig,
    EssLearningRateConfig,
    KlConfig,
    RejectionConfig,
    RewardShapingConfig,
)
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import GeneratorsConfig
from slipstream.configs.learner import OptimizerConfig
from tests.tolerance import largest_difference
from tests.unit.learner.builders import (
    examples,
    make_groups,
    make_model,
    make_run,
    make_trainer,
    weights,
    with_greedy_answers,
)

NONE = CorrectionConfig(level="none", high=None)
REJECT_MEAN = RejectionConfig(low=0.17, high=2.0)
QUICK = CriticOptimizerConfig(learning_rate=1e-3)
CRITIC, WARMED_UP = CriticConfig(optimizer=QUICK), CriticConfig(optimizer=QUICK, warmup_steps=1)
OWN = "tests.unit.learner.own_algorithm:"
COMPANIONS: dict[str, dict[str, Any]] = {
    "advantage-win_rate": {"policy_loss": policy_losses.SppoConfig(eta=1.0), "aggregation": "prompt_mean"},
    "loss-sppo": {"advantage": advantages.WinRateConfig(), "aggregation": "prompt_mean"},
    "loss-gspo-length_scaled": {"aggregation": "seq_mean_token_mean"},
    "advantage-vtrace": {"correction": NONE},
}
"""Settings that an advantage or a loss requires."""
SETTINGS: dict[str, dict[str, Any]] = {
    **{
        f"advantage-{name}": {"advantage": record, "critic": CRITIC} | COMPANIONS.get(f"advantage-{name}", {})
        for name, record in examples(advantages.AdvantageConfig, function=f"{OWN}centered").items()
    },
    **{
        f"loss-{name}": {"policy_loss": record} | COMPANIONS.get(f"loss-{name}", {})
        for name, record in examples(
            policy_losses.PolicyLossConfig, function=f"{OWN}squashed", arguments={"sharpness": 2.0}
        ).items()
    },
    "gae-length_adaptive": {"advantage": advantages.GaeConfig(length_adaptive=0.05), "critic": WARMED_UP},
    "m2po": {"policy_loss": policy_losses.UnclippedConfig(), "masks": [policy_losses.M2poConfig(0.01)]},
    "opsm": {"masks": [policy_losses.OpsmConfig(0.01)]},
    "seq_tis": {"correction": CorrectionConfig(level="sequence", high=5.0)},
    "geometric": {"correction": CorrectionConfig(level="geometric", high=5.0)},
    "seq_mis": {"correction": CorrectionConfig(level="sequence", bound="mask", low=0.2, high=5.0)},
    "normalized": {"correction": CorrectionConfig(level="sequence", normalize=True)},
    "rejected": {"correction": CorrectionConfig(reject=[REJECT_MEAN], rebaseline=True, denominator="kept")},
    "veto": {"correction": CorrectionConfig(veto=(1e-3, 1e3))},
    "bypass": {"proximal": "generator", "correction": NONE},
    "bypass-geo_rs": {
        "proximal": "generator",
        "correction": CorrectionConfig(level="none", high=None, reject=[REJECT_MEAN]),
    },
    "reuse": {"proximal": "reuse"},
    "interpolate": {"proximal": "interpolate"},
    "prompt_mean": {"aggregation": "prompt_mean"},
    "token_sum": {"aggregation": "token_sum"},
    "seq_mean_token_sum_norm": {"aggregation": "seq_mean_token_sum_norm"},
    "kl-reward": {"kl": KlConfig(0.1, "k1", "reward")},
    "kl-k3+": {"kl": KlConfig(0.1, "k3+")},
    "kl-off_policy": {"kl": KlConfig(0.1, "k3_off_policy")},
    "kl-full": {"kl": KlConfig(0.1, "full")},
    "kl-adaptive": {"kl": KlConfig(0.1, adaptive=AdaptiveKlConfig(0.01, horizon=10), refresh_every_steps=2)},
    **{
        f"distil-{divergence}": {"distillation": {"divergence": divergence, "top_k": 5}}
        for divergence in ("k1", "k3", "forward_kl_topk", "jsd_topk")
    },
    "entropy": {"entropy_coefficient": 0.01},
    "positive_nll": {"positive_nll_coefficient": 0.1},
    "ess": {"ess_learning_rate": EssLearningRateConfig()},
    "overlong": {"reward": RewardShapingConfig(overlong_buffer=8, normalize="group")},
}


def make_algorithm_run(folder: Path, name: str, *, num_updates: int = 1, learner: dict[str, Any] | None = None):
    """A run of four groups with the algorithm of that name."""
    algorithm = SETTINGS[name] | {"updates_per_step": num_updates}
    if "distillation" in algorithm:
        teacher = str(make_model(folder, seed=7))
        algorithm["distillation"] = DistillationConfig(teacher, **algorithm["distillation"])
    settings = {"groups_per_step": 4} | (learner or {})
    generators = GeneratorsConfig(baseline="greedy") if name == "advantage-remax" else GeneratorsConfig()
    return make_run(make_model(folder), learner=settings, algorithm=AlgorithmConfig(**algorithm), generators=generators)


def make_algorithm_groups(name: str):
    groups = make_groups(num_groups=4)
    return with_greedy_answers(groups) if name == "advantage-remax" else groups


def train(folder: Path, name: str, *, budget: int = 8192, num_updates: int = 1):
    run = make_algorithm_run(folder, name, num_updates=num_updates, learner={"tokens_per_microbatch": budget})
    trainer, groups = make_trainer(run), make_algorithm_groups(name)
    metrics = [trainer.step(groups, learner_version=step, step=step + 1) for step in range(2)]
    return metrics, weights(trainer)


@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains_and_the_split_into_microbatches_changes_nothing(tmp_path, name):
    whole_metrics, whole = train(tmp_path, name)
    split_metrics, split = train(tmp_path, name, budget=64)
    assert all(torch.isfinite(tensor).all() for tensor in whole.values())
    assert largest_difference(whole, split) < 1e-5
    for key in ("learner/loss", "learner/grad_norm", "learner/kept_fraction", "learner/idle_fraction"):
        assert split_metrics[-1][key] == pytest.approx(whole_metrics[-1][key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", ["loss-ppo_clip", "loss-cispo", "m2po", "loss-clip_cov", "rejected", "kl-full"])
def test_several_updates_of_a_step_work_too(tmp_path, name):
    metrics, found = train(tmp_path, name, num_updates=2)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    # All tokens of one of the two updates are rejected.
    assert metrics[-1]["learner/updates"] == (1 if name == "rejected" else 2)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": advantages.CustomAdvantageConfig("tests.unit.learner.own_algorithm:missing")},
        {"policy_loss": policy_losses.CustomPolicyLossConfig("no_such_module:loss")},
    ],
)
def test_a_users_function_that_is_not_there_is_reported_before_anything_is_built(tmp_path, algorithm):
    run = make_run(tmp_path / "no model", algorithm=AlgorithmConfig(**algorithm))
    with pytest.raises(ConfigError, match=r"function.*(has no 'missing'|no module 'no_such_module')"):
        make_trainer(run)


def test_a_users_function_sees_no_gap_and_is_not_called_without_tokens(tmp_path):
    """Failed rewards remove a whole group, and a bound rejects all tokens of a trajectory."""
    algorithm = {
        "advantage": advantages.CustomAdvantageConfig("tests.unit.learner.own_algorithm:minus_group_means"),
        "policy_loss": policy_losses.CustomPolicyLossConfig("tests.unit.learner.own_algorithm:weighted_by_length"),
        "correction": CorrectionConfig(level="none", high=None, reject=[REJECT_MEAN]),
    }
    learner = {"groups_per_step": 4, "tokens_per_microbatch": 64}
    run = make_run(make_model(tmp_path), algorithm=AlgorithmConfig(**algorithm), learner=learner)
    groups = make_groups(num_groups=4)
    error = Reward(total=0.0, status="error")
    groups[1] = [msgspec.structs.replace(member, reward=error) for member in groups[1]]
    metrics = make_trainer(run).step(groups, learner_version=0, step=1)
    assert 0 < metrics["learner/kept_fraction"] < 1


@pytest.mark.parametrize("num_updates", [1, 2])
def test_a_users_loss_sees_the_learners_log_probabilities(tmp_path, num_updates):
    losses = [policy_losses.ReinforceConfig(), policy_losses.CustomPolicyLossConfig(f"{OWN}score_function")]
    results = []
    for policy_loss in losses:
        algorithm = AlgorithmConfig(policy_loss=policy_loss, updates_per_step=num_updates)
        run = make_run(make_model(tmp_path), learner={"groups_per_step": 4}, algorithm=algorithm)
        trainer = make_trainer(run)
        # In the second step, the learner differs from the generator.
        metrics = [trainer.step(make_groups(num_groups=4), learner_version=i, step=i + 1) for i in range(2)]
        results.append((metrics[-1]["learner/loss"], weights(trainer)))
    (built_in, expected), (own, found) = results
    assert own == pytest.approx(built_in, rel=1e-6)
    assert largest_difference(found, expected) < 1e-7


@pytest.mark.parametrize("divergence", ["k3", "forward_kl_topk", "jsd_topk"])
def test_a_teacher_alone_pulls_the_learner_towards_itself(tmp_path, divergence):
    config = DistillationConfig(str(make_model(tmp_path, seed=7)), divergence, with_rewards=False)
    learner = {"max_steps": 30, "optimizer": OptimizerConfig(learning_rate=3e-3)}
    run = make_run(make_model(tmp_path), learner=learner, algorithm=AlgorithmConfig(distillation=config))
    trainer, groups = make_trainer(run), make_groups(num_groups=2)
    losses = [trainer.step(groups, learner_version=0, step=i + 1)["learner/loss"] for i in range(30)]
    assert losses[-1] < 0.5 * losses[0]
