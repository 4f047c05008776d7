"""Estimates of memory: hand-computed states, traced steps, what is refused."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedConfig, Qwen2_5_VLConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3MoeConfig

from slipstream.configs.base import ConfigError
from slipstream.configs.load import derived_sizes, load
from slipstream.configs.run import RunConfig
from slipstream.launch import plan as plan_module
from slipstream.launch.plan import GIB, HOST, Machine, Plan, kv_bytes, make_plan, shared_cache_gib, show_plan
from slipstream.learner.algorithms.logprobs import Requested
from slipstream.learner.training.model import load_policy
from slipstream.learner.training.step_memory import Allocations, largest_microbatch, step_bytes
from slipstream.runtime.lora import meta_model
from slipstream.runtime.process import GroupLimit
from tests.cases import cases

LAYERS, WIDTH, INNER, VOCABULARY = 4, 256, 512, 4096
NUM_PARAMETERS = VOCABULARY * WIDTH + LAYERS * (2 * WIDTH**2 + 2 * WIDTH * 64 + 3 * WIDTH * INNER + 2 * WIDTH) + WIDTH
NUM_BIASES = LAYERS * (WIDTH + 2 * 64)
NUM_ELEMENTS = NUM_PARAMETERS + NUM_BIASES
LARGE = Machine(host_gib=1024, gpus=8, gpu_gib=80)
STATES = ("weights", "gradients", "optimizer: master weights", "optimizer: moments")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but config.json: eight query heads of 32, two of keys and values, a tied head."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
    Qwen2Config(**sizes, **heads, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return folder


def settings(model: Path, *overrides: str) -> RunConfig:
    sizes = ["model.max_length=256", "data.max_prompt_tokens=64", "generators.sampling.max_tokens=192"]
    sizes.append("learner.tokens_per_microbatch=1024")
    return load(["experiment=digits_cpu", f"model.path={model}", *sizes, *overrides])


def plan_of(model: Path, *overrides: str, machine: Machine = LARGE) -> Plan:
    return make_plan(settings(model, *overrides), machine)


def gib(plan: Plan, process: str, cause: str) -> float:
    (found,) = [need.gib for need in plan.needs if (need.process, need.cause) == (process, cause)]
    return found


def test_states_are_those_of_the_zero_stage(model: Path) -> None:
    one = 4 * NUM_ELEMENTS / GIB
    whole = plan_of(model)
    assert gib(whole, "learner rank 0", "weights") == pytest.approx(one)
    assert gib(whole, "learner rank 0", "gradients") == pytest.approx(one)
    assert gib(whole, "learner rank 0", "optimizer: moments") == pytest.approx(2 * one)
    ranks = ("learner.num_ranks=4", "learner.engine.zero_stage=3", "algorithm.kl.coef=0.1")
    sharded = plan_of(model, *ranks)
    shares = {"weights, gathered": 1, "optimizer: moments": 2 / 4}
    shares |= dict.fromkeys(("weights", "gradients", "optimizer: master weights", "reference: weights"), 1 / 4)
    assert {cause: gib(sharded, "learner rank 3", cause) / one for cause in shares} == pytest.approx(shares)


@cases("stage, ranks, expected", (0, 1, 16), (1, 4, 4 + 12 / 4), (2, 4, 2 + 14 / 4), (3, 4, 4))
def test_a_bfloat16_model_has_float32_masters_and_moments(model: Path, stage: int, ranks: int, expected: float) -> None:
    """`tests/contract/test_train_engine.py` counts the same bytes in the engines."""
    layout = (f"learner.num_ranks={ranks}", f"learner.engine.zero_stage={stage}")
    plan = plan_of(model, "model.dtype=bfloat16", *layout)
    own = {need.cause: need.gib for need in plan.needs if need.process == "learner rank 0"}
    assert sum(own[cause] for cause in STATES) * GIB / NUM_ELEMENTS == pytest.approx(expected)


def test_an_adapter_trains_on_a_base_of_two_bytes_per_parameter_without_gradients_and_travels_alone(model) -> None:
    plan = plan_of(model, "model.lora.rank=4", "model.dtype=bfloat16")
    assert gib(plan, "learner rank 0", "weights") * GIB / NUM_ELEMENTS == pytest.approx(2, rel=0.1)
    plan = plan_of(model, "model.lora.rank=4", "algorithm.kl.coef=0.1")
    # Rank-4 matrices for q, k, v, o, gate, up, and down.
    pairs = [(WIDTH, WIDTH), (WIDTH, 64), (WIDTH, 64), (WIDTH, WIDTH)] + 2 * [(WIDTH, INNER)] + [(INNER, WIDTH)]
    adapter = LAYERS * 4 * sum(map(sum, pairs))
    assert gib(plan, "learner rank 0", "gradients") == pytest.approx(4 * adapter / GIB)
    assert gib(plan, "learner rank 0", "published versions, two") == pytest.approx(2 * 4 * adapter / GIB)
    assert not [need for need in plan.needs if need.cause.startswith("reference")]


@pytest.mark.parametrize("lora", [False, True])
def test_an_adapter_is_advised_only_to_those_without_one(model, lora, monkeypatch):
    monkeypatch.setattr(plan_module, "_CONTEXT_GIB", 0.0)
    small = Machine(host_gib=1024, gpus=2, gpu_gib=0.01)
    settings = ["learner.device=auto", "generators/engine=scripted", "learner.tokens_per_microbatch=256"]
    settings += ["learner.engine.gradient_checkpointing=true", *(["model.lora.rank=256"] if lora else [])]
    plan = plan_of(model, *settings, machine=small)
    (problem,) = plan.problems
    assert "the largest part is optimizer: moments" in problem
    assert ("train model.lora" in problem) != lora


def test_ranks_share_the_files_of_a_checkpoint(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "FILE_BYTES", NUM_ELEMENTS // 2)
    plan = plan_of(model, "learner.num_ranks=4", "learner.engine.zero_stage=3", "model.dtype=bfloat16")
    copies = [gib(plan, f"learner rank {rank}", "checkpoint being written") for rank in range(4)]
    # Masters and moments, and one of four files.
    assert copies == pytest.approx([(12 / 4 + 2 / 4) * NUM_ELEMENTS / GIB] * 4, rel=1e-5)


def test_gradients_in_float32_take_the_place_of_activations_which_ranks_share_or_move_to_the_host(model: Path) -> None:
    small = ("learner.tokens_per_microbatch=256", "learner.engine.gradient_checkpointing=true")
    found = {need.cause: need.gib for need in plan_of(model, "model.dtype=bfloat16", *small).needs}
    name, other = "gradients in float32, for the optimizer", "activations of the largest microbatch"
    assert (name in found) != (other in found)
    assert found.get(name, found.get(other, 0)) >= 4 * NUM_ELEMENTS / GIB
    long = ("learner.tokens_per_microbatch=4096", "learner.num_ranks=2", "model.max_length=2048")
    plans = [plan_of(model, *long, *more) for more in ((), ("learner.sequence_parallel=2",))]
    whole, half = (gib(plan, "learner rank 1", "activations of the largest microbatch") for plan in plans)
    assert half == pytest.approx(whole / 2)
    offload, checkpointing = "learner.engine.offload_activations=true", "learner.engine.gradient_checkpointing=true"
    kept, moved = plan_of(model, checkpointing), plan_of(model, checkpointing, offload)
    inputs = gib(moved, "learner rank 0", "inputs of layers")
    # Rows of 255 inputs, four of them to a microbatch.
    assert inputs == pytest.approx(4 * 255 * WIDTH * LAYERS * 4 / GIB)
    name = "activations of the largest microbatch"
    assert gib(kept, "learner rank 0", name) - gib(moved, "learner rank 0", name) == pytest.approx(inputs)


@cases("name, embeddings, hidden", ("adamw", 2, 2), ("muon", 2, 1), ("adamw_8bit", 0.508, 0.508))
def test_moments_are_those_of_the_optimizer(model: Path, name: str, embeddings: float, hidden: float) -> None:
    plan = plan_of(model, f"learner.optimizer.name={name}")
    expected = (embeddings * VOCABULARY * WIDTH + hidden * (NUM_ELEMENTS - VOCABULARY * WIDTH)) * 4 / GIB
    assert gib(plan, "learner rank 0", "optimizer: moments") == pytest.approx(expected, rel=0.01)


def test_a_process_reward_model_is_a_second_policy_beside_its_reference(model: Path) -> None:
    one = 4 * NUM_ELEMENTS / GIB
    needs = {need.cause: need.gib for need in plan_of(model, "recipe=prime").needs if need.process == "learner rank 0"}
    for cause, share in {"weights": 1, "gradients": 1, "optimizer: moments": 2}.items():
        assert needs[f"process reward: {cause}"] == pytest.approx(share * one)
    assert needs["reference: weights"] == pytest.approx(one)
    adapted = plan_of(model, "recipe=prime", "model.lora.rank=4")
    assert gib(adapted, "learner rank 0", "process reward: gradients") == pytest.approx(one)
    assert not [need for need in adapted.needs if need.cause.startswith("reference")]


def test_a_step_is_traced_with_what_its_settings_save_and_allocates_as_much_as_a_real_one(model, tmp_path) -> None:
    def traced(*overrides: str) -> int:
        run = settings(model, *overrides)
        return step_bytes(run, meta_model(run.model))

    plain = traced()
    # At least the inputs of every matrix product, float32[1024, ...].
    assert plain > 1024 * 4 * LAYERS * (3 * WIDTH + 3 * INNER)
    assert traced("learner.engine.gradient_checkpointing=true") < 0.7 * plain
    assert traced("learner.tokens_per_microbatch=512") < 0.7 * plain
    assert traced("model.dtype=bfloat16") < plain
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128}
    sizes |= {"num_experts": 8, "moe_intermediate_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    found = {}
    for chosen in (1, 4):
        folder = tmp_path / str(chosen)
        config = Qwen3MoeConfig(**sizes, **heads, num_experts_per_tok=chosen, architectures=["Qwen3MoeForCausalLM"])
        config.save_pretrained(folder)
        run = settings(folder)
        found[chosen] = step_bytes(run, meta_model(run.model))
    # Of each further expert: gate and up, the activation's factors, the product, its output and the weighted one.
    assert found[4] - found[1] > 3 * 2 * 1024 * 4 * (4 * 96 + 2 * 64)
    Qwen2ForCausalLM(Qwen2Config.from_pretrained(model)).save_pretrained(tmp_path)
    run = settings(tmp_path)
    policy = load_policy(run.model, device=torch.device("cpu"))
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    microbatch = largest_microbatch(run, policy.backbone)
    with Allocations() as allocations:
        policy(microbatch, requested=Requested(entropy=True))["logprobs"].sum().backward()
    assert step_bytes(run, meta_model(run.model)) == pytest.approx(allocations.peak, rel=0.02)


def test_what_cannot_fit_is_named_with_what_to_change(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = plan_of(model, machine=Machine(host_gib=1.0)).problems
    assert problem.startswith("host must hold ")
    assert "got 1.0: the largest part is " in problem
    assert not plan_of(model).problems
    with pytest.raises(SystemExit) as caught:
        show_plan([f"model.path={model}"], gpus=0, gpu_gib=None, host_gib=1.0, is_json=True)
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: host must hold ")
    assert msgspec.json.decode(printed.out)["plan"]["machine"]["host_gib"] == 1.0
    show_plan([f"model.path={model}"], gpus=0, gpu_gib=None, host_gib=64.0, is_json=False)
    words = r"weight update, estimated +0.01 GiB: the learner waits .* and pause 0.01 s"
    assert re.search(words, capsys.readouterr().out)


def test_gpus_hold_what_their_roles_need_and_an_engine_one_sequence(tmp_path: Path, model: Path) -> None:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 8}
    wide = Qwen3Config(**sizes, vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=4096)
    wide.architectures = ["Qwen3ForCausalLM"]
    wide.save_pretrained(tmp_path)
    run = settings(tmp_path, "model.max_length=6144", "learner.tokens_per_microbatch=6144")
    # Keys and values of two heads of 4,096, float32, in four layers.
    per_token = 2 * 2 * 4096 * 4 * LAYERS
    assert kv_bytes(meta_model(run.model), width=4) == per_token
    assert kv_bytes(meta_model(run.model), width=1) == per_token // 4
    (problem,) = make_plan(run, Machine(host_gib=1024)).problems
    assert "(6144 tokens, 1.50 GiB), got 1.00 GiB: lower model.max_length" in problem
    run = settings(model, "generators/engine=vllm_gpu_tp2", "generators.count=2", "learner.device=auto")
    plan = make_plan(run, LARGE)
    places = {need.process: {n.place for n in plan.needs if n.process == need.process} for need in plan.needs}
    assert places["learner rank 0"] == {"gpu 0", HOST}
    assert places["generator-1"] == {"gpu 3", "gpu 4", HOST}
    staged = make_plan(settings(model, "weights.staging=device", "learner.device=auto"), LARGE)
    one_gib = gib(staged, "learner rank 0", "published versions, two") / 2
    assert gib(staged, "learner rank 0", "staged version") == pytest.approx(one_gib)
    # By itself only if that is at most half of what is free.
    others = plan.total("gpu 0") - one_gib
    for spare, count in ((2.1, 1), (1.9, 0)):
        small = make_plan(run, Machine(host_gib=1024, gpus=8, gpu_gib=others + spare * one_gib))
        assert sum(need.cause == "staged version" for need in small.needs) == count
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match=r"^model.path must name a model whose config.json can be read"):
        plan_of(tmp_path)
    with pytest.raises(ConfigError, match="--gpu-gib"):
        Machine.here(host_gib=None, gpus=2 + torch.cuda.device_count(), gpu_gib=None)


def test_a_shared_gpu_is_dealt_out_to_learner_and_engines_or_refused_with_what_each_takes(model: Path) -> None:
    run = settings(model, "generators/engine=vllm_gpu_shared", "generators.count=2", "model.dtype=bfloat16")
    one = Machine(host_gib=1024, gpus=1, gpu_gib=80)
    # Few sequences fill less than is left: keys and values of two heads of 32, in four layers, in half precision.
    full = (256 + 4) * 256 * 2 * 2 * 32 * 2 * LAYERS / GIB
    assert shared_cache_gib(run, gpu_gib=80) == pytest.approx(full + 0.25)
    plan = make_plan(run, one)
    assert gib(plan, "generator-1", "engine: context and graphs") == pytest.approx(1.8)
    # Neither measures what the other takes: all that is planned fits, and room for fragments.
    later = gib(plan, "learner rank 0", "staged version")
    others = plan.total("gpu 0") - 2 * gib(plan, "generator-0", "KV cache") - later
    tight = make_plan(run, Machine(host_gib=1024, gpus=1, gpu_gib=(others + 0.1) / 0.92))
    assert gib(tight, "generator-0", "KV cache") == pytest.approx(0.05)
    assert tight.problems == []
    given = settings(model, "generators.engine.kv_cache_gib=2.5", "generators/engine=vllm_gpu_shared")
    assert gib(make_plan(given, one), "generator-0", "KV cache") == 2.5
    assert gib(make_plan(run, Machine(host_gib=1024)), "generator-0", "KV cache") == 1
    run = settings(model, "generators/engine=vllm_gpu_shared", "learner.device=auto")
    with pytest.raises(ConfigError) as caught:
        shared_cache_gib(run, gpu_gib=2.0)
    message = str(caught.value)
    assert message.startswith("the KV cache of an engine must hold one sequence of model.max_length (256 tokens")
    assert "got 0.00 GiB: other needs share gpu 0 of 2.0 GiB (generator-0: engine: context and graphs 1.8" in message
    assert "learner: context and libraries 0.8" in message
    assert "raise the number of GPUs, or " in message


def test_a_container_has_no_more_memory_than_its_limit_and_derived_sizes_follow_from_the_settings(monkeypatch) -> None:
    limits = [GroupLimit(Path("inner"), 2 * GIB, 0), GroupLimit(Path("outer"), 3 * GIB, 0)]
    monkeypatch.setattr(plan_module, "group_limits", lambda controller: {"memory": limits}[controller])
    assert Machine.here(host_gib=None, gpus=0, gpu_gib=None).host_gib == 2.0
    assert Machine.here(host_gib=4.0, gpus=0, gpu_gib=None).host_gib == 4.0
    derived = derived_sizes(load(["experiment=gsm8k_8gpu"]))
    updates = (derived["trajectories per step"], derived["trajectories per optimizer update"])
    assert updates == ("1024 = 128 groups x 8", "1024")
    assert derived["groups running or waiting"].startswith("< 640 ")
    assert derived["devices of all generators"] == "4"


def qwen(kind: type[PreTrainedConfig], width: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Any:
    """Sizes as published, so that presets are planned without the hub."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "vocab_size": 152_064, "tie_word_embeddings": False}
    return kind, sizes | more


