from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.configs.algorithm import AlgorithmConfig, DistillationConfig
from slipstream.configs.algorithm_terms import GaeConfig
from slipstream.configs.data import DataConfig
from slipstream.configs.generators import GeneratorsConfig, SamplingConfig
from slipstream.configs.learner import DeepSpeedEngineConfig, OptimizerConfig, TorchEngineConfig
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.batching.microbatch import Sample, Spans
from slipstream.learner.errors import DivergenceError, ModelError
from slipstream.learner.training import attention
from slipstream.learner.training import layout as layout_module
from slipstream.learner.training import model as model_module
from slipstream.learner.training.attention import LONG, PACKED, SINGLE_RANK, PackedRows, SequenceGroup, packed_attention
from slipstream.learner.training.layout import LayoutChooser, check_rows
from slipstream.learner.training.model import load_policy
from tests.cases import cases
from tests.families import FAMILIES, make_family
from tests.tolerance import largest_difference
from tests.unit.learner.builders import (
    CPU,
    configure,
    load,
    make_alone,
    make_groups,
    make_model,
    make_response,
    make_run,
    make_samples,
    make_trainer,
    measure,
    measure_alone,
    members_of,
    model_config,
    weights,
    zero,
)


def choose(path, *, ranks=None, **overrides):
    run = make_run(path, **overrides)
    policy = load_policy(run.model, device=CPU)
    return policy, LayoutChooser(run, policy, ranks=ranks or make_alone()).choose()


SLOW = (
    *("qwen3_next", "qwen3_5_moe_text", "falcon_h1", "jamba", "lfm2_moe", "inkling_text", "qwen4_exp_text"),
    *("recurrent_gemma", "xlstm", "deepseek_v4"),
)


def families(*, is_exact):
    names = [name for name, (kind, _) in FAMILIES.items() if bool(kind) == is_exact]
    return [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in names]


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
    configure(path, sliding_window=90)
    assert choose(path, model=model_config(path, max_length=128))[1].kind == "one_row"
    # The window has no effect if all sequences fit into it.
    assert choose(path, model=model_config(path))[1].kind == "shared_rows"


def test_the_shortest_sequences_can_be_probed_and_rows_are_no_longer_than_the_models_positions(tmp_path):
    path = make_model(tmp_path)
    data = DataConfig(train="a", eval="b", max_prompt_tokens=1)
    generators = GeneratorsConfig(sampling=SamplingConfig(max_tokens=1))
    _, layout = choose(path, model=model_config(path, max_length=2), data=data, generators=generators)
    assert layout.kind == "shared_rows"
    trainer = make_trainer(make_run(make_family(tmp_path, "gpt_neo")))
    assert (layout_of(trainer), trainer._layout.row_tokens) == ("one_row", 128)
    groups = make_groups(num_groups=8, longest=20)
    assert sum(len(member.token_ids) for group in groups for member in group) > 2 * 128
    assert np.isfinite(trainer.step(groups, learner_version=0, step=1)["learner/loss"])


@cases(
    "name, spread",
    ("qwen3", 0.02),
    *((each, 0.3) for each in ("qwen3", "qwen3_moe", "gemma2", "gpt_oss", "opt", "lfm2")),
)
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


def layout_of(trainer):
    return trainer._layout.kind


def test_a_teacher_and_a_critic_read_the_same_microbatches_and_the_canary_shows_a_wrong_layout(tmp_path):
    path, recurrent = make_model(tmp_path), make_family(tmp_path, "mamba2")
    assert layout_of(make_trainer(make_run(path))) == "shared_rows"
    distilled = AlgorithmConfig(distillation=DistillationConfig(teacher_path=str(recurrent)))
    assert layout_of(make_trainer(make_run(path, algorithm=distilled))) == "one_per_row"
    with_critic = AlgorithmConfig(advantage=GaeConfig())
    assert layout_of(make_trainer(make_run(recurrent, algorithm=with_critic))) == "one_per_row"
    trainer = make_trainer(make_run(make_family(tmp_path, "mamba2")))
    trainer._layout = Layout("shared_rows", 4096)
    assert canary_error(trainer) > 0.1


