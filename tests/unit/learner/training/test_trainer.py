import msgspec
import numpy as np
import pytest
import torch

from slipstream.buffer.trajectory import Reward
from slipstream.configs.algorithm import AdaptiveKlConfig, AlgorithmConfig, CorrectionConfig, KlConfig, RejectionConfig
from slipstream.configs.learner import OptimizerConfig
from slipstream.configs.policy_losses import ReinforceConfig
from slipstream.learner.errors import DivergenceError
from slipstream.learner.publishing.staging import canary_token_ids
from tests.metric_docs import STEP, TOKENS, keys_under
from tests.tolerance import gradient_terms, is_rounding, largest_difference
from tests.unit.learner.builders import (
    VOCABULARY,
    documented,
    make_groups,
    make_model,
    make_policy,
    make_response,
    make_run,
    make_samples,
    make_trainer,
    measure_alone,
    weights,
)


def train(run, batches):
    trainer = make_trainer(run)
    metrics = [trainer.step(groups, learner_version=0, step=i + 1) for i, groups in enumerate(batches)]
    return metrics, weights(trainer)


def test_the_same_seed_gives_the_same_numbers_bit_for_bit_all_documented_and_finite(tmp_path):
    run, batches = make_run(make_model(tmp_path)), [make_groups(seed=0), make_groups(seed=1)]
    (metrics, found), (again, others) = train(run, batches), train(run, batches)
    assert metrics == again
    assert largest_difference(found, others) == 0
    first, second = metrics
    assert documented(second) == keys_under(STEP, TOKENS) - {"learner/stale_length_ratio"}, "nothing is stale"
    assert set(second) - set(first) == {"learner/grad_cosine"}
    assert all(type(value) is float and np.isfinite(value) for value in second.values())


def test_the_size_of_microbatches_changes_nothing(tmp_path):
    path, batches = make_model(tmp_path), [make_groups(num_groups=4, seed=i) for i in range(2)]
    _, before = train(make_run(path), [])
    terms = gradient_terms(make_policy(), num_tokens=sum(m.num_tokens for batch in batches for g in batch for m in g))
    found = [train(make_run(path, learner={"tokens_per_microbatch": n}), batches) for n in (8192, 64, 100)]
    losses, updates = [], []
    for metrics, after in found:
        losses.append(torch.tensor([row["learner/loss"] for row in metrics]))
        updates.append([after[name] - tensor for name, tensor in before.items()])
    for loss, update in zip(losses[1:], updates[1:], strict=True):
        assert is_rounding([loss], losses[:1], terms=terms)
        assert is_rounding(update, updates[0], terms=terms)


def test_masked_tokens_may_hold_anything(tmp_path):
    def poison(trajectory):
        if trajectory.reward.status != "ok":
            return msgspec.structs.replace(trajectory, reward=Reward(total=1e30, status="error"))
        logprobs = np.where(trajectory.model_mask, trajectory.generator_logprobs, np.float32(1e30))
        return msgspec.structs.replace(trajectory, generator_logprobs=logprobs)

    run = make_run(make_model(tmp_path))
    groups = make_groups()
    groups[0][1] = msgspec.structs.replace(groups[0][1], reward=Reward(total=0.0, status="error"))
    poisoned = [[poison(member) for member in group] for group in groups]
    (clean, clean_weights), (dirty, dirty_weights) = train(run, [groups]), train(run, [poisoned])
    assert clean == dirty
    assert largest_difference(clean_weights, dirty_weights) == 0


@pytest.mark.parametrize("budget", [64, 8192])
def test_numbers_of_tokens_are_those_of_the_policy_before_the_step(tmp_path, budget):
    run = make_run(make_model(tmp_path), learner={"tokens_per_microbatch": budget})
    groups = make_groups(num_groups=4)
    groups[0][1] = msgspec.structs.replace(groups[0][1], reward=Reward(total=0.0, status="error"))
    trainer = make_trainer(run)
    expected = {}
    for member in groups[0] + groups[1] + groups[2]:
        (microbatch,) = trainer.collate(make_samples([member]))
        with torch.no_grad():
            outputs = trainer.engine.forward(microbatch, requested=trainer.objective.requested)
        expected[member.id] = [outputs["logprobs"] + 2, outputs["entropies"]]
    del expected[groups[0][1].id]
    trainer.step(groups, learner_version=0, step=1, num_mixed=1)
    assert trainer.step_tokens.ids == list(expected), "neither a failed one nor those of another run"
    found = torch.tensor(np.stack([trainer.step_tokens.columns[name] for name in ("log_ratio", "entropy")]))
    wanted = [torch.cat(columns) for columns in zip(*expected.values(), strict=True)]
    assert torch.allclose(found, torch.stack(wanted), atol=1e-5)