TIED = {"vocab_size": 151_936, "tie_word_embeddings": True}
ROPE = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
TEXT = qwen(Qwen2Config, 2048, 36, 16, 2, intermediate_size=11_008, **TIED, rope_parameters=ROPE)[1]
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048}
SEEING = {"text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": True}
PUBLISHED: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Qwen/Qwen2.5-1.5B-Instruct": qwen(Qwen2Config, 1536, 28, 12, 2, intermediate_size=8960, **TIED),
    "Qwen/Qwen2.5-7B-Instruct": qwen(Qwen2Config, 3584, 28, 28, 4, intermediate_size=18_944),
    "Qwen/Qwen2.5-32B-Instruct": qwen(Qwen2Config, 5120, 64, 40, 8, intermediate_size=27_648),
    "Qwen/Qwen3-30B-A3B": qwen(Qwen3MoeConfig, 2048, 48, 32, 4, vocab_size=151_936, **EXPERTS),
    "Qwen/Qwen2.5-VL-3B-Instruct": (Qwen2_5_VLConfig, SEEING),
}
LONG, SMALL = pytest.mark.long, ("gsm8k", "math", "retool", "search_r1", "environment")


def save_published(run: RunConfig, folder: Path) -> None:
    """Write the config.json of the run's model."""
    kind, sizes = PUBLISHED[run.model.path]
    task = "ForConditionalGeneration" if kind is Qwen2_5_VLConfig else "ForCausalLM"
    kind(**sizes, architectures=[kind.__name__.replace("Config", task)]).save_pretrained(folder)


