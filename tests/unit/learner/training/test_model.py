import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from slipstream.configs.data import ModelConfig
from slipstream.learner.algorithms import logprobs
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.engines.engine import ModelEngine
from slipstream.learner.errors import ModelError
from slipstream.learner.training import model as model_module
from slipstream.learner.training.critic import load_value_model
from slipstream.learner.training.model import load_policy
from slipstream.learner.training.saved_model import save_model
from tests.families import make_family
from tests.tolerance import gradient_terms, is_rounding
from tests.unit.learner.builders import CPU, VOCABULARY, make_alone, make_groups, make_model, make_sample


def load(path):
    return load_policy(ModelConfig(max_length=64, dtype="float32", path=str(path)), device=CPU)


def configure(path, **settings):
    """Change the model's config file."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


LOADERS = {r"model\.path": load_policy, r"algorithm\.critic\.path .*": load_value_model}
BREAK = {
    "missing": lambda path: path.rename(path.with_name("elsewhere")),
    "unreadable": lambda path: (path / "model.safetensors").write_bytes(b"garbage"),
    "without weights": lambda path: (path / "model.safetensors").unlink(),
    "contradictory": lambda path: configure(path, num_hidden_layers=3),
}


@pytest.mark.parametrize("setting", LOADERS)
@pytest.mark.parametrize("broken", BREAK)
def test_a_broken_checkpoint_is_one_sentence(tmp_path, setting, broken):
    path = make_model(tmp_path)
    BREAK[broken](path)
    with pytest.raises(ModelError, match=rf"^{setting} ?must be a readable transformers checkpoint") as caught:
        LOADERS[setting](ModelConfig(max_length=64, dtype="float32", path=str(path)), device=CPU)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loader", LOADERS.values())
def test_weights_are_float32_and_dropout_is_off(tmp_path, loader):
    path = make_model(tmp_path)
    configure(path, attention_dropout=0.5)
    model = loader(ModelConfig(max_length=64, dtype="float32", path=str(path)), device=CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.backbone.config.attention_dropout == 0.0
    assert model.training


@pytest.mark.parametrize("name", ["phimoe", "falcon", "mixtral"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_the_policy_computes_what_the_untouched_checkpoint_does(tmp_path, name, is_recomputed):
    path = make_family(tmp_path, name)
    configure(path, hidden_dropout=0.5, attention_dropout=0.5, router_jitter_noise=0.1, input_jitter_noise=0.1)
    untouched = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    policy = load_policy(
        ModelConfig(max_length=64, dtype="float32", path=str(path)), device=CPU, gradient_checkpointing=is_recomputed
    )
    inputs = {"input_ids": torch.arange(2, 40)[None], "use_cache": False}
    assert policy.causal_lm(**inputs).logits.equal(untouched(**inputs).logits)


def test_a_change_of_the_models_function_is_refused_by_name(tmp_path, monkeypatch):
    path = make_family(tmp_path, "phimoe", spread=0.02)
    # The threshold of this router is no noise.
    monkeypatch.setattr(model_module, "_disable_dropout", lambda each: setattr(each, "router_jitter_noise", 0.0))
    refusal = r"model\.path must .* as transformers does .*\(PhimoeForCausalLM\), which diff"
    with pytest.raises(ModelError, match=refusal):
        load(path)


def test_what_is_saved_is_what_transformers_loads_with_a_template_of_ones_own(tmp_path):
    path = make_model(tmp_path)
    (tmp_path / "mine.jinja").write_text("mine")
    policy = load(path)
    assert policy.vocab_size == VOCABULARY
    with torch.no_grad():
        policy.causal_lm.lm_head.weight.add_(1)
    saved = {name: p.detach() for name, p in policy.causal_lm.named_parameters()}
    for folder, template in (("saved", None), ("templated", str(tmp_path / "mine.jinja"))):
        config = ModelConfig(max_length=64, dtype="float32", path=str(path), chat_template=template)
        save_model(ModelEngine(policy), tmp_path / folder, config=config, ranks=make_alone())
    again = Qwen2ForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(p.equal(saved[name]) for name, p in again.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token == "<eos>"
    assert AutoTokenizer.from_pretrained(tmp_path / "templated").chat_template == "mine"


def score(policy):
    samples = [make_sample(m) for group in make_groups() for m in group]
    (microbatch,) = collate(samples, layout=Layout("shared_rows", microbatch_tokens=4096))
    found = policy(microbatch)["logprobs"]
    policy.zero_grad()
    found.sum().backward()
    return found.detach(), [p.grad.clone() for p in policy.parameters()]


def test_recomputed_activations_change_nothing_and_bfloat16_is_near(tmp_path):
    path = str(make_model(tmp_path))
    exact, expected = score(load_policy(ModelConfig(max_length=64, dtype="float32", path=path), device=CPU))
    recomputed, gradients = score(
        load_policy(ModelConfig(max_length=64, dtype="float32", path=path), device=CPU, gradient_checkpointing=True)
    )
    assert exact.equal(recomputed)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, gradients, strict=True))
    policy = load_policy(ModelConfig(max_length=64, path=path, dtype="bfloat16"), device=CPU)
    rough, gradients = score(policy)
    assert rough.dtype == torch.float32
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    assert not rough.equal(exact)
    # Each matrix product rounds its weights and its result, each norm and residual sum its result.
    terms = 2 * sum(weight.dim() == 2 for weight in policy.parameters()) + 8
    assert is_rounding([rough], [exact], terms=terms, dtype=torch.bfloat16)


RECURRENT = {"initializer_range": 0.02, "lru_width": 32, "attention_window_size": 16, "head_dim": 16}


def families():
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0}
    return {
        "tied": ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY}, True),
        "untied": ("llama", small, True),
        "bias": ("phi", small, True),
        "soft cap": ("gemma2", small | {"final_logit_softcapping": 1.0, "head_dim": 16}, True),
        "scaled logits": ("cohere", small | {"logit_scale": 0.25}, False),
        "another soft cap": ("recurrent_gemma", small | RECURRENT, False),
        "large soft cap": ("xlstm", small | {"num_heads": 2, "num_blocks": 2, "chunk_size": 8}, False),
    }


@pytest.mark.parametrize("name", families())
def test_the_head_is_used_where_it_computes_the_models_logits(tmp_path, name, monkeypatch):
    kind, settings, is_used = families()[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).save_pretrained(tmp_path)
    results = []
    for has_head in (False, True):
        policy = load(tmp_path)
        assert (policy.head is not None) == is_used
        if not has_head:
            policy.head = None
        monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", 3 * VOCABULARY if has_head else 10**9)
        results.append(score(policy))
    (expected, gradients), (found, chunked) = results
    terms = gradient_terms(policy, num_tokens=len(found))
    assert is_rounding([found], [expected], terms=terms)
    assert is_rounding(chunked, gradients, terms=terms)
