import copy
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs import algorithm as configs
from slipstream.configs.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig
from slipstream.configs.algorithm_terms import GaeConfig, PrimeConfig
from slipstream.configs.base import ConfigError
from slipstream.configs.data import LoraConfig
from slipstream.configs.learner import OptimizerConfig
from slipstream.learner.batching.collate import Layout
from slipstream.learner.engines.engine import ModelEngine
from slipstream.learner.errors import CheckpointError, DivergenceError, ModelError
from slipstream.learner.training.saved_model import save_model
from slipstream.learner.training.second_model import ValueModel, load_value_model
from tests.cases import cases
from tests.metric_docs import CRITIC, PROCESS_REWARD, keys_under
from tests.tiny_model import make_tiny_module, make_tokenizer
from tests.tolerance import gradient_terms, is_rounding, largest_difference
from tests.unit.learner.builders import (
    CPU,
    make_alone,
    make_checkpoints,
    make_groups,
    make_model,
    make_response,
    make_run,
    make_samples,
    make_trainer,
    measure,
    members_of,
    model_config,
    save,
    second_weights,
    train_steps,
)

CRITIC_METRICS = keys_under(CRITIC)
QUICK = configs.CriticOptimizerConfig(learning_rate=1e-3)


def make_critic_run(tmp_path, *, learner=None, advantage=None, critic=None, **algorithm):
    critic = configs.CriticConfig(**({"optimizer": QUICK} | (critic or {})))
    config = AlgorithmConfig(advantage=advantage or GaeConfig(lam=0.95), critic=critic, **algorithm)
    return make_run(make_model(tmp_path), learner=learner, algorithm=config)


def train(run, *, steps=2):
    trainer = make_trainer(run)
    return trainer, train_steps(trainer, range(steps))


def policy_weights(trainer):
    return dict(trainer.engine.gather_parameters())


def test_a_step_reports_and_moves_the_critic_and_the_first_loss_is_half_the_mean_square_of_the_returns(tmp_path):
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
    critic = {"warmup_steps": 40, "optimizer": configs.CriticOptimizerConfig(learning_rate=3e-3)}
    trainer = make_trainer(make_critic_run(tmp_path, critic=critic, learner={"max_steps": 40}))
    metrics = [trainer.step(make_predictable(step), learner_version=0, step=step + 1) for step in range(40)]
    explained = [row["learner/critic_explained_variance"] for row in metrics]
    assert abs(explained[0]) < 0.05
    # The first of four tokens reveals nothing yet, the second a fifth, so at most 0.7 can be explained.
    assert np.mean(explained[-5:]) > 0.5


def test_the_clip_holds_values_that_an_earlier_update_of_the_step_has_moved(tmp_path):
    def second_step(clip):
        critic = {"value_clip": clip, "optimizer": configs.CriticOptimizerConfig(learning_rate=3e-3)}
        return train(make_critic_run(tmp_path, critic=critic, updates_per_step=2))[1][1]

    loose, tight = second_step(None), second_step(1e-3)
    assert loose["learner/critic_clip_fraction"] == 0
    assert tight["learner/critic_clip_fraction"] > 0
    assert tight["learner/critic_grad_norm"] < loose["learner/critic_grad_norm"]


def test_the_warm_up_teaches_the_critic_alone(tmp_path):
    learner = {"max_steps": 4, "optimizer": OptimizerConfig(schedule="linear", learning_rate=1e-3)}
    kl = KlConfig(0.1, adaptive=configs.AdaptiveKlConfig(0.01, horizon=10))
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


def test_tokens_that_are_masked_or_rejected_teach_the_critic_nothing(tmp_path):
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
def test_tokens_of_a_tool_are_read_and_have_no_value():
    model = make_value_model()
    mask = np.array([False] * 4 + [True, True, False, False, True, True])
    tool, other = (make_response(response=(5, 6, read, 21, 7, 1), model_mask=mask) for read in (20, 22))
    values = values_packed(model, [tool])
    assert torch.allclose(values, values_alone(model, tool), atol=1e-5)
    assert len(values) == 4
    assert values[2] != values_packed(model, [other])[2]


def test_values_are_float32_even_in_bfloat16(tmp_path):
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