@cases(
    # Parameters as the model cards of the hub count them; seconds by hand from docs/memory.md.
    "preset, parameters, ranks, generators, workers, is_staged, seconds",
    ("gsm8k_1gpu", 1_543_714_304, 1, 1, 1, True, (0.00247, 0.714, 0.0695)),
    ("gsm8k_8gpu", 7_615_616_512, 4, 2, 2, True, (0.0122, 3.36, 0.171)),
    ("gsm8k_32b_8gpu", 32_763_876_352, 6, 1, 2, False, (1.31, 14.4, 0.74)),
    ("gsm8k_moe_8gpu", 30_532_122_624, 6, 1, 2, False, (1.22, 13.4, 0.69)),
)
def test_host_memory_is_that_of_hand_arithmetic(
    preset, parameters, ranks, generators, workers, is_staged, seconds, tmp_path, monkeypatch
):
    monkeypatch.setattr("slipstream.launch.plan.step_bytes", lambda *_, **__: 0)
    run = load([f"experiment={preset}"])
    save_published(run, tmp_path)
    run = load([f"experiment={preset}", f"model.path={tmp_path}"])
    plan = make_plan(run, Machine(host_gib=2048, gpus=8 if ranks > 1 else 1, gpu_gib=79))
    one = parameters / GIB
    # Two versions in bfloat16, which generators map.
    assert gib(plan, "learner rank 0", "published versions, two") == pytest.approx(2 * 2 * one)
    assert not [need for need in plan.needs if "received" in need.cause]
    # Offloaded states and checkpoints of the learner have tests of their own.
    states = ("checkpoint", "gradients", "optimizer")
    others = sum(need.gib for need in plan.needs if need.place == HOST and not need.cause.startswith(states))
    libraries = 0.6 * ranks + generators * (0.5 + 1.0 * workers) + 0.15
    assert others == pytest.approx(4 * one + libraries + run.buffer.store.max_memory_mib / 1024)
    staged = [need.gib for need in plan.needs if need.cause == "staged version"]
    assert staged == ([pytest.approx(2 * one)] if is_staged else [])
    update = plan.update
    assert update
    assert (update.learner_waits_s, update.update_s, update.pause_s) == pytest.approx(seconds, rel=0.02)


