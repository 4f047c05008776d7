import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

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
from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.batching.collate import Layout
from slipstream.learner.engines.engine import ModelEngine
from slipstream.learner.errors import DivergenceError, ModelError
from slipstream.learner.training.critic import ValueModel, load_value_model
from slipstream.learner.training.saved_model import save_model
from tests.metric_docs import CRITIC, keys_under
from tests.tiny_model import make_tiny_module, make_tokenizer
from tests.tolerance import gradient_terms, is_rounding, largest_difference
from tests.unit.learner.builders import (
    CPU,
    make_alone,
    make_groups,
    make_model,
    make_response,
    make_run,
    make_samples,
    make_trainer,
    measure,
    members_of,
    model_config,
    second_weights,
    weights,
)

CRITIC_METRICS = keys_under(CRITIC)
QUICK = CriticOptimizerConfig(learning_rate=1e-3)


def make_critic_run(tmp_path, *, learner=None, advantage=None, critic=None, **algorithm):
    critic = CriticConfig(**({"optimizer": QUICK} | (critic or {})))
    config = AlgorithmConfig(advantage=advantage or GaeConfig(lam=0.95), critic=critic, **algorithm)
    return make_run(make_model(tmp_path), learner=learner, algorithm=config)


def train(run, *, steps=2, num_groups=2):
    trainer = make_trainer(run)
    batches = [make_groups(num_groups=num_groups, seed=seed) for seed in range(steps)]
    metrics = [trainer.step(groups, learner_version=0, step=i + 1) for i, groups in enumerate(batches)]
    return trainer, metrics


def policy_weights(trainer):
    return dict(trainer.engine.gather_parameters())


def test_a_step_reports_and_moves_the_critic_and_without_one_nothing_of_it_is_there(tmp_path):
    trainer, metrics = train(make_critic_run(tmp_path))
    before = dict(make_trainer(make_critic_run(tmp_path)).second_model.engine.gather_parameters())
    assert set(metrics[0]) >= CRITIC_METRICS
    assert all(type(metrics[1][key]) is float and np.isfinite(metrics[1][key]) for key in CRITIC_METRICS)
    assert metrics[0]["learner/critic_value_mean"] == 0
    assert metrics[1]["learner/critic_value_mean"] != 0
    assert largest_difference(second_weights(trainer), before) > 0
    assert trainer.second_model.num_updates == trainer.num_updates == 2
    plain, metrics = train(make_run(make_model(tmp_path)), steps=1)
    assert plain.second_model is None
    assert not CRITIC_METRICS & set(metrics[0])


def test_the_first_loss_is_half_the_mean_square_of_the_returns(tmp_path):
    trainer = make_trainer(make_critic_run(tmp_path, critic={"value_clip": None}))
    groups = [[make_response(0, 0, reward=1.0, response=(5, 6, 1)), make_response(0, 1, reward=0.4, response=(7,))]]
    metrics = trainer.step(groups, learner_version=0, step=1)
    assert metrics["learner/critic_loss"] == pytest.approx(0.5 * (3 * 1.0 + 0.16) / 4)
    assert metrics["learner/critic_clip_fraction"] == 0
    assert metrics["learner/critic_explained_variance"] == 0


def make_predictable(seed):
    """Rewards depend on two of the tokens, so they are predictable from then on."""
    random = np.random.default_rng(seed)
    groups = []
    for group in range(2):
        answers = [tuple(random.choice([5, 30], size=4).tolist()) for _ in range(8)]
        rewards = [1.0 * (answer[0] == 30) + 0.5 * (answer[1] == 30) for answer in answers]
        pairs = enumerate(zip(answers, rewards, strict=True))
        groups.append([make_response(group, i, response=answer, reward=reward) for i, (answer, reward) in pairs])
    return groups


def test_values_come_to_predict_returns_that_can_be_predicted(tmp_path):
    critic = {"warmup_steps": 40, "optimizer": CriticOptimizerConfig(learning_rate=3e-3)}
    trainer = make_trainer(make_critic_run(tmp_path, critic=critic, learner={"max_steps": 40}))
    metrics = [trainer.step(make_predictable(step), learner_version=0, step=step + 1) for step in range(40)]
    explained = [row["learner/critic_explained_variance"] for row in metrics]
    assert abs(explained[0]) < 0.05
    # The first of four tokens reveals nothing yet, the second a fifth, so at most 0.7 can be explained.
    assert np.mean(explained[-5:]) > 0.5