METRICS = keys_under(PROCESS_REWARD)
BETA, RATE, GAMMA = 0.05, 1e-3, 0.9
SMOOTH_PRIME = configs.ProcessRewardOptimizerConfig(learning_rate=RATE, epsilon=1e-3, max_grad_norm=1e9)
"""The large epsilon makes an update a smooth function of the gradient."""


def make_prime_run(tmp_path, *, learner=None, process_reward=None, model=None, **algorithm):
    config = configs.ProcessRewardConfig(**({"optimizer": SMOOTH_PRIME, "beta": BETA} | (process_reward or {})))
    chosen = AlgorithmConfig(advantage=PrimeConfig(gamma=GAMMA), process_reward=config, **algorithm)
    path = make_model(tmp_path)
    return make_run(path, learner=learner, algorithm=chosen, model=model or model_config(path))


def make_mixed_groups(seed=0):
    """Groups of three and two, one answer of two contexts, and one with a failed reward.

    Together, the two contexts exceed a microbatch of 64 tokens.
    """
    first, second = make_groups(num_groups=2, group_size=4, seed=seed, longest=7)
    failed = msgspec.structs.replace(first[3], reward=Reward(total=1e30, is_correct=True, status="error"))
    tokens = tuple(np.random.default_rng(seed).integers(2, 30, 70).tolist())
    two = make_response(1, 1, reward=0.9, prompt=(4, 8), response=tokens, context_starts=[36])
    return [[*first[:3], failed], [second[0], two]]


def pieces(trajectory):
    starts = [0, *trajectory.context_starts, len(trajectory.token_ids)]
    for start, end in pairwise(starts):
        trained = np.flatnonzero(trajectory.model_mask[start:end])
        yield torch.from_numpy(trajectory.token_ids[start:end].astype(np.int64)), trained[trained > 0]


def token_rewards(model, reference, trajectory):
    """beta * log-ratio of each trained token, from transformers and one context at a time."""
    found = []
    for token_ids, trained in pieces(trajectory):
        logprobs, anchors = (m(input_ids=token_ids[None]).logits[0].log_softmax(-1) for m in (model, reference))
        found += [BETA * (logprobs[t - 1] - anchors[t - 1].detach())[token_ids[t]] for t in trained]
    return torch.stack(found)


class Textbook:
    """PRIME with plain loops: the model learns, then rewards tokens."""

    def __init__(self, path):
        self.reference = AutoModelForCausalLM.from_pretrained(path).eval()
        self.model = copy.deepcopy(self.reference)
        config = SMOOTH_PRIME
        decay = {"weight_decay": config.weight_decay, "betas": tuple(config.betas), "eps": config.epsilon}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, **decay)
        self.gradients = {}

    def step(self, groups):
        """Loss, and the advantages of the tokens of answers with a reward."""
        valid = [[t for t in group if t.reward.status != "error"] for group in groups]
        losses = []
        for trajectory in (t for group in valid for t in group):
            score = token_rewards(self.model, self.reference, trajectory).sum()
            losses.append(-logsigmoid(score if trajectory.reward.is_correct else -score))
        loss = torch.stack(losses).mean()
        loss.backward()
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            return loss.item(), torch.cat([self.advantages(t, group) for group in valid for t in group])

    def advantages(self, trajectory, group):
        others = [t for t in group if t is not trajectory]
        outcome = trajectory.reward.total - np.mean([t.reward.total for t in others])
        base = np.mean([float(token_rewards(self.model, self.reference, t).mean()) for t in others])
        own = [float(reward) - base for reward in token_rewards(self.model, self.reference, trajectory)]
        steps = range(len(own))
        return torch.tensor([outcome + sum(GAMMA ** (s - t) * own[s] for s in steps[t:]) for t in steps])


