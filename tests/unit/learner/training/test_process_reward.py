import copy
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from slipstream.buffer.trajectory import Reward
from slipstream.configs.advantages import PrimeConfig
from slipstream.configs.algorithm import (
    AlgorithmConfig,
    KlConfig,
    ProcessRewardConfig,
    ProcessRewardOptimizerConfig,
    RewardShapingConfig,
)
from slipstream.configs.base import ConfigError
from slipstream.configs.data import LoraConfig
from slipstream.learner.errors import CheckpointError
from tests.metric_docs import PROCESS_REWARD, keys_under
from tests.tolerance import gradient_terms, is_rounding, largest_difference
from tests.unit.learner.builders import (
    make_checkpoints,
    make_groups,
    make_model,
    make_response,
    make_run,
    make_trainer,
    model_config,
    save,
    second_weights,
)
from tests.unit.learner.training.test_critic import make_critic_run

METRICS = keys_under(PROCESS_REWARD)
BETA, RATE, GAMMA = 0.05, 1e-3, 0.9
SMOOTH_PRIME = ProcessRewardOptimizerConfig(learning_rate=RATE, epsilon=1e-3, max_grad_norm=1e9)
"""The large epsilon makes an update a smooth function of the gradient."""


def make_prime_run(tmp_path, *, learner=None, process_reward=None, model=None, **algorithm):
    config = ProcessRewardConfig(**({"optimizer": SMOOTH_PRIME, "beta": BETA} | (process_reward or {})))
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


def test_it_learns_which_answers_are_correct_and_rewards_the_token_that_decides(tmp_path):
    process_reward = {"optimizer": ProcessRewardOptimizerConfig(learning_rate=3e-3), "beta": 0.5}
    trainer = make_trainer(make_prime_run(tmp_path, learner={"max_steps": 30}, process_reward=process_reward))
    batches, prepare = [], trainer.objective.prepare
    trainer.objective.prepare = lambda batch: batches.append(batch) or prepare(batch)
    metrics = []
    for step in range(30):
        random = np.random.default_rng(step)
        answers = [(int(token), *random.integers(2, 30, 3).tolist()) for token in random.choice([5, 30], size=8)]
        group = [make_response(0, i, response=a, reward=float(a[0] == 30)) for i, a in enumerate(answers)]
        metrics.append(trainer.step([group], learner_version=0, step=step + 1))
    assert metrics[0]["learner/process_reward_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert metrics[-1]["learner/process_reward_loss"] < 0.5
    assert metrics[-1]["learner/process_reward_accuracy"] == 1
    rewards = batches[-1].tokens.process_rewards.view(8, 4)
    is_correct = batches[-1].trajectories.is_correct
    assert (rewards[is_correct, 0] > 0).all()
    assert (rewards[~is_correct, 0] < 0).all()


def test_answers_without_a_reward_or_a_trained_token_teach_it_nothing(tmp_path):
    found = []
    for is_correct in (False, True):
        groups = make_mixed_groups()
        failed = Reward(total=0.0, is_correct=is_correct, status="error")
        groups[0][3] = msgspec.structs.replace(groups[0][3], reward=failed)
        trainer = make_trainer(make_prime_run(tmp_path))
        trainer.step(groups, learner_version=0, step=1)
        found.append(second_weights(trainer))
    assert largest_difference(*found) == 0
    trainer, before = make_trainer(make_prime_run(tmp_path)), make_trainer(make_prime_run(tmp_path))
    failed = [[msgspec.structs.replace(t, reward=Reward(total=0.0, status="error")) for t in g] for g in make_groups()]
    metrics = trainer.step(failed, learner_version=0, step=1)
    assert [metrics[key] for key in sorted(METRICS)] == [0, 0, 0]
    assert largest_difference(second_weights(trainer), second_weights(before)) == 0


def test_each_update_of_a_step_learns_from_its_own_answers(tmp_path):
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


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kl": KlConfig(0.1, refresh_every_steps=2)}, r"refresh_every_steps=null, got 2: .* never changes"),
        ({"reward": RewardShapingConfig(mask_truncated=True)}, "advantage=prime needs .*mask_truncated=false"),
    ],
)
def test_settings_that_contradict_it_are_refused(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        AlgorithmConfig(advantage=PrimeConfig(), **settings)