def test_the_clip_holds_values_that_an_earlier_update_of_the_step_has_moved(tmp_path):
    def second_step(clip):
        critic = {"value_clip": clip, "optimizer": CriticOptimizerConfig(learning_rate=3e-3)}
        return train(make_critic_run(tmp_path, critic=critic, updates_per_step=2))[1][1]

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
    assert largest_difference(second_weights(fresh), second_weights(trainer)) > 0
    assert [m["learner/updates"] for m in metrics] == [0, 0]
    assert [m["learner/grad_norm"] for m in metrics] == [0, 0]
    assert metrics[1]["learner/ratio_mean"] == pytest.approx(1), "the policy is measured all the same"
    assert metrics[1]["learner/kl_coefficient"] == 0.1, "and what is adaptive does not adapt to its standing still"
    third = trainer.step(make_groups(seed=2), learner_version=0, step=3)
    assert largest_difference(policy_weights(fresh), policy_weights(trainer)) > 0
    assert third["learner/learning_rate"] == pytest.approx(1e-3), "the policy's schedule begins with the policy"
    assert (trainer.num_updates, trainer.second_model.num_updates) == (1, 3)


def test_the_critic_may_begin_from_another_checkpoint_of_the_same_vocabulary(tmp_path):
    run = make_critic_run(tmp_path, critic={"path": str(make_model(tmp_path, seed=3))})
    trunk = {f"trunk.{name}": p for name, p in make_tiny_module(seed=3).model.named_parameters()}
    found = second_weights(make_trainer(run))
    assert all(parameter.equal(found[name]) for name, parameter in trunk.items())
    other = make_tiny_module()
    other.resize_token_embeddings(len(make_tokenizer()) + 1)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"algorithm\.critic\.path must name a model with the policy's vocabulary"):
        make_trainer(make_critic_run(tmp_path, critic={"path": str(tmp_path / "other")}))


def test_tokens_that_are_not_trained_on_may_hold_anything(tmp_path):
    results = []
    for logprob, reward in ((-1.0, 0.0), (-1e30, 1e30)):
        old = make_response(0, 0, reward=1.0, version_spans=[VersionSpan(4, 0), VersionSpan(6, 9)])
        old.generator_logprobs[4:6] = logprob
        failed = msgspec.structs.replace(make_response(0, 2), reward=Reward(total=reward, status="error"))
        trainer = make_trainer(make_critic_run(tmp_path))
        groups = [[old, make_response(0, 1, response=(9, 9), version=9), failed]]
        results.append((trainer.step(groups, learner_version=9, step=1), second_weights(trainer)))
    (metrics, found), (others, poisoned) = results
    assert metrics == others
    assert largest_difference(found, poisoned) == 0


def test_tokens_that_the_correction_rejects_teach_the_critic_nothing(tmp_path):
    correction = CorrectionConfig(veto=(1e-6, 1e6), loss_denominator="kept_tokens")
    run = make_critic_run(tmp_path, advantage=GaeConfig(), correction=correction)
    groups, results = make_groups(), []
    logprobs = groups[0][0].generator_logprobs - 30
    for reward in (0.0, 5.0):
        groups[0][0] = msgspec.structs.replace(groups[0][0], generator_logprobs=logprobs, reward=Reward(total=reward))
        trainer = make_trainer(run)
        metrics = trainer.step(groups, learner_version=0, step=1)
        assert metrics["learner/kept_fraction"] < 1
        results.append((metrics["learner/critic_loss"], second_weights(trainer)))
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) == 0


@pytest.mark.parametrize("num_updates", [1, 2])
def test_the_size_of_microbatches_changes_nothing(tmp_path, num_updates):
    algorithm = {"advantage": VtraceConfig(), "correction": CorrectionConfig(level="none", max_weight=None)}
    results = []
    for budget in (8192, 64):
        learner = {"tokens_per_microbatch": budget, "prompts_per_step": 4}
        run = make_critic_run(tmp_path, updates_per_step=num_updates, learner=learner, **algorithm)
        results.append(train(run, num_groups=4))
    (whole, expected), (split, metrics) = results
    assert largest_difference(weights(whole), weights(split)) < 1e-5
    for key in CRITIC_METRICS:
        assert metrics[1][key] == pytest.approx(expected[1][key], rel=1e-4, abs=1e-5), key


