"""The split does not change the gradient of any policy loss with any valid correction, proximal policy, and mask."""

from itertools import product

import pytest
import torch

from slipstream.buffer.trajectory import VersionSpan
from slipstream.configs.advantages import DrGrpoConfig, WinRateConfig
from slipstream.configs.algorithm import AlgorithmConfig, CorrectionConfig, RejectionConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.policy_losses import MaskConfig, PolicyLossConfig, SppoConfig
from slipstream.learner.batching.build_batch import build_batch
from slipstream.learner.training.objective import Objective
from slipstream.learner.training.step_metrics import StepMetrics
from tests.unit.learner.builders import VOCABULARY, examples, make_groups

LOSSES = examples(PolicyLossConfig, function="tests.unit.learner.own_algorithm:squashed", arguments={"sharpness": 2.0})
MEAN = RejectionConfig(low=0.9, high=1.2)
CORRECTIONS = [
    CorrectionConfig(level="none", high=None),
    CorrectionConfig(),
    CorrectionConfig(level="sequence", bound="mask", low=0.5, high=2.0),
    CorrectionConfig(level="geometric", high=1.1),
    CorrectionConfig(bound="mask", low=0.7, high=1.4, veto=(0.3, 4.0)),
    CorrectionConfig(level="sequence", normalize=True, reject=[MEAN], denominator="kept"),
    CorrectionConfig(level="none", high=None, reject=[MEAN], rebaseline=True),
]
PROXIMALS = ("recompute", "reuse", "generator", "interpolate")
MASKS = ([], list(examples(MaskConfig).values()))
UPDATES = (1, 2)
"""Number of updates without and with masks."""


def make_batch(config):
    groups = make_groups(num_groups=4)
    for number, member in enumerate(member for group in groups for member in group):
        member.version_spans[:] = [VersionSpan(span.first_token, 3 - number % 4) for span in member.version_spans]
    batch = build_batch(
        groups,
        learner_version=3,
        max_lags=[None] * 4,
        weights=[1.0, 0.5, 1.0, 2.0],
        num_updates=config.updates_per_step,
        vocab_size=VOCABULARY,
    ).batch
    if not config.needs_start_logprobs:
        return batch
    return batch.with_tokens(start_logprobs=near(batch.tokens.generator_logprobs, seed=1))


def near(logprobs, *, seed):
    """Log-probabilities of a nearby policy."""
    chance = torch.Generator().manual_seed(seed)
    return logprobs + 0.25 * torch.randn(len(logprobs), generator=chance)


def gradient(objective, tokens, logprobs, parts):
    """Gradient of the sum of separately computed losses of `parts`, indices [K] each."""
    leaf = logprobs.clone().requires_grad_()
    entropies = torch.zeros_like(leaf)
    losses = [
        objective.loss(
            tokens.take(indices), {"logprobs": leaf[indices], "entropies": entropies[indices]}, metrics=StepMetrics()
        )
        for indices in parts
    ]
    (found,) = torch.autograd.grad(torch.stack(losses).sum(), leaf)
    return found


def compositions(loss):
    """All compositions that the config accepts."""
    is_sppo = isinstance(loss, SppoConfig)
    for correction, proximal, (masks, updates) in product(CORRECTIONS, PROXIMALS, zip(MASKS, UPDATES, strict=True)):
        try:
            yield AlgorithmConfig(
                advantage=WinRateConfig() if is_sppo else DrGrpoConfig(),
                policy_loss=loss,
                correction=correction,
                proximal=proximal,
                masks=masks,
                updates_per_step=updates,
                aggregation="seq_mean_token_mean",
            )
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
