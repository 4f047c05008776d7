"""Every advantage, policy loss, correction and mask through the real trainer, two steps each.

The split does not change the gradient of any policy loss with any valid correction, proximal policy, and mask.
"""

from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs import algorithm as configs
from slipstream.configs import algorithm_terms as terms
from slipstream.configs.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, DistillationConfig, KlConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.generators import GeneratorsConfig, SamplingConfig
from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.batching.build_batch import build_batch
from slipstream.learner.training.objective import Objective
from slipstream.learner.training.step_metrics import StepMetrics
from tests.cases import cases
from tests.tolerance import largest_difference
from tests.unit.learner import builders
from tests.unit.learner.builders import examples, make_groups, make_model, make_run, make_trainer, weights

REJECT_MEAN = configs.RejectionConfig(low=0.17, high=2.0)
NONE = CorrectionConfig(level="none", max_weight=None)
ONLY_REJECTED = CorrectionConfig(level="none", max_weight=None, reject=[REJECT_MEAN])
QUICK = configs.CriticOptimizerConfig(learning_rate=1e-3)
CRITIC, WARMED_UP = CriticConfig(optimizer=QUICK), CriticConfig(optimizer=QUICK, warmup_steps=1)
PROCESS_OPTIMIZER = configs.ProcessRewardOptimizerConfig(learning_rate=1e-3, epsilon=1e-4)
PROCESS_REWARD = configs.ProcessRewardConfig(optimizer=PROCESS_OPTIMIZER)
VTRACE = {"advantage": terms.VtraceConfig(), "critic": CRITIC, "correction": NONE}
OWN = "tests.unit.learner.own_algorithm:"
COMPANIONS: dict[str, dict[str, Any]] = {
    "advantage-win_rate": {"policy_loss": terms.SppoConfig(eta=1.0), "loss_aggregation": "prompt_mean"},
    "loss-sppo": {"advantage": terms.WinRateConfig(), "loss_aggregation": "prompt_mean"},
    "loss-gspo-length_scaled": {"loss_aggregation": "seq_mean_token_mean"},
    "advantage-vtrace": {"correction": NONE},
    "advantage-prime": {"process_reward": PROCESS_REWARD},
}
"""Settings that an advantage or a loss requires."""
ADVANTAGES = examples(terms.AdvantageConfig, function=f"{OWN}centered")
LOSSES = examples(terms.PolicyLossConfig, function=f"{OWN}squashed", arguments={"sharpness": 2.0})
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"advantage-{name}": {"advantage": record, "critic": CRITIC} for name, record in ADVANTAGES.items()},
    **{f"loss-{name}": {"policy_loss": record} for name, record in LOSSES.items()},
    "gae-length_adaptive": {"advantage": terms.GaeConfig(length_adaptive_alpha=0.05), "critic": WARMED_UP},
    "vtrace-two_updates": VTRACE | {"updates_per_step": 2},
    "m2po": {"policy_loss": terms.UnclippedConfig(), "masks": [terms.M2poConfig(0.01)]},
    "opsm": {"masks": [terms.OpsmConfig(0.01)]},
    "seq_tis": {"correction": CorrectionConfig(level="sequence", max_weight=5.0)},
    "geometric": {"correction": CorrectionConfig(level="geometric", max_weight=5.0)},
    "seq_mis": {"correction": CorrectionConfig(level="sequence", outside="mask", min_weight=0.2, max_weight=5.0)},
    "normalized": {"correction": CorrectionConfig(level="sequence", normalize=True)},
    "rejected": {"correction": CorrectionConfig(reject=[REJECT_MEAN], loss_denominator="kept_tokens")},
    "veto": {"correction": CorrectionConfig(veto=(1e-3, 1e3))},
    "bypass": {"proximal": "generator", "correction": NONE},
    "bypass-geo_rs": {"proximal": "generator", "correction": ONLY_REJECTED},
    "reuse": {"proximal": "reuse"},
    "interpolate": {"proximal": "interpolate"},
    **{name: {"loss_aggregation": name} for name in ("prompt_mean", "token_sum", "seq_mean_token_sum_norm")},
    "kl-reward": {"kl": KlConfig(0.1, "k1", "reward")},
    "kl-k3_st": {"kl": KlConfig(0.1, "k3_st")},
    "kl-off_policy": {"kl": KlConfig(0.1, "k3_off_policy")},
    "kl-full": {"kl": KlConfig(0.1, "full")},
    "kl-adaptive": {"kl": KlConfig(0.1, adaptive=configs.AdaptiveKlConfig(0.01, horizon=10), refresh_every_steps=2)},
    **{
        f"distil-{divergence}": {"distillation": {"divergence": divergence, "top_k": 5}}
        for divergence in ("k1", "k3", "forward_kl_topk", "jsd_topk")
    },
    "entropy": {"entropy_coef": 0.01},
    "positive_nll": {"positive_nll_coef": 0.1},
    "ess": {"ess_learning_rate": True},
    "overlong": {"reward": configs.RewardShapingConfig(overlong_buffer=8, normalize="group")},
}


