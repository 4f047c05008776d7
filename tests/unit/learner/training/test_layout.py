import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.configs.advantages import GaeConfig
from slipstream.configs.algorithm import AlgorithmConfig, DistillationConfig
from slipstream.configs.data import DataConfig
from slipstream.configs.generators import GeneratorsConfig, SamplingConfig
from slipstream.learner.batching.collate import Layout
from slipstream.learner.batching.microbatch import Sample
from slipstream.learner.errors import DivergenceError, ModelError
from slipstream.learner.training import layout as layout_module
from slipstream.learner.training import model as model_module
from slipstream.learner.training.layout import LayoutChooser, check_rows
from slipstream.learner.training.model import load_policy
from tests.families import FAMILIES, make_family
from tests.tolerance import largest_difference
from tests.unit.learner.builders import (
    CPU,
    load,
    make_alone,
    make_groups,
    make_model,
    make_run,
    make_samples,
    make_trainer,
    measure,
    measure_alone,
    members_of,
    model_config,
    weights,
)


def choose(path, *, ranks=None, **overrides):
    run = make_run(path, **overrides)
    policy = load_policy(run.model, device=CPU)
    return policy, LayoutChooser(run, policy, ranks=ranks or make_alone()).choose()


SLOW = (
    *("qwen3_next", "qwen3_5_moe_text", "falcon_h1", "jamba", "lfm2_moe", "inkling_text", "qwen4_exp_text"),
    *("recurrent_gemma", "xlstm", "deepseek_v4", "ernie", "bert-generation", "big_bird", "rembert"),
)


def families(*, is_exact):
    return [
        pytest.param(name, marks=pytest.mark.long) if name in SLOW else name
        for name, (kind, _) in FAMILIES.items()
        if bool(kind) == is_exact
    ]


@pytest.mark.parametrize("name", families(is_exact=True))
def test_a_family_is_packed_as_densely_as_is_exact(tmp_path, name):
    # transformers' initialization, in which a leak is 1e-5 of its later size.
    path = make_family(tmp_path, name, spread=0.02)
    policy, layout = choose(path, model=model_config(path, max_length=200))
    assert layout.kind == FAMILIES[name][0]
    samples = make_samples(members_of(make_groups(group_size=3, longest=20)))
    packed, alone = measure(policy, samples, layout).detach(), measure_alone(policy, samples)
    # Rounding of log-probabilities near -4 and of their inputs.
    assert float((packed - alone).abs().max()) < 1e-4 * float(alone.std())


@pytest.mark.parametrize("name", families(is_exact=False))
def test_a_model_that_sees_what_follows_is_refused_by_name(tmp_path, name):
    with pytest.raises(ModelError, match=rf"model\.path must name a causal .*got '.*{name}' \(\w+\)") as caught:
        choose(make_family(tmp_path, name, spread=0.02))
    assert "\n" not in str(caught.value)


def change_config(path, **settings):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def ignore_windows(monkeypatch):
    def plain_mask(config, microbatch):
        spans = microbatch.spans
        return spans.mask(microbatch.token_ids.shape, CPU) if spans is not None and spans.has_shared else None

    monkeypatch.setattr(model_module, "_attention_mask", plain_mask)


def test_a_window_that_the_mask_ignores_is_seen_if_a_sequence_is_longer(tmp_path, monkeypatch):
    ignore_windows(monkeypatch)
    path = make_family(tmp_path, "mistral")
    # Without a mask, transformers builds its own with the window.
    assert choose(path)[1].kind == "one_row"
    change_config(path, sliding_window=90)
    assert choose(path, model=model_config(path, max_length=128))[1].kind == "one_row"
    # The window has no effect if all sequences fit into it.
    assert choose(path, model=model_config(path))[1].kind == "shared_rows"


def test_a_run_of_the_shortest_sequences_can_be_probed(tmp_path):
    path = make_model(tmp_path)
    data = DataConfig(train="a", eval="b", max_prompt_tokens=1)
    generators = GeneratorsConfig(sampling=SamplingConfig(max_tokens=1))
    _, layout = choose(path, model=model_config(path, max_length=2), data=data, generators=generators)
    assert layout.kind == "shared_rows"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma2", "gpt_oss", "opt", "lfm2"])
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_bfloat16_is_probed_in_float32_and_within_its_own_rounding(tmp_path, name, spread):
    path = make_family(tmp_path, name, spread=spread)
    # Long enough for packed attention in models that support it.
    policy, layout = choose(path, model=model_config(path, dtype="bfloat16", max_length=2048))
    assert layout.kind == FAMILIES[name][0]
    assert policy.compute_dtype == torch.bfloat16


def test_a_kernel_that_is_wrong_in_bfloat16_alone_is_seen(tmp_path, monkeypatch):
    ignore_windows(monkeypatch)
    exact = layout_module._ModelCheck._compare

    # Exact in float32.
    def compare(model_check, layout, dtype, draw, **options):
        return (0.0, "") if dtype == torch.float32 else exact(model_check, layout, dtype, draw, **options)

    monkeypatch.setattr(layout_module._ModelCheck, "_compare", compare)
    path = make_family(tmp_path, "mistral")
    assert choose(path, model=model_config(path, dtype="bfloat16"))[1].kind == "one_row"


def test_the_probe_is_of_the_runs_text_and_of_random_tokens_beyond_it(tmp_path):
    run, text = make_run(make_model(tmp_path)), [5, 3, 4]
    policy = load_policy(run.model, device=CPU)
    choosers = [LayoutChooser(run, policy, ranks=make_alone(), text=each) for each in ([], text, text * 1000)]
    alone, short, long = (chooser._model_checks[0]._samples(0) for chooser in choosers)
    prompt = short[0].token_ids
    assert prompt[:3].tolist() == text
    assert prompt[3:].tolist() == alone[0].token_ids[: len(prompt) - 3].tolist()
    assert set(np.concatenate([sample.token_ids for sample in long])) == set(text)


