import json
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from slipstream.configs.data import LoraConfig, ModelConfig
from slipstream.configs.load import load as load_run
from slipstream.learner.algorithms import logprobs
from slipstream.learner.batching.collate import Layout, collate
from slipstream.learner.engines.engine import ModelEngine
from slipstream.learner.errors import ModelError
from slipstream.learner.ranks import Ranks
from slipstream.learner.training import model as model_module
from slipstream.learner.training import saved_model, step_memory
from slipstream.learner.training.model import load_policy
from slipstream.learner.training.saved_model import FOLDER, copy_model, save_model
from slipstream.learner.training.second_model import load_value_model
from slipstream.learner.training.step_memory import Allocations, layer_input_bytes, step_bytes
from slipstream.runtime.lora import meta_model
from tests.families import make_family
from tests.tolerance import gradient_terms, is_rounding
from tests.unit.learner.builders import (
    CPU,
    VOCABULARY,
    configure,
    load,
    make_alone,
    make_groups,
    make_model,
    make_sample,
    model_config,
)
from tests.unit.slipstream.launch.test_plan import PUBLISHED

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
        LOADERS[setting](model_config(path), device=CPU)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loader", LOADERS.values())
def test_weights_are_float32_and_dropout_is_off(tmp_path, loader):
    path = make_model(tmp_path)
    configure(path, attention_dropout=0.5)
    model = loader(model_config(path), device=CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.backbone.config.attention_dropout == 0.0
    assert model.training


@pytest.mark.parametrize("name", ["phimoe", "falcon", "mixtral"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_the_policy_computes_what_the_untouched_checkpoint_does(tmp_path, name, is_recomputed):
    path = make_family(tmp_path, name)
    configure(path, hidden_dropout=0.5, attention_dropout=0.5, router_jitter_noise=0.1, input_jitter_noise=0.1)
    untouched = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    policy = load_policy(model_config(path), device=CPU, gradient_checkpointing=is_recomputed)
    inputs = {"input_ids": torch.arange(2, 40)[None], "use_cache": False}
    assert policy.causal_lm(**inputs).logits.equal(untouched(**inputs).logits)


def test_a_change_of_the_models_function_is_refused_by_name(tmp_path, monkeypatch):
    path = make_family(tmp_path, "phimoe", spread=0.02)
    # The threshold of this router is no noise.
    monkeypatch.setattr(model_module, "_disable_dropout", lambda each: setattr(each, "router_jitter_noise", 0.0))
    refusal = r"model\.path must .* as transformers does .*\(PhimoeForCausalLM\), which diff"
    with pytest.raises(ModelError, match=refusal):
        load(path)


def test_what_is_saved_is_what_transformers_loads_with_a_template_of_ones_own_and_experts_as_on_the_hub(tmp_path):
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
    path = make_family(tmp_path, "qwen3_moe")
    engine, config = load_engine(path, dtype="float32")
    save_model(engine, tmp_path / "final", config=config, ranks=make_alone())
    base, saved = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "final"))
    assert base.keys() == saved.keys()
    assert all(tensor.equal(saved[name]) for name, tensor in base.items())


def score(policy):
    samples = [make_sample(m) for group in make_groups() for m in group]
    (microbatch,) = collate(samples, layout=Layout("shared_rows", microbatch_tokens=4096))
    found = policy(microbatch)["logprobs"]
    policy.zero_grad()
    found.sum().backward()
    return found.detach(), [p.grad.clone() for p in policy.parameters()]


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi", "gemma2", "recurrent_gemma", "xlstm"])
def test_the_head_is_used_where_it_computes_the_models_logits(tmp_path, name, monkeypatch):
    """Also a tied one, one with a bias, and one with a soft cap, unless its name is unknown."""
    path, results = make_family(tmp_path, name), []
    for has_head in (False, True):
        policy = load(path)
        assert (policy.head is not None) == (name not in ("recurrent_gemma", "xlstm"))
        if not has_head:
            policy.head = None
        monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", 3 * VOCABULARY if has_head else 10**9)
        results.append(score(policy))
    (expected, gradients), (found, chunked) = results
    terms = gradient_terms(policy, num_tokens=len(found))
    assert is_rounding([found], [expected], terms=terms)
    assert is_rounding(chunked, gradients, terms=terms)


FILE_BYTES = 32 * 1024


def load_engine(path, *, dtype="bfloat16", lora=None):
    config = model_config(path, dtype=dtype, lora=lora)
    return ModelEngine(load_policy(config, device=CPU)), config


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_ranks_copy_disjoint_files_of_bounded_size_that_transformers_loads(tmp_path, monkeypatch, num_ranks):
    monkeypatch.setattr(saved_model, "FILE_BYTES", FILE_BYTES)
    engine, config = load_engine(make_model(tmp_path))
    whole, largest = dict(engine.gather_parameters()), 0
    total = sum(tensor.nbytes for tensor in whole.values())
    folder, seen = tmp_path / "saved", []
    for rank in reversed(range(num_ranks)):
        writes = copy_model(engine, config=config, ranks=Ranks(rank=rank, size=num_ranks, device=CPU))
        held = [item for write in writes.values() for part in write.args if type(part) is dict for item in part.items()]
        largest = max(largest, sum(tensor.nbytes for _, tensor in held))
        seen += [name for name, _ in held]
        assert (FOLDER in writes) == (rank == 0)
        for name, write in writes.items():
            write(folder / name if name else folder)
    assert sorted(seen) == sorted(whole)
    # Files are dealt out one by one.
    assert largest <= total / num_ranks + FILE_BYTES
    assert set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]) == set(whole)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.dtype == torch.bfloat16
    assert all(tensor.equal(whole[name]) for name, tensor in again.named_parameters())