def test_equal_rewards_move_nothing(tmp_path):
    trainer = make_trainer(make_run(make_model(tmp_path)))
    before = weights(trainer)
    groups = [[make_response(g, i, reward=0.3, response=(5, 6 + i, 1)) for i in range(3)] for g in range(2)]
    metrics = trainer.step(groups, learner_version=0, step=1)
    assert metrics["learner/grad_norm"] == 0
    assert metrics["learner/advantage_zero_fraction"] == 1
    assert largest_difference(before, weights(trainer)) == 0


def test_a_batch_without_a_trainable_token_changes_neither_weights_nor_the_adaptive_kl_coefficient(tmp_path):
    kl = KlConfig(coef=0.1, adaptive=AdaptiveKlConfig(target=0.01, horizon=8))
    trainer = make_trainer(make_run(make_model(tmp_path), algorithm=AlgorithmConfig(kl=kl)))
    before = weights(trainer)
    error = Reward(total=0.0, status="error")
    failed = [[msgspec.structs.replace(make_response(0, i), reward=error) for i in range(2)]]
    metrics = [trainer.step(failed, learner_version=0, step=1)]
    assert (metrics[0]["learner/updates"], trainer.num_updates) == (0, 0)
    assert largest_difference(before, weights(trainer)) == 0
    metrics += [trainer.step(make_groups(), learner_version=0, step=step) for step in (2, 3)]
    coefficients = [each["learner/kl_coefficient"] for each in metrics]
    assert coefficients[:2] == [0.1, 0.1]
    assert coefficients[2] != 0.1


@pytest.mark.parametrize("num_updates", [1, 2])
def test_an_update_whose_tokens_are_all_rejected_is_measured_and_moves_nothing(tmp_path, num_updates):
    correction = CorrectionConfig(level="none", max_weight=None, reject=[RejectionConfig(over="token", low=50.0)])
    algorithm = AlgorithmConfig(correction=correction, updates_per_step=num_updates)
    trainer = make_trainer(make_run(make_model(tmp_path), algorithm=algorithm))
    before = weights(trainer)
    groups = make_groups()
    metrics = trainer.step(groups, learner_version=0, step=1)
    assert (metrics["learner/updates"], trainer.num_updates) == (0, 0)
    assert metrics["learner/kept_fraction"] == metrics["learner/loss"] == 0
    assert metrics["learner/tokens"] == sum(int(member.model_mask.sum()) for group in groups for member in group)
    assert metrics["learner/mismatch_k3"] > 0
    assert largest_difference(before, weights(trainer)) == 0


def test_a_loss_or_gradient_that_is_not_finite_stops_the_step_by_name_and_moves_nothing(tmp_path):
    trainer = make_trainer(make_run(make_model(tmp_path)))
    with torch.no_grad():
        dict(trainer.engine.gather_parameters())["model.norm.weight"].fill_(float("nan"))
    before = weights(trainer)
    with pytest.raises(DivergenceError, match="loss of step 7 must be finite, got nan"):
        trainer.step(make_groups(), learner_version=0, step=7)
    same = {name for name, tensor in weights(trainer).items() if tensor.equal(before[name])}
    assert set(before) - same == {"model.norm.weight"}  # nan is not equal to itself
    trainer = make_trainer(make_run(make_model(tmp_path)))
    trainer.engine.backward = lambda loss: (loss * float("inf")).backward()
    with pytest.raises(DivergenceError, match=r"step 7: the gradient norm must be finite, got (nan|inf)"):
        trainer.step(make_groups(), learner_version=0, step=7)


def test_several_updates_follow_the_schedule_and_leave_the_proximal_policy(tmp_path):
    optimizer = OptimizerConfig(schedule="linear", learning_rate=1e-3)
    learner = {"prompts_per_step": 4, "max_steps": 2, "optimizer": optimizer}
    run = make_run(make_model(tmp_path), learner=learner, algorithm=AlgorithmConfig(updates_per_step=2))
    trainer = make_trainer(run)
    first = trainer.step(make_groups(num_groups=4), learner_version=0, step=1)
    second = trainer.step(make_groups(num_groups=4, seed=1), learner_version=0, step=2)
    assert (first["learner/updates"], trainer.num_updates) == (2, 4)
    assert first["learner/learning_rate"] == pytest.approx(0.75e-3)
    assert second["learner/learning_rate"] == pytest.approx(0.25e-3)
    assert first["learner/ratio_max"] > 1.0