class OtherRank:
    """Rank group in which another rank fails some comparisons: causality first, then layouts."""

    device = CPU
    is_first = True

    def __init__(self, *, failing):
        self._failing, self._num_calls = failing, 0

    def max(self, values):
        self._num_calls += 1
        return torch.full_like(values, torch.inf) if self._num_calls - 1 in self._failing else values


def test_a_model_that_fits_no_layout_is_refused_by_name(tmp_path):
    assert choose(make_model(tmp_path), ranks=OtherRank(failing=[1]))[1].kind == "one_row"
    assert choose(make_model(tmp_path), learner={"packing": False})[1].kind == "one_per_row"
    with pytest.raises(ModelError, match=r"model\.path .*\(Qwen2ForCausalLM\), which no layout") as caught:
        choose(make_model(tmp_path), ranks=OtherRank(failing=range(1, 100)))
    assert "one_at_a_time differs by" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_are_no_longer_than_the_models_positions(tmp_path):
    trainer = make_trainer(make_run(make_family(tmp_path, "gpt_neo")))
    assert (layout_of(trainer), trainer._layout.row_tokens) == ("one_row", 128)
    groups = make_groups(num_groups=8, longest=20)
    assert sum(len(member.token_ids) for group in groups for member in group) > 2 * 128
    assert np.isfinite(trainer.step(groups, learner_version=0, step=1)["learner/loss"])


def layout_of(trainer):
    return trainer._layout.kind


def test_a_teacher_and_a_critic_read_the_same_microbatches(tmp_path):
    path, recurrent = make_model(tmp_path), make_family(tmp_path, "mamba2")
    assert layout_of(make_trainer(make_run(path))) == "shared_rows"
    distilled = AlgorithmConfig(distillation=DistillationConfig(teacher_path=str(recurrent)))
    assert layout_of(make_trainer(make_run(path, algorithm=distilled))) == "one_per_row"
    with_critic = AlgorithmConfig(advantage=GaeConfig())
    assert layout_of(make_trainer(make_run(recurrent, algorithm=with_critic))) == "one_per_row"


@torch.no_grad()
def canary_error(trainer):
    """Largest error of the canary relative to each sequence alone, nats."""
    token_ids, found = trainer.canary()
    alone = trainer.engine.model.causal_lm(input_ids=torch.tensor(token_ids), use_cache=False).logits.log_softmax(-1)
    expected = alone[:, :-1].gather(-1, torch.tensor(token_ids)[:, 1:, None])[..., 0]
    return float((torch.tensor(found) - expected).abs().max())


def test_the_canary_shows_a_layout_that_is_wrong(tmp_path):
    trainer = make_trainer(make_run(make_family(tmp_path, "mamba2")))
    trainer._layout = Layout("shared_rows", 4096)
    assert canary_error(trainer) > 0.1


def leak(layer, *, places):
    """Leak a little of each token into the token `places` positions later."""
    layer.register_forward_hook(lambda *parts: parts[2] + 1e-3 * parts[2].roll(places, dims=1))


@pytest.mark.parametrize(("places", "what"), [(1, "its row neighbors"), (-1, "its last token")])
@pytest.mark.parametrize("is_critic", [False, True])
def test_a_leak_that_appears_during_training_stops_the_run(tmp_path, places, what, is_critic):
    trainer = make_trainer(make_run(make_model(tmp_path), algorithm=AlgorithmConfig(advantage=GaeConfig())))
    groups = make_groups(longest=20)
    trainer.step(groups, learner_version=0, step=1)
    model = (trainer.second_model if is_critic else trainer).engine.model
    leak(model.backbone.base_model.layers[-1], places=places)
    trainer.step(groups, learner_version=0, step=20)
    name = type(model.backbone).__name__
    must = rf"{name} must compute a sample independently of {what}, .*in step 21.*learner.packing=false"
    with pytest.raises(DivergenceError, match=must):
        trainer.step(groups, learner_version=0, step=21)


def test_a_leak_between_the_answers_that_a_reward_model_scores_stops_the_run(tmp_path):
    policy = load(make_model(tmp_path), is_reward_model=True)
    samples = [Sample(np.arange(2, 8), np.array([5]), index, group_id=str(index)) for index in range(2)]
    settings = {"layout": Layout("shared_rows", 64), "ranks": make_alone(), "step": 1}
    check_rows(policy, samples, **settings)
    leak(policy.backbone.base_model.layers[-1], places=1)
    with pytest.raises(DivergenceError, match="independently of its row neighbors"):
        check_rows(policy, samples, **settings)


@pytest.mark.parametrize("name", ["mistral", "mamba2"])
def test_the_split_into_microbatches_changes_neither_canary_nor_step(tmp_path, name):
    path = make_family(tmp_path, name)
    steps = []
    for budget in (64, 4096):
        trainer = make_trainer(make_run(path, learner={"tokens_per_microbatch": budget}))
        assert layout_of(trainer) == FAMILIES[name][0]
        assert canary_error(trainer) < 1e-5
        trainer.step(make_groups(num_groups=4, longest=20), learner_version=0, step=1)
        steps.append(weights(trainer))
    assert largest_difference(*steps) < 1e-5


def test_the_soft_cap_of_attention_scores_is_kept(tmp_path):
    path = make_family(tmp_path, "gemma2")
    change_config(path, attn_logit_softcapping=0.1)
    token_ids = torch.arange(2, 40)[None]
    # Eager attention is the reference, because SDPA ignores the cap.
    expected = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")(token_ids).logits
    assert torch.allclose(load(path).causal_lm(token_ids).logits, expected)