def test_the_final_model_is_written_file_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_model, "FILE_BYTES", FILE_BYTES)
    engine, config = load_engine(make_model(tmp_path), dtype="float32")
    alive, most, original = set(), [0], saved_model._copied
    sizes = {}

    def copy(tensor):
        copied = original(tensor)
        key = copied.data_ptr()
        alive.add(key)
        sizes[key] = copied.nbytes
        weakref.finalize(copied, alive.discard, key)
        most[0] = max(most[0], sum(sizes[each] for each in alive))
        return copied

    monkeypatch.setattr(saved_model, "_copied", copy)
    save_model(engine, tmp_path / "final", config=config, ranks=make_alone())
    whole = dict(engine.gather_parameters())
    assert most[0] <= 2 * FILE_BYTES < sum(tensor.nbytes for tensor in whole.values()) / 2
    files = sorted((tmp_path / "final").glob("*.safetensors"))
    assert len(files) > 4
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert saved.keys() == whole.keys()
    assert all(tensor.equal(saved[name]) for name, tensor in whole.items())


def test_a_rank_that_cannot_write_still_gathers_and_then_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_model, "FILE_BYTES", FILE_BYTES)
    engine, config = load_engine(make_model(tmp_path))
    gathered, original = [], engine.gather_parameters

    def gather(**options):
        for name, tensor in original(**options):
            gathered.append(name)
            yield name, tensor

    engine.gather_parameters = gather
    (tmp_path / "final").write_text("not a folder")
    with pytest.raises(OSError, match="final"):
        save_model(engine, tmp_path / "final", config=config, ranks=make_alone())
    assert gathered == [name for name, _ in original()]


@pytest.mark.parametrize("file_bytes", [FILE_BYTES, 2**31])
def test_an_adapter_on_a_bfloat16_base_is_merged_without_rounding(tmp_path, monkeypatch, file_bytes):
    monkeypatch.setattr(saved_model, "FILE_BYTES", file_bytes)
    engine, config = load_engine(make_model(tmp_path), lora=LoraConfig(rank=4))
    for _, parameter in engine.model.weights():
        torch.nn.init.normal_(parameter, std=1e-3)
    save_model(engine, tmp_path / "final", config=config, ranks=make_alone())
    files = (tmp_path / "final").glob("*.safetensors")
    merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert merged.keys() == engine.model.saved_names.tensors.keys()
    module = engine.model.causal_lm.get_submodule("model.layers.0.self_attn.q_proj")
    product = module.scaling["default"] * (module.lora_B.default.weight.float() @ module.lora_A.default.weight.float())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert merged[name].equal(module.base_layer.weight.float() + product)
    assert not merged[name].bfloat16().float().equal(merged[name])


PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "matmul"}


class Products(Allocations):
    """Counts the matrix products by (dtype, sizes that are no token count)."""

    found: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in PRODUCTS:
            for factor in [each for each in args if isinstance(each, Tensor) and each.dim() >= 2][-1:]:
                Products.found[factor.dtype, tuple(factor.shape)] += 1
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-30B-A3B"])
def test_layers_multiply_in_bfloat16_and_keep_their_inputs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(step_memory, "Allocations", Products)
    monkeypatch.setattr(Products, "found", Counter())
    kind, sizes = PUBLISHED[name]
    peaks, inputs = {}, {}
    for layers in (2, 3):
        folder = tmp_path / str(layers)
        short = sizes | {"num_hidden_layers": layers, "architectures": [kind.__name__.replace("Config", "ForCausalLM")]}
        kind(**short).save_pretrained(folder)
        # Sharded and recomputed, as in the presets of these models.
        run = load_run(["experiment=gsm8k_8gpu", f"model.path={folder}", "learner.engine.gradient_checkpointing=true"])
        model = meta_model(run.model)
        inputs[layers] = layer_input_bytes(run, model)
        peaks[layers] = step_bytes(run, model, on_gpu=True)
    # Only a router, and the head, multiply in float32.
    allowed = {sizes["vocab_size"], sizes.get("num_experts", 0)}
    full = {shape for dtype, shape in Products.found if dtype == torch.float32 and not allowed & {*shape}}
    assert full == set()
    assert sum(count for (dtype, _), count in Products.found.items() if dtype == torch.bfloat16) > 2 * 7 * 3
    inputs_of_layer = inputs[3] - inputs[2]
    # Of an input of bfloat16, and of the chosen experts, int64.
    chosen = inputs_of_layer * 8 * sizes.get("num_experts_per_tok", 0) / (2 * sizes["hidden_size"])
    assert peaks[3] - peaks[2] == pytest.approx(inputs_of_layer + chosen, rel=0.01)