def make_algorithm_run(folder: Path, name: str, *, num_updates: int = 1, learner: dict[str, Any] | None = None):
    algorithm = {"updates_per_step": num_updates} | SETTINGS[name] | COMPANIONS.get(name, {})
    if "distillation" in algorithm:
        teacher = str(make_model(folder, seed=7))
        algorithm["distillation"] = DistillationConfig(teacher, **algorithm["distillation"])
    settings = {"prompts_per_step": 4} | (learner or {})
    generators = GeneratorsConfig(sampling=SamplingConfig(max_tokens=16))
    return make_run(make_model(folder), learner=settings, algorithm=AlgorithmConfig(**algorithm), generators=generators)


def make_algorithm_groups(name: str):
    groups = make_groups(num_groups=4)
    if name != "advantage-remax":
        return groups
    greedy = {"sampling": builders.GREEDY}
    return [[*group, builders.make_response(i, len(group), **greedy)] for i, group in enumerate(groups)]


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
    bounds = {f"learner/{key}": 1e-6 for key in ("loss", "grad_norm", "kept_fraction", "idle_fraction")}
    bounds |= {key: 1e-5 for key in whole_metrics[-1] if "/critic_" in key}
    for key, bound in bounds.items():
        assert split_metrics[-1][key] == pytest.approx(whole_metrics[-1][key], rel=1e-4, abs=bound), key


@pytest.mark.parametrize("name", ["loss-ppo_clip", "loss-cispo", "m2po", "loss-clip_cov", "rejected", "kl-full"])
def test_several_updates_of_a_step_work_too(tmp_path, name):
    metrics, found = train(tmp_path, name, num_updates=2)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    # All tokens of one of the two updates are rejected.
    assert metrics[0]["learner/updates"] == (1 if name == "rejected" else 2)


@cases(
    "algorithm, complaint",
    ({"advantage": terms.CustomAdvantageConfig(f"{OWN}missing")}, "has no 'missing'"),
    ({"policy_loss": terms.CustomPolicyLossConfig("no_such_module:loss")}, "no module 'no_such_module'"),
)
def test_a_users_function_that_is_not_there_is_reported_before_anything_is_built(tmp_path, algorithm, complaint):
    with pytest.raises(ConfigError, match=f"function.*{complaint}"):
        make_trainer(make_run(tmp_path / "no model", algorithm=AlgorithmConfig(**algorithm)))


def test_a_users_function_sees_no_gap_and_is_not_called_without_tokens(tmp_path):
    """Failed rewards remove a whole group, and a bound rejects all tokens of a trajectory."""
    algorithm = {
        "advantage": terms.CustomAdvantageConfig(f"{OWN}minus_group_means"),
        "policy_loss": terms.CustomPolicyLossConfig(f"{OWN}weighted_by_length"),
        "correction": ONLY_REJECTED,
    }
    learner = {"prompts_per_step": 4, "tokens_per_microbatch": 64}
    run = make_run(make_model(tmp_path), algorithm=AlgorithmConfig(**algorithm), learner=learner)
    groups = make_groups(num_groups=4)
    error = Reward(total=0.0, status="error")
    groups[1] = [msgspec.structs.replace(member, reward=error) for member in groups[1]]
    metrics = make_trainer(run).step(groups, learner_version=0, step=1)
    assert 0 < metrics["learner/kept_fraction"] < 1


@pytest.mark.parametrize("divergence", ["k3", "jsd_topk"])
def test_a_teacher_alone_pulls_the_learner_towards_itself(tmp_path, divergence):
    config = DistillationConfig(str(make_model(tmp_path, seed=7)), divergence, with_rewards=False)
    learner = {"max_steps": 30, "optimizer": OptimizerConfig(learning_rate=3e-3)}
    run = make_run(make_model(tmp_path), learner=learner, algorithm=AlgorithmConfig(distillation=config))
    trainer, groups = make_trainer(run), make_groups(num_groups=2)
    losses = [trainer.step(groups, learner_version=0, step=i + 1)["learner/loss"] for i in range(30)]
    assert losses[-1] < 0.5 * losses[0]


