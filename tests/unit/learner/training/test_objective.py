import inspect
from statistics import fmean, pstdev
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch

from slipstream.buffer.trajectory import Reward, VersionSpan
from slipstream.configs import algorithm_terms as terms
from slipstream.configs.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    KlConfig,
    RejectionConfig,
    RewardShapingConfig,
)
from slipstream.learner.algorithms import find
from slipstream.learner.algorithms.inputs import RatioInputs
from slipstream.learner.batching.batch import Tokens
from slipstream.learner.training.loss_inputs import correct, describe_advantages
from slipstream.learner.training.objective import Objective
from slipstream.learner.training.step_metrics import StepMetrics
from tests.cases import cases
from tests.metric_docs import STEP, TOKENS, keys_under
from tests.unit.learner.builders import documented, make_alone, make_batch, make_groups, make_response

TRUNCATED, NONE = CorrectionConfig(max_weight=2.0), CorrectionConfig(level="none", max_weight=None)


def make_tokens(num_tokens: int = 9, **overrides) -> Tokens:
    torch.manual_seed(0)
    zeros = ("turns", "positions", "positions_in_turn", "lags")
    columns = {name: torch.zeros(num_tokens, dtype=torch.int64) for name in zeros} | {
        "sequences": torch.arange(num_tokens),
        "generator_logprobs": -torch.rand(num_tokens),
        "advantages": torch.randn(num_tokens),
        "token_weights": torch.full((num_tokens,), 1 / num_tokens),
    }
    columns |= overrides
    return Tokens(**({"contexts": columns["sequences"]} | columns))


def loss_of(config, tokens, logprobs, *, proximal=None, reference=None, entropies=None, metrics=None):
    entropies = torch.zeros_like(logprobs) if entropies is None else entropies
    if proximal is not None and config.proximal == "reuse":
        config = msgspec.structs.replace(config, proximal="recompute")
    tokens = tokens.replace(start_logprobs=proximal, reference_logprobs=reference)
    measured = {"logprobs": logprobs, "entropies": entropies}
    return Objective(config, max_tokens=8).loss(tokens, measured, metrics=metrics or StepMetrics())


def gradient(config, tokens, logprobs, **settings):
    leaf = logprobs.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(config, tokens, leaf, **settings), leaf)
    return found


def report_of(config, tokens, logprobs, *, compute=loss_of, **settings):
    metrics = StepMetrics()
    compute(config, tokens, logprobs, metrics=metrics, **settings)
    return metrics.report(make_alone(), num_updates=1)


def test_decoupled_ppo_by_hand_weighs_at_the_proximal_policy_without_gradient():
    generator, advantages = torch.tensor([0.5, 0.1, 0.4]).log(), torch.tensor([1.0, 1.0, -2.0])
    tokens = make_tokens(3, generator_logprobs=generator, advantages=advantages, token_weights=torch.ones(3))
    proximal, learner = torch.tensor([0.25, 0.5, 0.4]).log(), torch.tensor([0.25, 0.9, 0.2]).log()
    config = AlgorithmConfig(policy_loss=terms.PpoClipConfig(clip_low=0.2, clip_high=0.2), correction=TRUNCATED)
    # weights 0.5, min(5, 2), 1; ratios 1, 1.8 (clipped to 1.2), 0.5 (clipped to 0.8)
    expected = -(0.5 * 1.0 + 2.0 * 1.2 + 1.0 * 0.8 * -2.0)
    assert loss_of(config, tokens, learner, proximal=proximal).item() == pytest.approx(expected)
    tokens, proximal = make_tokens(), -torch.rand(9)
    config = AlgorithmConfig(policy_loss=terms.PpoClipConfig(), correction=CorrectionConfig(max_weight=1.5))
    weights = (proximal - tokens.generator_logprobs).exp().clamp(max=1.5)
    expected = -weights * tokens.advantages * tokens.token_weights
    assert torch.allclose(gradient(config, tokens, proximal, proximal=proximal), expected, atol=1e-7)