def test_the_update_is_as_small_as_the_effective_sample_size_makes_the_learning_rate(tmp_path):
    path, optimizer, moved = make_model(tmp_path), OptimizerConfig(learning_rate=1e-3), []
    for ess_learning_rate in (False, True):
        algorithm = AlgorithmConfig(proximal="recompute", ess_learning_rate=ess_learning_rate)
        trainer = make_trainer(make_run(path, learner={"optimizer": optimizer}, algorithm=algorithm))
        before = weights(trainer)
        metrics = trainer.step(make_groups(), learner_version=0, step=1)
        moved.append(largest_difference(before, weights(trainer)))
    scale = metrics["learner/learning_rate_scale"]
    assert 0 < scale < 0.9
    assert moved[1] == pytest.approx(scale * moved[0], rel=0.01)


def test_recomputing_and_reusing_the_proximal_policy_agree_for_one_update(tmp_path):
    path, batches = make_model(tmp_path), [make_groups(seed=i) for i in range(2)]
    results = [train(make_run(path, algorithm=AlgorithmConfig(proximal=p)), batches) for p in ("recompute", "reuse")]
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) == 0


def test_the_reference_policy_holds_the_learner_back(tmp_path):
    path, batches = make_model(tmp_path), [make_groups(seed=0)] * 8
    learner, divergence = {"optimizer": OptimizerConfig(learning_rate=3e-3), "max_steps": 8}, {}
    for coefficient in (0.001, 3.0):
        algorithm = AlgorithmConfig(kl=KlConfig(coefficient))
        metrics, _ = train(make_run(path, learner=learner, algorithm=algorithm), batches)
        assert metrics[0]["learner/reference_kl"] == 0
        divergence[coefficient] = metrics[-1]["learner/reference_kl"]
    assert 0 <= divergence[3.0] < 0.5 * divergence[0.001]


def own_logprobs(trainer, trajectory):
    """Log-probabilities of the current policy, 0 for the tokens that it did not write."""
    found = np.zeros(trajectory.num_tokens, np.float32)
    found[trajectory.model_mask] = measure_alone(trainer.engine.model, make_samples([trajectory]))
    return found


def as_sampled_now(trainer, trajectories):
    return [msgspec.structs.replace(each, generator_logprobs=own_logprobs(trainer, each)) for each in trajectories]


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), AlgorithmConfig(policy_loss=ReinforceConfig())])
def test_rewarded_answers_become_likelier_and_others_less_likely(tmp_path, algorithm):
    learner = {"optimizer": OptimizerConfig(learning_rate=1e-3), "max_steps": 20}
    trainer = make_trainer(make_run(make_model(tmp_path), learner=learner, algorithm=algorithm))
    good = make_response(0, 0, response=(5, 6, 7, 1), reward=1.0)
    bad = make_response(0, 1, response=(9, 8, 7, 1), reward=0.0)
    before = [own_logprobs(trainer, each).sum() for each in (good, bad)]
    for step in range(20):
        trainer.step([as_sampled_now(trainer, [good, bad])], learner_version=0, step=step + 1)
    after = [own_logprobs(trainer, each).sum() for each in (good, bad)]
    assert after[0] > before[0] + 0.5
    assert after[1] < before[1] - 0.5


def test_fresh_trajectories_have_ratio_one_and_no_mismatch(tmp_path):
    trainer = make_trainer(make_run(make_model(tmp_path)))
    groups = [as_sampled_now(trainer, group) for group in make_groups()]
    metrics = trainer.step(groups, learner_version=0, step=1)
    assert metrics["learner/mismatch_max"] < 1e-4
    assert metrics["learner/ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["learner/weight_mean"] == pytest.approx(1.0, abs=1e-5)


def test_the_canary_sequences_depend_on_the_seed_alone():
    run = make_run("model")
    first, again = (canary_token_ids(run, vocab_size=VOCABULARY) for _ in range(2))
    assert first.shape == (4, 16)
    assert (first == again).all()
    other = msgspec.structs.replace(run, seed=run.seed + 1)
    assert (first != canary_token_ids(other, vocab_size=VOCABULARY)).any()