MEAN = configs.RejectionConfig(low=0.9, high=1.2)
CORRECTIONS = [
    NONE,
    CorrectionConfig(),
    CorrectionConfig(level="sequence", outside="mask", min_weight=0.5, max_weight=2.0),
    CorrectionConfig(level="geometric", max_weight=1.1),
    CorrectionConfig(outside="mask", min_weight=0.7, max_weight=1.4, veto=(0.3, 4.0)),
    CorrectionConfig(level="sequence", normalize=True, reject=[MEAN], loss_denominator="kept_tokens"),
    CorrectionConfig(level="none", max_weight=None, reject=[MEAN]),
]
PROXIMALS = ("recompute", "reuse", "generator", "interpolate")
MASKS = ([], list(examples(terms.MaskConfig).values()))
UPDATES = (1, 2)
"""Number of updates without and with masks."""


def make_batch(config):
    groups = make_groups(num_groups=4)
    for number, member in enumerate(member for group in groups for member in group):
        member.version_spans[:] = [VersionSpan(span.first_token, 3 - number % 4) for span in member.version_spans]
    options = {"learner_version": 3, "max_lags": [None] * 4, "weights": [1.0, 0.5, 1.0, 2.0]}
    options |= {"num_updates": config.updates_per_step, "vocab_size": builders.VOCABULARY}
    batch = build_batch(groups, **options).batch
    if not config.needs_start_logprobs:
        return batch
    return batch.with_tokens(start_logprobs=near(batch.tokens.generator_logprobs, seed=1))


def near(logprobs, *, seed):
    chance = torch.Generator().manual_seed(seed)
    return logprobs + 0.25 * torch.randn(len(logprobs), generator=chance)


def gradient(objective, tokens, logprobs, parts):
    """Gradient of the sum of separately computed losses of `parts`, indices [K] each."""
    leaf = logprobs.clone().requires_grad_()
    outputs = [{"logprobs": leaf[indices], "entropies": torch.zeros(len(indices))} for indices in parts]
    taken = zip(map(tokens.take, parts), outputs, strict=True)
    losses = [objective.loss(own, output, metrics=StepMetrics()) for own, output in taken]
    (found,) = torch.autograd.grad(torch.stack(losses).sum(), leaf)
    return found


def compositions(loss):
    advantage = terms.WinRateConfig() if isinstance(loss, terms.SppoConfig) else terms.DrGrpoConfig()
    for correction, proximal, (masks, updates) in product(CORRECTIONS, PROXIMALS, zip(MASKS, UPDATES, strict=True)):
        try:
            settings = {"advantage": advantage, "policy_loss": loss, "loss_aggregation": "seq_mean_token_mean"}
            settings |= {"correction": correction, "proximal": proximal, "masks": masks}
            yield AlgorithmConfig(**settings, updates_per_step=updates)
        except ConfigError:
            continue


@pytest.mark.parametrize("name", LOSSES)
def test_no_split_changes_the_gradient_of_any_composition(name):
    chance, num_moved, configs = torch.Generator().manual_seed(0), 0, list(compositions(LOSSES[name]))
    for config in configs:
        objective = Objective(config, max_tokens=9)
        batch = objective.prepare(make_batch(config))
        start = batch.tokens.generator_logprobs if batch.tokens.start_logprobs is None else batch.tokens.start_logprobs
        for update in range(config.updates_per_step):
            # The learner has moved before the second update.
            learner = start if update == 0 else near(start, seed=2)
            if config.needs_current_logprobs:
                batch = objective.select_tokens(batch.with_tokens(current_logprobs=learner), update=update, seed=update)
            numbers = (batch.trajectories.updates == update).nonzero().squeeze(1)
            order = numbers[torch.randperm(len(numbers), generator=chance)]
            shares = (order[:1], order[1:4], order[4:])
            parts = [torch.isin(batch.tokens.sequences, share).nonzero().squeeze(1) for share in shares]
            whole = gradient(objective, batch.tokens, learner, [torch.cat(parts).sort().values])
            split = gradient(objective, batch.tokens, learner, parts)
            assert whole.isfinite().all(), config
            assert torch.allclose(split, whole, atol=1e-7), config
            num_moved += bool((whole != 0).any())
    assert len(configs) >= 10, "what is legal is tried"
    assert num_moved > 0.8 * len(configs)