def test_only_generators_that_fetch_hold_a_version_and_an_engine_on_a_cpu_pauses_only_for_the_exchange(model) -> None:
    fetching, mapping = (plan_of(model, f"weights.transport={each}") for each in ("delta", "collective"))
    one = 4 * NUM_ELEMENTS / GIB
    assert gib(fetching, "generator-0", "published version, received") == pytest.approx(one)
    assert fetching.update is None
    assert fetching.total(HOST) - mapping.total(HOST) == pytest.approx(one)
    host = Machine(host_gib=1024)
    two, one = plan_of(model, machine=host), plan_of(model, "generators.engine.enforce_eager=false", machine=host)
    assert gib(two, "generator-0", "engine: second copy, for the next version") == pytest.approx(4 * NUM_ELEMENTS / GIB)
    assert not [need for need in one.needs if need.cause.startswith("engine: second copy")]
    assert two.update
    assert one.update
    # The load is in the pause, with an eighth of the layers compared.
    size = 4 * NUM_ELEMENTS
    assert (two.update.pause_s, one.update.pause_s) == pytest.approx((0.01, size / 0.155e9 * 1.125))
    assert two.update.learner_waits_s == pytest.approx(size / 3.1e9)
    assert two.update.update_s == pytest.approx(size * (1 / 3.1e9 + 2 / 10.6e9 + 1 / 0.155e9) + 0.01)