@torch.no_grad()
def canary_error(trainer):
    """Largest error of the canary relative to each sequence alone, nats."""
    token_ids, found = trainer.canary()
    alone = trainer.engine.model.causal_lm(input_ids=torch.tensor(token_ids), use_cache=False).logits.log_softmax(-1)
    expected = alone[:, :-1].gather(-1, torch.tensor(token_ids)[:, 1:, None])[..., 0]
    return float((torch.tensor(found) - expected).abs().max())


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


def test_the_soft_cap_of_attention_scores_is_kept_and_only_long_sequences_are_packed_on_a_cpu(tmp_path):
    path = make_family(tmp_path, "gemma2")
    configure(path, attn_logit_softcapping=0.1)
    token_ids = torch.arange(2, 40)[None]
    # Eager attention is the reference, because SDPA ignores the cap.
    expected = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")(token_ids).logits
    assert torch.allclose(load(path).causal_lm(token_ids).logits, expected)
    path = make_family(tmp_path, "qwen3")
    models = [load(path, max_length=length).causal_lm for length in (2047, 2048)]
    assert [model.config._attn_implementation for model in models] == ["sdpa", PACKED]


ROWS = torch.Size([2, 12])
SPANS = Spans([4, 3, 5, 7, 4, 1], [0, 0, 0, 3, 3, 5])
"""Two rows: a prompt with two responses; a prompt with one, and padding."""
VISIBLE = """
X........... XX.......... XXX......... XXXX........
XXXXX....... XXXXXX...... XXXXXXX.....
XXXX...X.... XXXX...XX... XXXX...XXX.. XXXX...XXXX. XXXX...XXXXX
X........... XX.......... XXX......... XXXX........ XXXXX....... XXXXXX...... XXXXXXX.....
XXXXXXXX.... XXXXXXXXX... XXXXXXXXXX.. XXXXXXXXXXX. ...........X
"""


def make_states(*, rows=ROWS, heads=4, shared=2, width=8, value_width=8):
    torch.manual_seed(0)
    shapes = [(heads, width), (shared, width), (shared, value_width)]
    return [torch.randn(rows[0], count, rows[1], size, requires_grad=True) for count, size in shapes]


