import msgspec
import numpy as np
import pytest
import torch

from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs.advantages import GaeConfig, VtraceConfig
from slipstream.configs.algorithm import (
    AdaptiveKlConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    CriticOptimizerConfig,
    KlConfig,
)
from slipstream.configs.learner import OptimizerConfig, TorchEngineConfig
from slipstream.learner.checkpoint import Checkpoints
from slipstream.learner.errors import CheckpointError, DivergenceError, ModelError
from tests.metric_docs import CRITIC, keys_under
from tests.tiny_model import make_tiny_module, make_tokenizer
from tests.tolerance import largest_difference
from tests.unit.learner.builders import (
    critic_weights,
    make_alone,
    make_groups,
    make_model,
    make_response,
    make_run,
    make_trainer,
    save,
    weights,
    zero,
)

CRITIC_METRICS = keys_under(CRITIC)
QUICK = CriticOptimizerConfig(learning_rate=1e-3)


def make_critic_run(tmp_path, *, learner=None, advantage=None, critic=None, **algorithm):
    return make_run(
        make_model(tmp_path),
        learner=learner,
        algorithm=AlgorithmConfig(
            advantage=advantage or GaeConfig(lam=0.95),
            critic=CriticConfig(**({"optimizer": QUICK} | (critic or {}))),
            **algorithm,
        ),
    )


def train(run, *, steps=2, num_groups=2):
    trainer = make_trainer(run)
    batches = [make_groups(num_groups=num_groups, seed=seed) for seed in range(steps)]
    metrics = [trainer.step(groups, learner_version=0, step=i + 1) for i, groups in enumerate(batches)]
    return trainer, metrics


def policy_weights(trainer):
    return {name: tensor for name, tensor in weights(trainer).items() if not name.startswith("critic.")}


def test_a_step_reports_and_moves_the_critic(tmp_path):
    trainer, metrics = train(make_critic_run(tmp_path))
    before = dict(make_trainer(make_critic_run(tmp_path)).critic.engine.gather_parameters())
    assert set(metrics[0]) >= CRITIC_METRICS
    assert all(type(metrics[1][key]) is float and np.isfinite(metrics[1][key]) for key in CRITIC_METRICS)
    assert metrics[0]["learner/critic_value_mean"] == 0
    assert metrics[1]["learner/critic_value_mean"] != 0
    assert largest_difference(critic_weights(trainer), before) > 0
    assert trainer.critic.num_updates == trainer.num_updates == 2


def test_without_a_critic_nothing_of_it_is_there(tmp_path):
    trainer, metrics = train(make_run(make_model(tmp_path)))
    assert trainer.critic is None
    assert not CRITIC_METRICS & set(metrics[0])


def test_the_first_loss_is_half_the_mean_square_of_the_returns(tmp_path):
    trainer = make_trainer(make_critic_run(tmp_path, critic={"clip": None}))
    groups = [[make_response(0, 0, reward=1.0, response=(5, 6, 1)), make_response(0, 1, reward=0.4, response=(7,))]]
    metrics = trainer.step(groups, learner_version=0, step=1)
    assert metrics["learner/critic_loss"] == pytest.approx(0.5 * (3 * 1.0 + 0.16) / 4)
    assert metrics["learner/critic_clip_fraction"] == 0
    assert metrics["learner/critic_explained_variance"] == 0


def reward_of(response):
    """Rewards that depend on two of the tokens, so that they are predictable from then on."""
    return 1.0 * (response[0] == 30) + 0.5 * (response[1] == 30)


def make_predictable(seed):
    random = np.random.default_rng(seed)
    answers = [tuple(random.choice([5, 30], size=4).tolist()) for _ in range(16)]
    return [
        [make_response(group, index, response=answer, reward=reward_of(answer)) for index, answer in enumerate(part)]
        for group, part in enumerate((answers[:8], answers[8:]))
    ]


def test_values_come_to_predict_returns_that_can_be_predicted(tmp_path):
    critic = {"warmup_steps": 40, "optimizer": CriticOptimizerConfig(learning_rate=3e-3)}
    trainer = make_trainer(make_critic_run(tmp_path, critic=critic, learner={"max_steps": 40}))
    explained = [
        trainer.step(make_predictable(step), learner_version=0, step=step + 1)["learner/critic_explained_variance"]
        for step in range(40)
    ]
    assert abs(explained[0]) < 0.05
    # The first of four tokens reveals nothing yet, the second a fifth, so at most 0.7 can be explained.
    assert np.mean(explained[-5:]) > 0.5