@pytest.mark.parametrize("lag", [0, 1, 5])
def test_an_interpolated_proximal_policy_does_not_soften_what_is_rejected(lag):
    tokens = make_tokens(lags=torch.full((9,), lag))
    rejects = CorrectionConfig(reject=[RejectionConfig(over="token", low=0.9, high=1.1)])
    drift = torch.tensor([0.15, 0.0, -0.15] * 3)
    config = AlgorithmConfig(proximal="interpolate", correction=rejects)
    found = gradient(config, tokens, tokens.generator_logprobs + drift)
    assert (found != 0).tolist() == [False, True, False] * 3


@pytest.mark.parametrize(
    "policy_loss", [terms.GspoConfig(), terms.GspoConfig(form="token"), terms.GmpoConfig(), terms.ToprConfig()]
)
@pytest.mark.parametrize("way", ["rejected", "masked", "untrusted"])
def test_a_token_that_does_not_count_has_no_share_in_its_sequence(policy_loss, way):
    generator, logprobs = torch.tensor([-4.0, -1.0, -1.2, -0.8]), torch.tensor([-1.0, -1.1, -1.0, -0.9])
    columns = {
        "sequences": torch.zeros(4, dtype=torch.int64),
        "generator_logprobs": generator,
        "advantages": torch.full((4,), 0.5),
        "token_weights": torch.full((4,), 1 / 4),
    }
    settings = {
        "rejected": {"reject": [RejectionConfig(statistic="k1", over="token", low=0.5, high=2.0)]},
        "masked": {"level": "token", "outside": "mask", "min_weight": 0.5, "max_weight": 2.0},
        "untrusted": {},
    }[way]
    tokens, others = make_tokens(4, **columns), make_tokens(3, **{name: each[1:] for name, each in columns.items()})
    if way == "untrusted":
        tokens = tokens.replace(is_trusted=torch.tensor([False, True, True, True]))
    correction = CorrectionConfig(**({"level": "none", "max_weight": None} | settings))
    config = AlgorithmConfig(policy_loss=policy_loss, correction=correction)
    found = gradient(config, tokens, logprobs, proximal=logprobs)
    assert found[0] == 0
    assert found[1:].abs().min() > 0
    assert torch.allclose(found[1:], gradient(config, others, logprobs[1:], proximal=logprobs[1:]), atol=1e-7)


def test_the_kl_and_entropy_terms_are_added_except_for_a_rejected_token():
    tokens = make_tokens(1, advantages=torch.zeros(1), token_weights=torch.ones(1))
    config = AlgorithmConfig(correction=NONE, kl=KlConfig(0.5), entropy_coef=0.25)
    learner, reference = torch.tensor([-1.0]), torch.tensor([-1.0 + np.log(2.0)]).float()
    loss = loss_of(config, tokens, learner, reference=reference, entropies=torch.tensor([2.0]))
    assert loss.item() == pytest.approx(0.5 * (2 - 1 - np.log(2.0)) - 0.25 * 2.0, abs=1e-6)
    tokens = make_tokens()
    rejects = CorrectionConfig(reject=[RejectionConfig(over="token", high=1.5)])
    config = AlgorithmConfig(correction=rejects, kl=KlConfig(0.1))
    logprobs = tokens.generator_logprobs + torch.tensor([1.0, 0.0, 0.0] * 3)
    found = gradient(config, tokens, logprobs, reference=tokens.generator_logprobs - 0.5)
    assert (found != 0).tolist() == [False, True, True] * 3