@pytest.mark.parametrize("budget", [8192, 64], ids=["whole", "split"])
def test_two_steps_match_a_textbook_loop(tmp_path, budget):
    trainer = make_trainer(make_prime_run(tmp_path, learner={"tokens_per_microbatch": budget}))
    book, batches, gradients = Textbook(make_model(tmp_path)), [], {}
    prepare, engine = trainer.objective.prepare, trainer.second_model.engine

    def record(*_):
        gradients.update({name: p.grad.clone() for name, p in engine.model.causal_lm.named_parameters()})

    trainer.objective.prepare = lambda batch: batches.append(prepare(batch)) or batches[-1]
    engine.optimizer.register_step_pre_hook(record)
    for step in range(2):
        groups = make_mixed_groups(seed=step)
        metrics = trainer.step(groups, learner_version=0, step=step + 1)
        loss, advantages = book.step(groups)
        num_tokens = sum(len(t.token_ids) for group in groups for t in group)
        terms = gradient_terms(book.model, num_tokens=num_tokens)
        assert metrics["learner/process_reward_loss"] == pytest.approx(loss, abs=1e-5)
        found = batches[-1].tokens.advantages
        assert is_rounding([found], [advantages], terms=terms)
        assert float((found - advantages).abs().max()) < 1e-5
        # The second step's weights already differ by the rounding of Adam's first.
        assert largest_difference(gradients, book.gradients) < 1e-5
        assert float(max(tensor.abs().max() for tensor in book.gradients.values())) > 1e-3
        assert largest_difference(second_weights(trainer), dict(book.model.named_parameters())) < 1e-5
    assert metrics.keys() >= METRICS
    assert trainer.second_model.num_updates == trainer.num_updates == 2


def test_each_update_learns_from_its_own_answers_that_have_a_reward_and_a_trained_token(tmp_path):
    trainer, before = make_trainer(make_prime_run(tmp_path)), make_trainer(make_prime_run(tmp_path))
    failed = [[msgspec.structs.replace(t, reward=Reward(total=0.0, status="error")) for t in g] for g in make_groups()]
    metrics = trainer.step(failed, learner_version=0, step=1)
    assert [metrics[key] for key in sorted(METRICS)] == [0, 0, 0]
    assert largest_difference(second_weights(trainer), second_weights(before)) == 0
    learner = {"prompts_per_step": 2}
    trainer = make_trainer(make_prime_run(tmp_path, learner=learner, updates_per_step=2))
    groups = make_groups(num_groups=2)
    metrics = trainer.step(groups, learner_version=0, step=1)
    assert trainer.second_model.num_updates == 2
    book = Textbook(make_model(tmp_path))
    losses = [book.step([group])[0] for group in groups]
    assert metrics["learner/process_reward_loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert largest_difference(second_weights(trainer), dict(book.model.named_parameters())) < 1e-5


@pytest.mark.parametrize(("name", "make"), [("critic", make_critic_run), ("process_reward", make_prime_run)])
def test_a_saved_second_model_begins_another_run_and_a_checkpoint_without_it_is_refused(tmp_path, name, make):
    _, plain = make_checkpoints(make_run(make_model(tmp_path)), tmp_path)
    saved = save(plain, step=1)
    assert not (tmp_path / "checkpoints" / saved / name).exists()
    trainer, checkpoints = make_checkpoints(make(tmp_path), tmp_path / "other")
    _, beside = make_checkpoints(make(tmp_path), tmp_path)
    needed = rf"must hold the {name.replace('_', ' ')} that algorithm\.advantage needs"
    with pytest.raises(CheckpointError, match=needed):
        beside.restore(saved)
    trainer.step(make_groups(), learner_version=0, step=1)
    path = tmp_path / "other" / "checkpoints" / save(checkpoints, step=1) / name / "model"
    other = make_trainer(make(tmp_path, **{name: {"path": str(path)}}))
    assert largest_difference(second_weights(trainer), second_weights(other)) == 0


def test_an_adapter_is_the_policys_alone(tmp_path):
    model = model_config(make_model(tmp_path), lora=LoraConfig(rank=4))
    adapted, plain = (make_trainer(make_prime_run(tmp_path, model=chosen)) for chosen in (model, None))
    for trainer in (adapted, plain):
        trainer.step(make_groups(), learner_version=0, step=1)
    assert largest_difference(second_weights(adapted), second_weights(plain)) < 1e-6


@cases(
    "settings, complaint",
    ({"kl": KlConfig(0.1, refresh_every_steps=2)}, r"refresh_every_steps must be null .*, got 2: .* never changes"),
    (
        {"reward": configs.RewardShapingConfig(mask_truncated=True)},
        "mask_truncated must be false with algorithm.advantage=prime",
    ),
)
def test_settings_that_contradict_it_are_refused(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        AlgorithmConfig(advantage=PrimeConfig(), **settings)