def test_a_value_that_is_not_finite_stops_the_step_and_names_the_critic(tmp_path):
    trainer = make_trainer(make_critic_run(tmp_path, advantage=GaeConfig(), critic={"warmup_steps": 9}))

    def fill(batch, _, step):
        return batch.with_tokens(values=torch.zeros_like(batch.tokens.generator_logprobs)), {}

    trainer.second_model.fill = fill
    with torch.no_grad():
        dict(trainer.second_model.engine.gather_parameters())["head.bias"].fill_(float("nan"))
    named = r"the critic's loss of step 7 .*algorithm\.critic\.optimizer\.learning_rate"
    with pytest.raises(DivergenceError, match=named):
        trainer.step(make_groups(), learner_version=0, step=7)


WHOLE = Layout("shared_rows", 8192)


def load(path, **settings):
    return load_value_model(model_config(path, **settings), device=CPU)


def make_value_model(**settings):
    model = ValueModel(make_tiny_module(**settings).model.train())
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.head.bias)
    return model


def values_packed(model, trajectories, layout=WHOLE):
    return measure(model, make_samples(trajectories), layout, name="values")


def values_alone(model, trajectory):
    """Values of a trajectory alone, each from the tokens before its model-written token."""
    token_ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    indices = np.flatnonzero(trajectory.model_mask)
    hidden = [model.trunk(input_ids=token_ids[None, :index]).last_hidden_state[0, -1] for index in indices]
    return model.head(torch.stack(hidden))[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("layout", [WHOLE, Layout("shared_rows", 64), Layout("shared_rows", 48, row_tokens=32)])
def test_values_of_packed_sequences_are_those_of_each_alone(layout):
    model, trajectories = make_value_model(), members_of(make_groups(num_groups=3))
    expected = torch.cat([values_alone(model, trajectory) for trajectory in trajectories])
    found = values_packed(model, trajectories, layout)
    assert is_rounding([found], [expected], terms=gradient_terms(model, num_tokens=0))
    assert float(expected.std()) > 0.1


@torch.no_grad()
def test_a_value_does_not_see_the_token_that_follows_and_a_tools_tokens_are_read_and_have_none():
    model = make_value_model()
    first, second = (values_packed(model, [make_response(response=r)]) for r in ((5, 6, 7, 1), (5, 6, 9, 8)))
    assert first[:3].equal(second[:3])
    assert first[3] != second[3]
    mask = np.array([False] * 4 + [True, True, False, False, True, True])
    tool, other = (make_response(response=(5, 6, read, 21, 7, 1), model_mask=mask) for read in (20, 22))
    values = values_packed(model, [tool])
    assert torch.allclose(values, values_alone(model, tool), atol=1e-5)
    assert len(values) == 4
    assert values[2] != values_packed(model, [other])[2]


def test_it_begins_with_the_policys_trunk_and_zeros_and_returns_float32_even_in_bfloat16(tmp_path):
    model, trunk = load(make_model(tmp_path)), make_tiny_module().model
    assert all(a.equal(b) for a, b in zip(model.trunk.parameters(), trunk.parameters(), strict=True))
    values = values_packed(model, make_groups()[0])
    assert values.dtype == torch.float32
    assert not values.any()
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    rough, exact = load(make_model(tmp_path), dtype="bfloat16"), load(make_model(tmp_path))
    for model in (rough, exact):
        torch.nn.init.constant_(model.head.weight, 0.1)
    assert {parameter.dtype for parameter in rough.parameters()} == {torch.bfloat16}
    found, expected = (values_packed(model, make_groups()[0]) for model in (rough, exact))
    assert found.dtype == torch.float32
    assert 0 < float((found - expected).abs().max()) < 0.2


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_what_is_saved_is_what_is_loaded_and_without_its_head_it_does_not_begin_at_zero(tmp_path, is_tied):
    model = make_value_model(is_tied=is_tied)
    save_model(ModelEngine(model), tmp_path / "saved", config=model_config(tmp_path / "saved"), ranks=make_alone())
    assert largest_difference(dict(load(tmp_path / "saved").weights()), dict(model.weights())) == 0
    (tmp_path / "saved" / "value_head.safetensors").unlink()
    with pytest.raises(ModelError, match=r"algorithm\.critic\.path .* got a trunk without a head in .*saved.*: copy"):
        load(tmp_path / "saved")


def test_a_checkpoint_without_a_trunk_is_one_sentence(tmp_path):
    path = make_model(tmp_path)
    head = {"lm_head.weight": load_file(path / "model.safetensors")["lm_head.weight"]}
    save_file(head, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"algorithm\.critic\.path .*a trunk and an lm_head.*lacks 26") as caught:
        load(path)
    assert "\n" not in str(caught.value)