def by_mask(query, key, value, mask):
    """Textbook attention with repeated keys and values."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def assert_same(states, found, expected):
    weights = torch.randn_like(expected)
    assert torch.allclose(found, expected, atol=1e-6)
    pairs = zip(*(torch.autograd.grad((out * weights).sum(), states) for out in (found, expected)), strict=True)
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in pairs)


def varlen_by_definition(query, key, value, queries, keys, max_q, max_k, *, scale, window_size, enable_gqa):
    """Reference for torch.nn.attention.varlen.varlen_attn, which has no CPU implementation."""
    before, after = window_size
    assert after == 0
    assert enable_gqa
    assert (max_q, max_k) == (int(queries.diff().max()), int(keys.diff().max()))
    out = []
    for (q0, q1), (k0, k1) in zip(pairwise(queries), pairwise(keys), strict=True):
        # Queries and keys are aligned at their ends.
        ahead = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)[None, :]
        mask = (ahead >= 0) & ((ahead <= before) if before >= 0 else torch.ones_like(ahead, dtype=torch.bool))
        parts = [part.transpose(0, 1)[None] for part in (query[q0:q1], key[k0:k1], value[k0:k1])]
        out.append(by_mask(*parts, mask)[0])
    return torch.cat(out)


@pytest.fixture(params=["sdpa", "varlen"])
def kernel(request, monkeypatch):
    if request.param == "varlen":
        monkeypatch.setattr(attention, "varlen_attn", varlen_by_definition)
        monkeypatch.setattr(attention, "_run_by_run", attention._by_kernel)
    return request.param


def test_spans_say_which_tokens_see_which_and_no_mask_is_larger_than_a_run():
    rows = "".join("\n".join(VISIBLE.split()).split("\n"))
    expected = torch.tensor([mark == "X" for mark in rows]).view(2, 1, 12, 12)
    assert SPANS.mask(ROWS, CPU).equal(expected)
    prompt = tuple(range(2, 32))
    samples = make_samples([make_response(0, i, prompt=prompt, response=(5, 6, 7, 8, 9)) for i in range(8)])
    (microbatch,) = collate(samples, layout=Layout("shared_rows", 4096, 4096))
    packed_rows = PackedRows(microbatch.spans, SINGLE_RANK)
    packed_attention(torch.nn.Module(), *make_states(rows=microbatch.token_ids.shape), None, packed_rows=packed_rows)
    # Responses of equal length share a mask. Prompts and whole sequences need none.
    assert [mask.shape for mask in packed_rows.masks.values()] == [(4, 34)]


@pytest.mark.parametrize("window", [None, 3, 6])
def test_runs_are_the_masks_attention_and_gradient(kernel, window):
    states = make_states()
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]])
    mask = SPANS.mask(ROWS, CPU)
    if window:
        mask = mask & (positions[:, None, :, None] - positions[:, None, None, :] < window)
    rows = PackedRows(SPANS, SINGLE_RANK)
    found, _ = packed_attention(torch.nn.Module(), *states, None, sliding_window=window, packed_rows=rows)
    assert_same(states, found, by_mask(*states, mask))


def test_later_layers_of_a_microbatch_copy_nothing_to_the_device(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", lambda query, *rest, **options: query)
    monkeypatch.setattr(attention, "_run_by_run", attention._by_kernel)
    rows, states, copied = PackedRows(SPANS, SINGLE_RANK), make_states(), []
    copy = torch.Tensor.to

    def count(tensor: torch.Tensor, *given: object) -> torch.Tensor:
        copied.append(tensor.dtype)
        return copy(tensor, *given)

    monkeypatch.setattr(torch.Tensor, "to", count)
    for layer in range(3):
        packed_attention(torch.nn.Module(), *states, None, packed_rows=rows)
        integers = [dtype for dtype in copied if not dtype.is_floating_point]
        assert len(integers) == 3, f"layer {layer}: the keys' index and the ends of queries and keys, once"


@pytest.mark.parametrize("window", [None, 3])
def test_rows_without_spans_are_sequences(window):
    states = make_states(value_width=4)
    mask = torch.ones(12, 12, dtype=torch.bool).tril().triu(-(window - 1) if window else -12)
    found, _ = packed_attention(torch.nn.Module(), *states, None, sliding_window=window)
    assert_same(states, found, by_mask(*states, mask))


@pytest.fixture
def always_packed(monkeypatch):
    monkeypatch.setattr(attention, "LONG", 1)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3_text", "deepseek_v3", "gpt2", "phi3"])
def test_long_sequences_of_a_family_need_no_mask(tmp_path, name, always_packed):
    policy, layout = choose(make_family(tmp_path, name))
    assert policy.causal_lm.config._attn_implementation == PACKED
    # Without masks, rows may be as long as a microbatch.
    assert layout == Layout("shared_rows", 8192, 8192)
    samples = make_samples(members_of(make_groups(group_size=3, longest=20)))
    packed = measure(policy, samples, layout).detach()
    policy.causal_lm.set_attn_implementation("sdpa")
    assert float((packed - measure_alone(policy, samples)).abs().max()) < 1e-4


def test_a_model_that_packed_attention_does_not_fit_keeps_its_own(tmp_path, always_packed, monkeypatch):
    monkeypatch.setattr(attention, "_attend", lambda states, *_, **__: states[0].transpose(1, 2))
    policy, layout = choose(make_family(tmp_path, "qwen3"))
    assert policy.causal_lm.config._attn_implementation == "sdpa"
    assert layout == Layout("shared_rows", 8192, 64)


def test_slices_hold_each_token_once_where_it_is_predicted_and_keep_their_positions():
    samples = make_samples(members_of(make_groups(num_groups=3, longest=12)))
    (microbatch,) = collate(samples, layout=Layout("shared_rows", 4096, 24, num_slices=4))
    parts = [SequenceGroup(4, rank).take(microbatch) for rank in range(4)]
    assert torch.cat([part.token_ids for part in parts], 1).equal(microbatch.token_ids)
    assert torch.cat([part.position_ids for part in parts], 1).equal(microbatch.position_ids)
    assert torch.cat([part.indices for part in parts]).sort()[0].equal(microbatch.indices.sort()[0])
    before = microbatch.token_ids.flatten()[microbatch.sources][microbatch.indices.argsort()]
    for part in parts:
        assert part.token_ids.flatten()[part.sources].equal(before[part.indices])
        assert part.spans is microbatch.spans
    (without,) = collate(samples, layout=Layout("one_per_row", 4096, num_slices=2))
    width, part = without.token_ids.shape[1] // 2, SequenceGroup(2, 1).take(without)
    assert part.position_ids[0].tolist() == list(range(width, 2 * width))
    assert part.num_tokens == without.num_tokens // 2


@cases(
    "family, size, complaint",
    ("qwen3", 4, "2 attention heads, which 4 ranks cannot share"),
    ("qwen3_next", 2, r"layers that are not softmax attention \(linear_attention\)"),
    ("llama4_text", 2, r"not softmax attention \(chunked_attention\)"),
    ("mamba2", 2, r"not softmax attention \(linear_attention\)"),
    ("gemma2", 2, "soft cap"),
    ("gpt_oss", 2, "sinks"),
    ("bloom", 2, "biases"),
)
def test_a_model_that_cannot_be_sliced_is_refused_before_it_is_loaded(tmp_path, family, size, complaint):
    path = make_family(tmp_path, family)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"model.path must .*sequence_parallel={size} .*{complaint}") as caught:
        load_policy(model_config(path), device=CPU, group=SequenceGroup(size))
    assert "\n" not in str(caught.value)


RECOMPUTED = DeepSpeedEngineConfig(gradient_checkpointing=True)


def train(folder: Path, engine, *, is_compiled: bool, max_length: int = LONG):
    learner = {
        "engine": engine,
        "compile": is_compiled,
        "optimizer": OptimizerConfig(learning_rate=0.1, epsilon=1.0),
        "tokens_per_microbatch": LONG,
    }
    path = make_model(folder)
    trainer = make_trainer(make_run(path, model=model_config(path, max_length=max_length), learner=learner))
    before = weights(trainer)
    for i in range(3):
        # Microbatches have different shapes in each step.
        trainer.step(make_groups(num_groups=2 + i, seed=i), learner_version=0, step=i + 1)
    return trainer, before, weights(trainer)


def assert_trains_alike(folder: Path, engine, **settings) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _, before, plain = train(folder, engine, is_compiled=False, **settings)
    assert not torch._dynamo.utils.counters["stats"]
    trainer, _, found = train(folder, engine, is_compiled=True, **settings)
    is_packed = trainer.engine.model.backbone.config._attn_implementation == PACKED
    assert is_packed == ("max_length" not in settings)
    assert largest_difference(plain, found) < 1e-4 * largest_difference(before, plain)
    # With and without gradients, before and after attention, which is not compiled.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (4 if is_packed else 2)


@pytest.mark.slow
def test_three_steps_of_compiled_layers_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    # Traced as for any backend, and computed by the same kernels.
    monkeypatch.setattr(attention, "BACKEND", "aot_eager")
    assert_trains_alike(tmp_path, RECOMPUTED)


@pytest.mark.long
@pytest.mark.parametrize("engine", [TorchEngineConfig(), zero(0), zero(2), RECOMPUTED])
@pytest.mark.parametrize("settings", [{}, {"max_length": 64}])
def test_generated_kernels_give_the_same_weights(tmp_path: Path, engine, settings) -> None:
    assert_trains_alike(tmp_path, engine, **settings)


@pytest.mark.parametrize("only_norms", [False, True])
def test_a_model_without_known_layers_cannot_be_compiled(only_norms: bool) -> None:
    with pytest.raises(ModelError, match=r"learner\.compile must be false for Linear .*not made of known layers"):
        attention.compile_layers(torch.nn.Linear(1, 1), only_norms=only_norms)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "engine"), [("qwen2", zero(3)), ("qwen3_moe", zero(0)), ("qwen3_moe", zero(3))])
def test_norms_are_compiled_where_layers_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family, engine):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(attention, "BACKEND", "aot_eager")
    path, found = str(make_family(tmp_path, family)), []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        learner = {"engine": engine, "compile": is_compiled}
        trainer = make_trainer(make_run(path, learner=learner))
        before = weights(trainer)
        for i in range(2):
            trainer.step(make_groups(seed=i), learner_version=0, step=i + 1)
        found.append(weights(trainer))
    assert largest_difference(*found) < 1e-4 * largest_difference(before, found[0])
    # Widths of layers and heads, with and without gradients.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8
    names = [name for name, part in trainer.engine.model.backbone.named_modules() if attention._is_norm(part)]
    assert any("input_layernorm" in name for name in names)
    assert all("norm" in name for name in names)