def test_the_clip_holds_values_that_an_earlier_update_of_the_step_has_moved(tmp_path):
    def second_step(clip):
        critic = {"clip": clip, "optimizer": CriticOptimizerConfig(learning_rate=3e-3)}
        _, metrics = train(make_critic_run(tmp_path, critic=critic, learner={"groups_per_step": 2}, updates_per_step=2))
        return metrics[1]

    loose, tight = second_step(None), second_step(1e-3)
    assert loose["learner/critic_clip_fraction"] == 0
    assert tight["learner/critic_clip_fraction"] > 0
    assert tight["learner/critic_grad_norm"] < loose["learner/critic_grad_norm"]


def test_the_warm_up_teaches_the_critic_alone(tmp_path):
    learner = {"max_steps": 4, "optimizer": OptimizerConfig(schedule="linear", learning_rate=1e-3)}
    kl = KlConfig(0.1, adaptive=AdaptiveKlConfig(0.01, horizon=10))
    run = make_critic_run(tmp_path, critic={"warmup_steps": 2}, learner=learner, kl=kl)
    fresh, (trainer, metrics) = make_trainer(run), train(run)
    assert largest_difference(policy_weights(fresh), policy_weights(trainer)) == 0
    assert largest_difference(critic_weights(fresh), critic_weights(trainer)) > 0
    assert [m["learner/updates"] for m in metrics] == [0, 0]
    assert [m["learner/grad_norm"] for m in metrics] == [0, 0]
    assert metrics[1]["learner/ratio_mean"] == pytest.approx(1), "the policy is measured all the same"
    assert metrics[1]["learner/kl_coefficient"] == 0.1, "and what is adaptive does not adapt to its standing still"
    third = trainer.step(make_groups(seed=2), learner_version=0, step=3)
    assert largest_difference(policy_weights(fresh), policy_weights(trainer)) > 0
    assert third["learner/learning_rate"] == pytest.approx(1e-3), "the policy's schedule begins with the policy"
    assert (trainer.num_updates, trainer.critic.num_updates) == (1, 3)


def test_the_critic_may_begin_from_another_checkpoint(tmp_path):
    run = make_critic_run(tmp_path, critic={"path": str(make_model(tmp_path, seed=3))})
    trunk = {f"trunk.{name}": p for name, p in make_tiny_module(seed=3).model.named_parameters()}
    found = critic_weights(make_trainer(run))
    assert all(parameter.equal(found[name]) for name, parameter in trunk.items())


def test_a_critic_of_another_vocabulary_is_refused(tmp_path):
    other = make_tiny_module()
    other.resize_token_embeddings(len(make_tokenizer()) + 1)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"algorithm\.critic\.path must name a model with the policy's vocabulary"):
        make_trainer(make_critic_run(tmp_path, critic={"path": str(tmp_path / "other")}))


def test_tokens_that_are_not_trained_on_may_hold_anything(tmp_path):
    def claimed(logprob, reward):
        old = make_response(0, 0, reward=1.0, version_spans=[VersionSpan(4, 0), VersionSpan(6, 9)])
        old.generator_logprobs[4:6] = logprob
        failed = msgspec.structs.replace(make_response(0, 2), reward=Reward(total=reward, status="error"))
        return [[old, make_response(0, 1, response=(9, 9), version=9), failed]]

    run = make_critic_run(tmp_path)
    trainers = [make_trainer(run) for _ in range(2)]
    batches = [claimed(-1.0, 0.0), claimed(-1e30, 1e30)]
    metrics = [t.step(b, learner_version=9, step=1) for t, b in zip(trainers, batches, strict=True)]
    assert metrics[0] == metrics[1]
    assert largest_difference(*map(critic_weights, trainers)) == 0


def test_tokens_that_the_correction_rejects_teach_the_critic_nothing(tmp_path):
    groups = make_groups()
    drifted = [msgspec.structs.replace(groups[0][0], generator_logprobs=groups[0][0].generator_logprobs - 30)]
    batch = [drifted + groups[0][1:], groups[1]]
    results = []
    for reward in (0.0, 5.0):
        batch[0][0] = msgspec.structs.replace(batch[0][0], reward=Reward(total=reward))
        run = make_critic_run(
            tmp_path,
            advantage=GaeConfig(epsilon=None),
            correction=CorrectionConfig(veto=(1e-6, 1e6), rebaseline=True, denominator="kept"),
        )
        trainer = make_trainer(run)
        metrics = trainer.step(batch, learner_version=0, step=1)
        results.append((metrics["learner/critic_loss"], critic_weights(trainer)))
    assert metrics["learner/kept_fraction"] < 1
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) == 0