@pytest.mark.slow
@cases(
    "preset, gpus, num_billions",
    ("gsm8k_lora_1gpu", 1, 7.62),
    *(pytest.param(f"{name}_1gpu", 1, 1.54, marks=LONG) for name in SMALL),
    ("geometry_1gpu", 1, 3.75),
    pytest.param("gsm8k_8gpu", 8, 7.62, marks=LONG),
    ("gsm8k_32b_8gpu", 8, 32.8),
    ("gsm8k_moe_8gpu", 8, 30.5),
)
def test_a_preset_fits_the_gpus_it_is_for(preset, gpus, num_billions, tmp_path, monkeypatch):
    chosen = [f"experiment={preset}"]
    if preset == "environment_1gpu":
        chosen += ["generators.agent.environment=mine-v1", "generators.agent.python=envs/bin/python"]
    save_published(load(chosen), tmp_path)
    run = load([*chosen, f"model.path={tmp_path}"])
    plan = make_plan(run, Machine(host_gib=2048, gpus=gpus, gpu_gib=79))
    assert plan.problems == []
    # The second plan is of the same step, and tracing that takes longest. Only the larger of the two is listed.
    larger = ("activations of the largest microbatch", "gradients in float32, for the optimizer")
    (activations,) = {need.gib for need in plan.needs if need.cause in larger}
    monkeypatch.setattr("slipstream.launch.plan.step_bytes", lambda *_, **__: activations * GIB)
    (published,) = {need.gib for need in plan.needs if need.cause == "published versions, two"}
    if run.model.lora is None:
        assert published * GIB / 4 == pytest.approx(num_billions * 1e9, rel=0.01)
    else:
        assert published < 1
    assert make_plan(run, Machine(host_gib=2048, gpus=gpus, gpu_gib=20)).problems