def test_masks_look_at_one_sequence_and_ratios_at_one_context():
    # Sequences 1 and 2 have drifted. Only sequence 2 has a negative advantage.
    learner = torch.tensor([0.9, 0.9, 0.2, 0.2, 0.2, 0.2]).log()
    columns = {"generator_logprobs": torch.full((6,), 0.9).log(), "sequences": torch.tensor([0, 0, 1, 1, 2, 2])}
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    tokens = make_tokens(6, advantages=advantages, token_weights=torch.ones(6), **columns)
    config = AlgorithmConfig(policy_loss=terms.ReinforceConfig(), masks=[terms.OpsmConfig(0.5)], correction=NONE)
    assert not config.needs_current_logprobs
    assert gradient(config, tokens, learner).tolist() == [1, 1, -1, -1, 0, 0]
    assert report_of(config, tokens, learner)["learner/idle_fraction"] == pytest.approx(1 / 3)
    config = AlgorithmConfig(policy_loss=terms.GspoConfig(), correction=NONE)
    contexts = torch.tensor([0, 0, 1, 1])
    both = {"generator_logprobs": torch.tensor([-1.0, -1.0, -2.0, -2.0]), "contexts": contexts}
    learner = torch.tensor([-0.9995, -0.9999, -2.0003, -1.9999])
    one_answer = make_tokens(4, sequences=torch.zeros(4, dtype=torch.int64), **both)
    two_answers = make_tokens(4, sequences=contexts, **both)
    assert torch.equal(gradient(config, one_answer, learner), gradient(config, two_answers, learner))


def test_the_log_ratio_penalty_pulls_to_the_generator_where_the_policy_loss_has_no_gradient():
    """The first token is clipped, the second has no advantage, the third has policy loss and penalty."""
    generator, learner = (torch.tensor(p).log() for p in ([0.2, 0.4, 0.5], [0.6, 0.3, 0.6]))
    advantages = torch.tensor([1.0, 0.0, -1.0])
    tokens = make_tokens(3, generator_logprobs=generator, advantages=advantages, token_weights=torch.ones(3))
    penalty = CorrectionConfig(level="none", max_weight=None, log_ratio_penalty=0.25)
    config = AlgorithmConfig(policy_loss=terms.DppoConfig(), correction=penalty, proximal="generator")
    expected = 2 * 0.25 * (learner - generator) + torch.tensor([0.0, 0.0, 0.6 / 0.5])
    assert torch.allclose(gradient(config, tokens, learner), expected, atol=1e-6)
    report = report_of(config, tokens, learner, compute=gradient)
    assert report["learner/idle_fraction"] == pytest.approx(1 / 3)


def test_what_is_not_finite_is_neutral_and_only_some_algorithms_need_a_pass_at_the_start():
    broken = make_tokens()
    broken.generator_logprobs[3] = float("inf")
    assert gradient(AlgorithmConfig(), broken, -torch.rand(9)).isfinite().all()
    assert report_of(AlgorithmConfig(), broken, -torch.rand(9))["learner/nonfinite_fraction"] == pytest.approx(1 / 9)
    reinforce = {"policy_loss": terms.ReinforceConfig(), "proximal": "recompute"}
    for settings, is_needed in (
        ({"proximal": "recompute"}, True),
        ({"proximal": "reuse"}, False),
        (reinforce, False),
        (reinforce | {"updates_per_step": 4}, True),
        ({"correction": CorrectionConfig(normalize=True)}, True),
    ):
        assert AlgorithmConfig(**settings).needs_start_logprobs == is_needed, settings