@pytest.mark.parametrize("num_updates", [1, 2])
def test_the_size_of_microbatches_changes_nothing(tmp_path, num_updates):
    results = [
        train(
            make_critic_run(
                tmp_path,
                advantage=VtraceConfig(),
                correction=CorrectionConfig(level="none", high=None),
                updates_per_step=num_updates,
                learner={"tokens_per_microbatch": budget, "groups_per_step": 4},
            ),
            num_groups=4,
        )
        for budget in (8192, 64)
    ]
    (whole, expected), (split, metrics) = results
    assert largest_difference(weights(whole), weights(split)) < 1e-5
    for key in CRITIC_METRICS:
        assert metrics[1][key] == pytest.approx(expected[1][key], rel=1e-4, abs=1e-5), key


def test_a_value_that_is_not_finite_stops_the_step_and_names_the_critic(tmp_path):
    trainer = make_trainer(make_critic_run(tmp_path, advantage=GaeConfig(), critic={"warmup_steps": 9}))
    trainer.critic.fill_values = lambda batch, _: batch.with_tokens(
        values=torch.zeros_like(batch.tokens.generator_logprobs)
    )
    with torch.no_grad():
        dict(trainer.critic.engine.gather_parameters())["head.bias"].fill_(float("nan"))
    with pytest.raises(
        DivergenceError, match=r"the critic's loss of step 7 .*algorithm\.critic\.optimizer\.learning_rate"
    ):
        trainer.step(make_groups(), learner_version=0, step=7)


@pytest.mark.parametrize("engine", [TorchEngineConfig(), zero(2), zero(3)], ids=["torch", "2", "3"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, engine):
    critic = {"warmup_steps": 1, "optimizer": CriticOptimizerConfig(learning_rate=1e-3, schedule="linear")}
    run = make_critic_run(tmp_path, critic=critic, learner={"engine": engine, "max_steps": 4})

    def steps(trainer, numbers):
        return [trainer.step(make_groups(seed=i), learner_version=i, step=i + 1) for i in numbers]

    straight, first, resumed = (make_trainer(run) for _ in range(3))
    expected = steps(straight, range(4))[2:]
    steps(first, range(2))
    folder = tmp_path / "checkpoints"
    name = save(Checkpoints(folder, run=run, trainer=first, ranks=make_alone()), step=2)
    Checkpoints(folder, run=run, trainer=resumed, ranks=make_alone()).restore(name)
    found = steps(resumed, range(2, 4))
    for one, other in zip(expected, found, strict=True):
        shared = one.keys() & other.keys()
        assert {key: one[key] for key in shared} == {key: other[key] for key in shared}
        assert shared >= CRITIC_METRICS
    assert largest_difference(weights(straight), weights(resumed)) == 0


def test_a_checkpoint_without_a_critic_cannot_be_resumed_with_one(tmp_path):
    plain = make_run(make_model(tmp_path))
    checkpoints = Checkpoints(tmp_path / "checkpoints", run=plain, trainer=make_trainer(plain), ranks=make_alone())
    name = save(checkpoints, step=1)
    assert not (tmp_path / "checkpoints" / name / "critic").exists()
    run = make_critic_run(tmp_path)
    other = Checkpoints(tmp_path / "checkpoints", run=run, trainer=make_trainer(run), ranks=make_alone())
    with pytest.raises(CheckpointError, match=r"must hold the critic that algorithm\.advantage needs"):
        other.restore(name)


def test_a_checkpoints_critic_can_begin_another_run(tmp_path):
    run = make_critic_run(tmp_path)
    trainer, _ = train(run)
    name = save(Checkpoints(tmp_path / "checkpoints", run=run, trainer=trainer, ranks=make_alone()), step=2)
    path = tmp_path / "checkpoints" / name / "critic" / "model"
    other = make_trainer(make_critic_run(tmp_path, critic={"path": str(path)}))
    assert largest_difference(critic_weights(trainer), critic_weights(other)) == 0