def test_diagnostics_by_hand():
    generator = torch.tensor([0.5, 0.1]).log()
    tokens = make_tokens(2, generator_logprobs=generator, advantages=torch.ones(2), token_weights=torch.ones(2))
    learner, proximal = torch.tensor([0.25, 0.6]).log(), torch.tensor([0.25, 0.4]).log()
    config = AlgorithmConfig(policy_loss=terms.PpoClipConfig(), correction=TRUNCATED)
    report = report_of(config, tokens, learner, proximal=proximal, entropies=torch.tensor([1.0, 2.0]))
    assert documented(report) <= keys_under(STEP, TOKENS)
    expected = {"tokens": 2, "ratio_mean": 1.25, "ratio_max": 1.5, "idle_fraction": 0.5, "entropy": 1.5}
    expected |= {"weight_mean": (0.5 + 2.0) / 2, "weight_changed_fraction": 0.5, "mismatch_max": np.log(4.0)}
    expected |= {"mismatch_k1": (np.log(2.0) - np.log(4.0)) / 2, "ess": 4.5**2 / (2 * (0.25 + 16))}
    assert {name: report[f"learner/{name}"] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("proximal", ["recompute", "reuse", "generator", "interpolate"])
def test_mismatch_is_seen_whatever_policy_is_the_proximal_one(proximal):
    tokens = make_tokens(2, generator_logprobs=torch.tensor([0.5, 0.1]).log(), lags=torch.tensor([0, 2]))
    learner = torch.tensor([0.25, 0.4]).log()
    correction = NONE if proximal == "generator" else TRUNCATED
    config = AlgorithmConfig(proximal=proximal, correction=correction)
    report = report_of(config, tokens, learner, proximal=learner if config.needs_start_logprobs else None)
    assert report["learner/mismatch_max"] == pytest.approx(np.log(4.0))
    assert report["learner/by_lag/0/mismatch_k1"] == pytest.approx(np.log(2.0))
    assert report["learner/by_lag/2-3/mismatch_k1"] == pytest.approx(-np.log(4.0))


@pytest.mark.parametrize("policy_loss", [terms.CispoConfig(), terms.ToprConfig(), terms.DppoConfig()])
def test_a_token_beyond_the_clamp_of_log_ratios_keeps_its_gradient(policy_loss):
    tokens = make_tokens(2, generator_logprobs=torch.tensor([-1.0, -1.0]), advantages=torch.tensor([1.0, 1.0]))
    config = AlgorithmConfig(policy_loss=policy_loss, correction=NONE, proximal="generator")
    near, far = gradient(config, tokens, torch.tensor([-20.9, -21.1])).tolist()
    assert far == pytest.approx(near, rel=0.3)
    assert far != 0


@pytest.mark.parametrize(
    "policy_loss", [terms.PpoClipConfig(), terms.ReinforceConfig(), terms.CispoConfig(), terms.GspoConfig()]
)
@pytest.mark.parametrize("proximal", ["recompute", "reuse"])
def test_a_token_that_the_learner_finds_impossible_has_no_loss_and_is_counted(policy_loss, proximal):
    kl = KlConfig(coef=0.1, estimator="k2")
    config = AlgorithmConfig(policy_loss=policy_loss, kl=kl, proximal=proximal, entropy_coef=0.1)
    tokens = make_tokens(4, nll_weights=torch.full((4,), 0.25))
    possible = torch.tensor([-0.5, -1.0, -2.0, -0.3])
    impossible = possible.clone()
    impossible[1] = -torch.inf
    found, metrics = [], StepMetrics()
    for logprobs, counted in ((impossible, metrics), (possible, StepMetrics())):
        leaf = logprobs.clone().requires_grad_()
        start = logprobs if proximal == "recompute" else None
        loss = loss_of(config, tokens, leaf, proximal=start, reference=possible - 1, metrics=counted)
        found.append(torch.autograd.grad(loss, leaf)[0])
        assert loss.isfinite()
    others = torch.tensor([0, 2, 3])
    assert found[0][1] == 0
    assert torch.allclose(found[0][others], found[1][others])
    assert metrics.report(make_alone(), num_updates=1)["learner/nonfinite_fraction"] == 0.25


UNIONS = (terms.AdvantageConfig, terms.PolicyLossConfig, terms.MaskConfig)
RECORDS = [record for union in UNIONS for record in get_args(union)]


@pytest.mark.parametrize("record", [record for record in RECORDS if record.formula()])
def test_the_fields_of_a_record_are_the_settings_of_its_functions(record):
    names = [record.formula(), getattr(record, "selector", "")]
    parameters = [dict(inspect.signature(find(name)).parameters) for name in names if name]
    own = {name: p for found in parameters for name, p in found.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    required = {name for name, p in own.items() if p.default is inspect.Parameter.empty}
    assert required <= set(record.__struct_fields__) <= set(own), "constants are defaults of the function"


def make_objective(**settings):
    return Objective(AlgorithmConfig(**({"advantage": terms.DrGrpoConfig()} | settings)), max_tokens=8)


def prepared(groups, *, num_updates: int = 1, weights=None, **settings):
    batch = make_batch(groups, num_updates=num_updates, weights=weights or [1.0] * len(groups)).batch
    return make_objective(**settings).prepare(batch)


def of_trajectories(batch, column):
    first = [int((batch.tokens.sequences == index).nonzero()[0]) for index in range(batch.num_trajectories)]
    return getattr(batch.tokens, column)[first].tolist()


def make_scored(group, index, **reward):
    return msgspec.structs.replace(make_response(group, index), reward=Reward(**reward))


def test_parts_of_rewards_are_added_up_by_weight():
    groups = [
        [make_response(0, 0, reward=1.0), make_response(0, 1, reward=3.0)],
        [make_response(1, 0, reward=70.0), make_response(1, 1, reward=80.0)],
    ]
    assert of_trajectories(prepared(groups), "advantages") == [-1, 1, -5, 5]
    parts = ({"a": 1.0, "b": 10.0}, {"a": 2.0, "b": -10.0})
    groups = [[make_scored(0, index, total=0.3, parts=each) for index, each in enumerate(parts)]]
    found = prepared(groups, reward=RewardShapingConfig(parts={"b": 0.5, "a": 2.0}))
    assert found.trajectories.rewards.tolist() == [7, -1]


WRITTEN = np.array([0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=np.bool_)
TWO_TURNS = {"response": (5, 6, 9, 9, 9, 7, 1), "model_mask": WRITTEN, "num_turns": 2}
"""Two tokens of the model, three of a tool, two of the model."""


def test_users_advantages_see_turns_parts_and_sources_and_gae_steps_over_the_tokens_of_a_tool():
    own = terms.CustomAdvantageConfig("tests.unit.learner.own_algorithm:of_turns_parts_and_sources")
    of_code = make_response(0, 0, reward=1.0, data_source="code", **TWO_TURNS)
    # Without a reward it is excluded, and groups are renumbered.
    failed = msgspec.structs.replace(of_code, id="0-0-1", index=1, reward=Reward(0.0, status="error"))
    answers = [of_code, failed, make_response(0, 2, reward=0.25, data_source="maths")]
    found = prepared([answers], advantage=own).tokens
    assert [found.advantages[found.sequences == index].tolist() for index in (0, 2)] == [[112] * 4, [26] * 4]
    batch = make_batch([[make_response(0, 0, reward=3.0, **TWO_TURNS)]]).batch
    batch = batch.with_tokens(values=torch.tensor([0.5, 1.0, 2.0, 1.5]))
    found = make_objective(advantage=terms.GaeConfig(gamma=0.5, lam=0.5)).prepare(batch)
    # From the end: r - V; then gamma * V of the model's next token - V, plus gamma * lambda * the advantage after it.
    expected = [3.0 - 1.5]
    for value, following in ((2.0, 1.5), (1.0, 2.0), (0.5, 1.0)):
        expected.insert(0, 0.5 * following - value + 0.25 * expected[0])
    whitened = [(each - fmean(expected)) / pstdev(expected) for each in expected]
    assert found.tokens.advantages.tolist() == pytest.approx(whitened, rel=1e-5)


def test_token_weights_count_over_the_whole_update_and_are_multiplied_by_the_groups_weight():
    short, long = make_response(0, 0, response=(5, 6)), make_response(0, 1, response=(5, 6, 7, 1))
    assert of_trajectories(prepared([[short, long]]), "token_weights") == pytest.approx([1 / 6, 1 / 6])
    groups = [[short], [make_response(1, 0, response=(5, 6, 7, 1))]]
    assert of_trajectories(prepared(groups, num_updates=2), "token_weights") == pytest.approx([1 / 2, 1 / 4])
    weighed = prepared(groups, weights=[1.0, 0.25])
    assert of_trajectories(weighed, "token_weights") == pytest.approx([1 / 6, 0.25 / 6])


def test_only_entirely_right_answers_are_imitated_and_those_of_a_group_drawn_for_less_for_less():
    right, wrong = {"total": 1.0, "is_correct": True}, {"total": 0.9, "is_correct": False}
    groups = [[make_scored(group, 0, **right), make_scored(group, 1, **wrong)] for group in range(2)]
    for weights, expected in (([1.0, 1.0], [1.0, 0, 1.0, 0]), ([1.0, 0.25], [1.0, 0, 0.25, 0])):
        found = prepared(groups, weights=weights, positive_nll_coef=0.5)
        assert of_trajectories(found, "nll_weights") == pytest.approx([0.5 / 8 * share for share in expected])


def with_the_last_rejected(**correction):
    """Three trajectories of four tokens, rewards 0, 1, and 5. Every token of the last one is rejected."""
    batch = make_batch([[make_response(0, index, reward=reward) for index, reward in enumerate((0.0, 1.0, 5.0))]]).batch
    drift = torch.where(batch.tokens.sequences == 2, 1.0, 0.0)
    batch = batch.with_tokens(start_logprobs=batch.tokens.generator_logprobs + drift)
    rejects = CorrectionConfig(reject=[RejectionConfig(over="token", high=1.5)], **correction)
    return make_objective(correction=rejects).prepare(batch)


def test_rejected_tokens_stay_in_the_baseline_and_a_description_of_no_token_is_zeros():
    assert of_trajectories(with_the_last_rejected(), "advantages") == [-2, -1, 3]
    assert of_trajectories(with_the_last_rejected(), "token_weights")[:2] == pytest.approx([1 / 12] * 2)
    kept = with_the_last_rejected(loss_denominator="kept_tokens")
    assert of_trajectories(kept, "token_weights")[:2] == pytest.approx([1 / 8] * 2)
    batch = prepared(make_groups())
    empty = batch.select(torch.zeros(batch.num_trajectories, dtype=torch.bool))
    assert set(describe_advantages(empty).values()) == {0.0}


def test_a_token_baseline_compares_tokens_at_the_same_position_though_older_ones_are_masked():
    old = make_response(0, 0, reward=1.0, version_spans=[VersionSpan(4, 0), VersionSpan(6, 9)])
    groups = [[old, make_response(0, 1, reward=0.0, version=9)]]
    batch = make_batch(groups, learner_version=9, max_lags=[2]).batch
    batch = batch.with_tokens(start_logprobs=batch.tokens.generator_logprobs, collisions=torch.full((6,), 0.5))
    found = make_objective(advantage=terms.OptimalTokenBaselineConfig()).prepare(batch).tokens.advantages
    # Both have tokens at the last two positions. Only the young one has tokens at the first two.
    assert (found[:2] > 0).all()
    assert found[2:4].tolist() == [0, 0]
    assert (found[4:] < 0).all()


def test_tokens_are_selected_among_those_that_the_correction_leaves_in_one_update():
    batch = make_batch(make_groups()).batch
    tokens = batch.tokens
    drift = torch.where(torch.arange(len(tokens.sequences)) % 4 == 0, 1.0, 0.01)
    start = tokens.generator_logprobs + drift
    batch = batch.with_tokens(start_logprobs=start, current_logprobs=start)
    rejects = CorrectionConfig(reject=[RejectionConfig(over="token", high=1.5)])
    masked = make_objective(masks=[terms.M2poConfig(threshold=0.05)], correction=rejects)
    found = masked.select_tokens(masked.prepare(batch), update=0, seed=0)
    assert found.tokens.is_trusted.all(), "what is far is rejected already"
    penalized = make_objective(policy_loss=terms.KlCovConfig(fraction=0.5), correction=rejects)
    selected = penalized.select_tokens(penalized.prepare(batch), update=0, seed=0).tokens.is_selected
    assert not selected[drift == 1].any()
    assert int(selected.sum()) == int((drift < 1).sum()) // 2
    # Tokens of update 0 are close to the generator, those of update 1 are far from it.
    batch = make_batch(make_groups(), num_updates=2).batch
    is_later = batch.trajectories.updates[batch.tokens.sequences] == 1
    start = batch.tokens.generator_logprobs + torch.where(is_later, 1.0, 0.01)
    batch = batch.with_tokens(start_logprobs=start, current_logprobs=start)
    config = {"updates_per_step": 2, "correction": CorrectionConfig(level="none", max_weight=None)}
    masked = make_objective(masks=[terms.M2poConfig(threshold=0.05)], **config)
    found = masked.select_tokens(masked.prepare(batch), update=0, seed=0)
    assert found.tokens.is_trusted.all(), "those of the other update are not judged yet"
    found = masked.select_tokens(found, update=1, seed=0)
    assert found.tokens.is_trusted[~is_later].all()
    assert not found.tokens.is_trusted[is_later].all()
    penalized = make_objective(policy_loss=terms.KlCovConfig(fraction=0.5), **config)
    selected = penalized.select_tokens(penalized.prepare(batch), update=0, seed=0).tokens.is_selected
    assert int(selected.sum()) == int((~is_later).sum()) // 2
    assert not selected[is_later].any()


DRIFT = torch.tensor([1.0, 4.0, 0.25, 1.0]).log()


def corrected(drift=DRIFT, learner_log_ratio=None, **settings):
    learner_log_ratio = drift if learner_log_ratio is None else learner_log_ratio
    inputs, learner = (RatioInputs(x, torch.tensor([0, 0, 1, 1]), 2) for x in (drift, learner_log_ratio))
    return correct(inputs, learner=learner, config=CorrectionConfig(**settings))


TOKEN, SEQUENCE = {"level": "token", "max_weight": 2.0}, {"level": "sequence", "max_weight": 2.0}


@cases(
    "settings, weights, is_bounded",
    # Masked weights are zero and stay in the count.
    (TOKEN | {"min_weight": 0.5, "outside": "mask"}, [1, 0, 0, 1], [False, True, True, False]),
    # Normalized weights have the mean one over what they belong to.
    (TOKEN | {"normalize": True}, [w / 1.0625 for w in (1, 2, 0.25, 1)], [False, True, False, False]),
    (SEQUENCE | {"normalize": True}, [w / 1.125 for w in (2, 2, 0.25, 0.25)], [True, True, False, False]),
)
def test_weights_by_hand(settings, weights, is_bounded):
    found = corrected(**settings)
    assert found.weights.tolist() == pytest.approx(weights)
    assert found.is_bounded.tolist() == is_bounded
    assert found.is_kept.all()


LOW, HIGH = (RejectionConfig(statistic="k1", over="token", **bound) for bound in ({"low": 0.5}, {"high": 2.0}))


def test_weights_are_the_proximal_policys_and_rejections_the_learners():
    entry = RejectionConfig(over="token", high=2.0)
    found = corrected(learner_log_ratio=torch.zeros(4), level="token", max_weight=2.0, reject=[entry], veto=(0.5, 2.0))
    assert found.weights.tolist() == [1, 2, 0.25, 1]
    assert found.is_kept.all()
    found = corrected(torch.zeros(4), learner_log_ratio=DRIFT, level="token", reject=[entry])
    assert found.weights.tolist() == [1, 1, 1, 1]
    assert found.is_kept.tolist() == [True, False, True, True]


@cases(
    "reject, veto, kept",
    # A token stays when every entry keeps it.
    ([LOW, HIGH], None, [True, False, False, True]),
    ([HIGH], (0.5, 10.0), [True, False, False, False]),
    # k3: 4 - 1 - ln 4 = 1.61, and 1/4 - 1 + ln 4 = 0.64.
    ([RejectionConfig(statistic="k3", over="max", high=1.0)], None, [False, False, True, True]),
)
def test_rejections_by_hand(reject, veto, kept):
    assert corrected(reject=reject, veto=veto).is_kept.tolist() == kept
